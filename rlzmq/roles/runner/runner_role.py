"""The runner role: an EnvRunner in its own process, sampling under leases.

                event loop                              sampler thread
broker ──LEASE──►  RunnerLink ──one lease──►  env_runner.sample_lease
broker ◄─FRAGMENT─ RunnerLink ◄─one fragment─  (columns are the frames)
broker ──weights─► RunnerLink   newest snapshot, loaded between two leases
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults, trace
from rlzmq.core.errors import DeadlineError
from rlzmq.core.process import apply_log_level, limit_memory
from rlzmq.learners.torch_threads import set_torch_threads
from rlzmq.roles.fragment_data import sample_with_metrics, take_fragment
from rlzmq.roles.hang_watch import EnvWatch
from rlzmq.roles.peer_link import PeerRole
from rlzmq.roles.runner.runner_link import RunnerLink
from rlzmq.roles.runner.sampling_round import UntilEnd
from rlzmq.runners.vector_env_runners import make_env_runner

__all__ = ["EnvRunnerRole", "make_env_runner"]


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
        with self.env_watch.work(is_reset=True):
            self.env_runner: Any = make_env_runner(config, worker_index, incarnation)
        self.env_runner.env_watch = self.env_watch
        self.env_watch.attend(self.env_runner.env)
        self._ended_round = 0
        faults.at("runner.started")

    # -- on the actor's thread ------------------------------------------------------------------

    def sample(self, **kwargs: Any) -> Any:
        """See EnvRunner.sample_batch."""
        with self._work():
            return self.env_runner.sample_batch(**kwargs)

    def sample_with_metrics(self, options: Mapping[str, Any]) -> Any:
        """See `roles.fragment_data.sample_with_metrics`."""
        with self._work():
            return sample_with_metrics(self.env_runner, options)

    def take_fragment(self, num_vector_steps: int, max_s: float | None = None) -> Any:
        """See `roles.fragment_data.take_fragment`."""
        with self._work():
            return take_fragment(self.env_runner, num_vector_steps, max_s)

    def _work(self) -> AbstractContextManager[None]:
        self.env_watch.attend(self.env_runner.env)  # it may have been replaced
        return self.env_watch.work()

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
            limits: Arguments of UntilEnd.
            options: Arguments of EnvRunner.sample; episodes are reset before the first call only.
        """
        until_end, metas = UntilEnd(**limits), []
        num_env_steps, start = 0, time.perf_counter()
        while True:
            wanted = until_end.next_env_steps(num_env_steps, time.perf_counter() - start)
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
