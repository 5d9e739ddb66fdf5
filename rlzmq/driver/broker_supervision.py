"""The broker of a run: BrokerSupervisor restarts it on the same addresses if it dies or hangs.

Peers reconnect, notice the new incarnation and send the broker what they hold, so no accepted data is lost
(`rlzmq.protocol.broker.core`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Any

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.actors.system import ActorSystem
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.patience import RestartPolicy, Supervision
from rlzmq.driver.join_files import JoinKeys, at_host, keys_file, listen_addresses, write_join_files
from rlzmq.driver.supervision import Supervisor, lost_error, restarted, spawn_within, start_first
from rlzmq.roles.broker_role import BrokerRole

__all__ = ["BrokerSupervisor"]

_log = logging.getLogger("rlzmq.driver")

_POLICY = RestartPolicy(max_restarts=5, window_s=60.0)


class BrokerSupervisor(Supervisor):
    """Starts and restarts the broker's process.

    Args:
        system: The ActorSystem; the sockets are in its private directory.
        run_id: Id of the run.
        config: Source of the fault-tolerance settings.
        keys: Keys for external peers; None: no such peers.
        control_address: Address for external learners; None: no such learners.

    Attributes:
        addresses: ``{"data": …, "weights": …}``, the same for every incarnation.
        remote_addresses: Addresses for external peers, once the broker listens for them; {} before.
        join_files: Role → the join file; {} if no peer may join.
    """

    def __init__(
        self,
        system: ActorSystem,
        run_id: str,
        config: BaseConfig,
        keys: JoinKeys | None = None,
        control_address: str | None = None,
    ) -> None:
        super().__init__()
        self._system = system
        self._run_id = run_id
        self._config = config
        self._machine = Supervision(_POLICY)
        self._handle: Any = None
        self._incarnation = 0
        directory = system.run_directory
        self.addresses: dict[str, Any] = {name: directory.address(name) for name in ("data", "weights")}
        self._keys = keys
        self._control_address = control_address
        self._listen: dict[str, str] | None = None
        if keys is not None and config.listen is not None:
            wanted = listen_addresses(config.listen)
            self._listen = {name: keys.former(name, address) for name, address in wanted.items()}
        self.remote_addresses: dict[str, str] = {}
        self.join_files: dict[str, Path] = {}

    @property
    def handle(self) -> Any:
        """The broker's actor handle."""
        return self._handle

    async def start(self) -> None:
        """Start the broker and its supervision.

        Raises:
            ConfigurationError: `config.listen` is not available, or the join file cannot be written.
        """
        await start_first(
            self._spawn,
            self._machine,
            "the broker",
            is_replaced=self._config.restart_failed_broker,
        )
        self.num_restarts: int = self._machine.incarnation
        if self._keys is not None:
            self._write_join_files(self._keys)
        self._start(self._supervise(), "supervise the broker")

    def note_work(self) -> None:
        """Reset the failure count, after an update was committed."""
        self._machine.note_work()

    async def stop(self) -> None:
        """Stop the supervision, then the broker."""
        await super().stop()
        if self._handle is not None:
            await asyncio.gather(self._handle.stop(), return_exceptions=True)
        if self._config.join_file is not None:
            keys_file(self._config.join_file).unlink(missing_ok=True)
        for file in self.join_files.values():
            file.unlink(missing_ok=True)  # the keys in it are now useless

    def _write_join_files(self, keys: JoinKeys) -> None:
        config = self._config
        path = config.join_file or self._system.run_directory.path / "join.toml"
        addresses = {
            name: at_host(address, config.advertise) for name, address in self.remote_addresses.items()
        }
        if self._control_address is not None:
            addresses["control"] = self._control_address
        self.join_files = write_join_files(
            keys, path, addresses, self._run_id, keeps=config.join_file is not None
        )
        print(f"env runners may join:  rlzmq runner --join {self.join_files['runner']}", file=sys.stderr)
        if self._control_address is not None:
            print(
                f"waiting for learners:  rlzmq learner --join {self.join_files['learner']}", file=sys.stderr
            )

    async def _spawn(self) -> None:
        # Peers order brokers by this number, so it must rise even if the wall clock is set back.
        self._incarnation = max(self._incarnation + 1, int(time.time() * 1000))
        timeout_s = self._config.process_start_timeout_s
        spawn = self._system.spawn(
            BrokerRole,
            self._run_id,
            {},
            addresses=self.addresses,
            incarnation=self._incarnation,
            quarantine_dir=self._config.quarantine_dir,
            listen=self._listen,
            curve=self._keys.curve if self._keys is not None else None,
            roles=self._keys.roles if self._keys is not None else None,
            trace_path=self._config.trace,
            memory_limit_bytes=self._config.broker_memory_limit_bytes,
            name="broker",
            deadline_s=timeout_s,
            patience=self._machine.patience,
        )
        handle = await spawn_within(timeout_s, "process_start_timeout_s", spawn)
        try:
            addresses = await handle.start()
            if self._listen is not None:  # later brokers use the ports of this one
                self._listen = {name: addresses[f"remote_{name}"] for name in ("data", "weights")}
                self.remote_addresses = self._listen
        except BaseException:
            handle.kill()
            await handle.exited  # until then its name and its addresses are taken
            raise
        self._handle = handle
        self._machine.started(time.monotonic())

    async def _supervise(self) -> None:
        while not self.failed.done():
            await restarted(self._restart, self._decide, await self._failure(self._handle))

    async def _failure(self, handle: ActorHandle) -> BaseException:
        """Wait for the broker's end, or for an internal error of it, which ends it."""
        try:
            await handle.call("run_until_failure")
        except ActorLostError:
            await handle.exited
            return lost_error(handle)
        except Exception as error:
            handle.kill()
            await handle.exited
            return error
        await handle.exited
        return lost_error(handle)

    def _decide(self, error: BaseException) -> float | None:
        delay_s = self._machine.failed(time.monotonic())
        if not self._config.restart_failed_broker or delay_s is None:
            self.fail(error)
            return None
        return delay_s

    async def _restart(self) -> None:
        await self._spawn()
        self.num_restarts += 1
