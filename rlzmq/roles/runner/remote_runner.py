"""An external runner that joins a run by itself, from another terminal or machine, and may leave at any time.

    join file ──► config ──► EnvRunner ──► leases … ──► GOODBYE (from either side)

The run does not supervise it: when it dies, its leases are granted to others and only unsent steps are lost. When
the broker is restarted, it registers again and sends its uncommitted fragments. When the driver is restarted, it
is refused ("run_id"): `rlzmq runner` then joins the new run. With `rlzmq runner --env-runners`, it is an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from typing import Any

from rlzmq.actors.host import ActorThread
from rlzmq.config.base_config import BaseConfig
from rlzmq.core import trace
from rlzmq.core.errors import PeerLostError
from rlzmq.net.join_file import JoinFile
from rlzmq.protocol.events import Leave
from rlzmq.roles.peer_link import package_version, spaces_digest
from rlzmq.roles.runner.runner_role import EnvRunnerRole

__all__ = ["RemoteRunner"]

_LOOK_S = 0.5
_REGISTER_S = 0.02
# Random streams derive from the index: above those of the driver's runners.
_FIRST_INDEX = 2_000_000


class RemoteRunner:
    """One external env runner.

    Args:
        join: Addresses and keys.
        run_id: Id of the run, which came with the config.
        config: The run's config, with this machine's changes (e.g. the number of envs).
        config_digest: Digest of the run's config as received.
        patience_s: Seconds of silence after which the broker counts as lost.

    Attributes:
        name: Name under which it registers.
    """

    def __init__(
        self, join: JoinFile, run_id: str, config: BaseConfig, *, patience_s: float, config_digest: str = ""
    ) -> None:
        self._join = join
        self._run_id = run_id
        self._config = config
        self._patience_s = patience_s
        self._config_digest = config_digest
        self._thread = ActorThread("sampler")
        self._role: EnvRunnerRole | None = None
        self._stop_leaving: asyncio.TimerHandle | None = None
        self.name: str = f"runner-{secrets.token_hex(3)}@{socket.gethostname()[:100]}"

    @property
    def num_env_steps(self) -> int:
        """Env steps sampled so far."""
        link = self._role._link if self._role is not None else None
        return int(link.core.num_env_steps_sampled) if link is not None else 0

    async def start(self) -> str:
        """Make the envs and the module; return the name once the broker has registered this runner, or refused it.

        Raises:
            PeerLostError: The broker does not answer.
            Exception: The envs or the module could not be made.
        """
        trace.join(self._config.trace, self.name)
        index = _FIRST_INDEX + secrets.randbelow(1 << 30)
        self._role = await self._thread.run(lambda: EnvRunnerRole(self._config, index))
        self._role.use_actor_thread(self._thread.run)
        addresses = self._join.addresses
        await self._role.connect(
            {
                "run_id": self._run_id,
                "name": self.name,
                "incarnation": 0,  # assigned by the broker
                "data_address": addresses["data"],
                "weights_address": addresses["weights"],
                "curve": self._join.curve(),
                "package_version": package_version(),
                "config_digest": self._config_digest,
                "spaces_digest": spaces_digest(self._role.get_spaces()["__env_single__"]),
            }
        )
        link: Any = self._role._link
        deadline = link.now() + self._patience_s
        while not link.core.is_welcome and not link.ended.done():
            if link.now() > deadline:
                raise PeerLostError(f"the broker at {addresses['data']} does not register this runner")
            await asyncio.wait((link.ended,), timeout=_REGISTER_S)
        return self.name

    async def wait(self) -> tuple[str, str]:
        """Sample until the end; return (reason, detail): ("goodbye", …) if the run ended, ("left", …) after `leave`.

        ("run_id", …) if another run is there now: the driver was started again.

        Raises:
            Exception: See `work`.
        """
        while (end := (await self.work())[1]) is None:
            pass
        return end

    async def work(self) -> tuple[int, tuple[str, str] | None]:
        """Return `num_env_steps`, with what `wait` returns, or None: as soon as more has been sampled, or at the end.

        Raises:
            PeerLostError: The broker was silent for too long.
            Exception: The env, a connector or the module failed.
        """
        assert self._role is not None
        link, num_env_steps = self._role._link, self.num_env_steps
        while self.num_env_steps == num_env_steps:
            done, _ = await asyncio.wait((link.ended,), timeout=_LOOK_S)
            if done:
                return self.num_env_steps, await link.ended
            silence_s = link.now() - link.core.heard_at
            if silence_s >= self._patience_s:
                raise PeerLostError(
                    f"the broker at {self._join.addresses['data']} has been silent for {silence_s:.0f} s"
                )
        return self.num_env_steps, None

    async def leave(self, reason: str = "interrupted", *, within_s: float = 10.0) -> None:
        """Take no more leases; `wait` returns once the current fragment is with the broker.

        Args:
            reason: Reason for the broker's log.
            within_s: Seconds after which `wait` returns in any case; only the current fragment is lost then.
        """
        link: Any = self._role._link if self._role is not None else None
        if link is not None and self._stop_leaving is None and not link.ended.done():
            link.handle(Leave(reason))
            loop = asyncio.get_running_loop()
            self._stop_leaving = loop.call_later(within_s, self._give_up_leaving, link)

    def _give_up_leaving(self, link: Any) -> None:
        if not link.ended.done():
            link.ended.set_result(("left", "before its last fragment was finished"))

    async def stop(self) -> None:
        """Close sockets and envs. Idempotent."""
        if self._stop_leaving is not None:
            self._stop_leaving.cancel()
        if self._role is not None:
            role, self._role = self._role, None
            await role.disconnect()
            # An env that is still stepping ends with the process.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._thread.run(role.close)
        self._thread.close()
