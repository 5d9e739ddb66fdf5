"""The runner role: an EnvRunner in its own process, sampling under leases.

                event loop                              sampler thread
broker ──LEASE──►  RunnerLink ──one lease──►  env_runner.sample_lease
broker ◄─FRAGMENT─ RunnerLink ◄─one fragment─  (columns are the frames)
broker ──weights─► RunnerLink   newest snapshot, loaded between two leases
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rlzmq.actors.host import ActorThread
from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults, trace
from rlzmq.core.errors import DeadlineError, PeerLostError
from rlzmq.core.patience import HEARTBEAT_S, TICK_S
from rlzmq.core.process import apply_log_level, limit_memory
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.execution import set_torch_threads
from rlzmq.net.keys import JoinFile
from rlzmq.roles.hang_watch import EnvWatch
from rlzmq.roles.peer_link import PeerRole, package_version, spaces_digest
from rlzmq.roles.runner_link import RunnerLink
from rlzmq.runners.vector_env_runners import make_env_runner

__all__ = ["EnvRunnerRole", "RemoteRunner", "make_env_runner"]


_log = logging.getLogger("rlzmq.runners")

_BUSY_S = 1.0  # how long a runner that is to end waits for the call of user code that it is in


class EnvRunnerRole(PeerRole):
    """The actor in a runner's process.

    Plain methods run on the actor's thread, the only one that uses the env runner; `async` methods run
    on its event loop.

    Args:
        config: The run's config.
        worker_index: 1-based index within the group (0: the local runner).
        incarnation: How many times this runner was restarted.
        is_local: It shares its process with other roles: an environment that hangs then raises an error
            instead of ending the process.
        place: Its name in `rlzmq.core.faults`; "runner-N" if "".
    """

    def __init__(
        self,
        config: BaseConfig,
        worker_index: int,
        incarnation: int = 0,
        *,
        is_local: bool = False,
        place: str = "",
    ) -> None:
        set_torch_threads(config)
        apply_log_level(config)
        faults.arm(place or f"runner-{worker_index - 1}", incarnation)
        trace.join(config.trace, f"{'evaluation' if config.in_evaluation else 'env'} runner {worker_index}")
        faults.at("runner.start")
        limit_memory(config.env_runner_memory_limit_bytes, "env_runner_memory_limit_bytes")
        self.config: BaseConfig = config
        self._loop: asyncio.AbstractEventLoop | None = None
        on_hang = self._report_hang if is_local else None
        self.env_watch: EnvWatch = EnvWatch(config, f"env runner {worker_index}", on_hang)
        with self.env_watch.call(self.env_watch.RESETS):
            self.env_runner: Any = make_env_runner(config, worker_index, incarnation)
        self.env_runner.env_watch = self.env_watch
        self.env_watch.attend(self.env_runner.env)
        self._ended_round = 0
        faults.at("runner.started")

    # -- on the actor's thread ------------------------------------------------------------------

    def sample(self, **kwargs: object) -> Any:
        """See EnvRunner.sample_batch."""
        with self._work():
            return self.env_runner.sample_batch(**kwargs)

    def sample_with_metrics(self, options: Mapping[str, Any]) -> Any:
        """See `EnvRunner.sample_with_metrics`."""
        with self._work():
            return self.env_runner.sample_with_metrics(options)

    def take_fragment(self, num_vector_steps: int, max_s: float | None = None) -> EpisodeBatch:
        """See `EnvRunner.take_fragment`."""
        with self._work():
            return self.env_runner.take_fragment(num_vector_steps, max_s)  # type: ignore[no-any-return]

    def _work(self) -> AbstractContextManager[None]:
        self.env_watch.attend(self.env_runner.env)  # it may have been replaced
        return self.env_watch.call(self.env_watch.STEPS)

    def measure(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sample and return only the batch's meta."""
        return [self.sample_with_metrics(options).meta]

    def set_weights(
        self, snapshot: object, version: int, generation: int = 0, num_env_steps: int | None = None
    ) -> bool:
        """See EnvRunner.set_weights."""
        return self.env_runner.set_weights(  # type: ignore[no-any-return]
            snapshot, version=version, generation=generation, num_env_steps=num_env_steps
        )

    def get_connector_delta(self) -> dict[str, Any]:
        """See EnvRunner.get_connector_delta."""
        return self.env_runner.get_connector_delta()  # type: ignore[no-any-return]

    def set_connector_state(self, state: Mapping[str, Any]) -> None:
        """See EnvRunner.set_connector_state."""
        self.env_runner.set_connector_state(state)

    def get_metrics(self) -> Any:
        """See EnvRunner.get_metrics."""
        return self.env_runner.get_metrics()

    def get_spaces(self) -> dict[str, Any]:
        """See EnvRunner.get_spaces."""
        return self.env_runner.get_spaces()  # type: ignore[no-any-return]

    def get_state(self) -> dict[str, Any]:
        """See EnvRunner.get_state."""
        return self.env_runner.get_state()  # type: ignore[no-any-return]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See EnvRunner.set_state."""
        self.env_runner.set_state(state)

    def begin_again(self, number: int) -> None:
        """See EnvRunner.begin_again."""
        self.env_runner.begin_again(number)

    def change_modules(self, config: BaseConfig, synced_module_ids: list[str] | None) -> str:
        """Call EnvRunner.change_modules; return the digest of the new weights layout, for `expect_layout`."""
        self.config = config
        self.env_runner.change_modules(config, synced_module_ids)
        return str(self.env_runner.get_weights_layout().digest)

    def close(self) -> None:
        """Close the env."""
        self.env_watch.close()
        self.env_runner.stop()
        trace.flush()

    # -- on the event loop ----------------------------------------------------------------------

    async def connect(self, link: Mapping[str, Any]) -> None:
        """Connect to the broker and take leases."""
        faults.at("runner.connect")
        self._loop = asyncio.get_running_loop()
        self._link = RunnerLink(self, self._run_blocking, **link)
        await self._link.start()

    async def stop(self) -> None:
        """Leave the broker and close the env, after the current vector step; not after a longer one."""
        await self.disconnect()
        self.env_runner.interrupt()
        is_free = self._run_blocking(lambda: None)
        if (await asyncio.wait((is_free,), timeout=_BUSY_S))[0]:
            await super().stop()
        else:
            is_free.cancel()
            _log.info(
                "Env runner %d: its env is not closed, a step takes too long", self.env_runner.worker_index
            )

    async def expect_layout(self, digest: str) -> None:
        """Accept only weights of this layout from now on."""
        if self._link is not None:
            self._link.core.weights.layout_digest = digest

    async def measure_until_end(
        self, round_id: int, limits: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Call `measure` repeatedly until `end_round`, at least once; other blocking methods may run in between.

        Args:
            round_id: Id of the round; 0: it is over already.
            limits: See `SamplingRound`.
            options: Arguments of EnvRunner.sample; episodes are reset before the first call only.
        """
        metas: list[dict[str, Any]] = []
        num_env_steps, start = 0, time.perf_counter()
        while True:
            wanted = _next_env_steps(num_env_steps, time.perf_counter() - start, **limits)
            metas += await self._run_blocking(partial(self.measure, {**options, "num_timesteps": wanted}))
            num_env_steps += metas[-1]["num_env_steps"]
            options = {**options, "force_reset": False}
            if self._ended_round >= round_id:
                return metas

    async def end_round(self, round_id: int) -> None:
        """Let `measure_until_end` of this and earlier rounds return after the current call."""
        self._ended_round = max(self._ended_round, round_id)

    async def run_until_failure(self) -> tuple[str, str]:
        """Return (reason, detail) once the connection to the broker has ended; raise errors of sampling."""
        return await self._link.ended if self._link is not None else ("", "")

    def _report_hang(self, error: DeadlineError) -> None:
        """End the link because an environment hangs; called on the watching thread."""
        link = self._link
        if self._loop is not None and link is not None:
            self._loop.call_soon_threadsafe(link.fail, error)


def _next_env_steps(
    num_env_steps: int, elapsed_s: float, *, min_env_steps: int, max_env_steps: int, expected_s: float | None
) -> int:
    """Return the env steps of the next sample call of a round: as many as end it when it is expected to end."""
    wanted = 0.0
    if expected_s is not None and elapsed_s > 0:
        wanted = num_env_steps / elapsed_s * (expected_s - elapsed_s)
    return min(max(int(wanted), min_env_steps), max_env_steps)


# Random streams derive from the index: above those of the driver's runners.
_FIRST_INDEX = 2_000_000


class RemoteRunner:
    """An external runner that joins a run by itself, from another terminal or machine, and may leave at any time.

    The run does not supervise it: when it dies, its leases are granted to others and only unsent steps are lost. When
    the broker is restarted, it registers again and sends its uncommitted fragments. When the driver is restarted, it
    is refused ("run_id"): `rlzmq runner` then joins the new run. With `rlzmq runner --env-runners`, it is an actor.

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
            await asyncio.wait((link.ended,), timeout=TICK_S)
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
            done, _ = await asyncio.wait((link.ended,), timeout=HEARTBEAT_S)
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
            link.leave(reason)
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
