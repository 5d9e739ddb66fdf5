"""SerialPipeline: updates in one process, in which the runner samples and the learner trains in turn.

    runner.sample_lease ──fragments──► batch ──► learner.update ──weights v+1──► runner

The broker's function also plans these leases, and connector states are merged at the same point. A run with one runner
and one learner process therefore trains on the same numbers.
"""

from __future__ import annotations

import time
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.names import ALL_MODULES, BATCH_SOURCE
from rlzmq.core.update_plan import plan_lease
from rlzmq.driver.connector_sync import ConnectorSync
from rlzmq.driver.update_results import Accounting, UpdateResult, num_left_out
from rlzmq.wire.fragment_message import sorted_by_env

__all__ = ["SerialPipeline"]


class SerialPipeline:
    """Runs updates with a runner and a learner in this process.

    Args:
        config: The run's config.
        runner: An EnvRunner; None if updates need no fresh env steps.
        learner: A built Learner.
        connectors: Merges the runner's connector state.
        watch: Watches the calls of user code.

    Attributes:
        accounting: Account of all env steps so far.
    """

    def __init__(
        self, config: BaseConfig, runner: Any, learner: Any, connectors: ConnectorSync, watch: CallWatch
    ) -> None:
        self._plan = config.update_plan()
        self._num_env_steps = self._plan.num_env_steps
        self._runner = runner
        self._learner = learner
        self._connectors = connectors
        self._watch = watch
        self.accounting: Accounting = Accounting()

    async def start(self) -> None:
        """Send the learner's weights to the runner."""
        self.push_weights()

    async def run_update(self) -> UpdateResult:
        """Sample one batch with the newest weights, train on it, and pass the new weights to the runner."""
        # Small networks are slower on several threads, and very slow if other programs keep one of them waiting.
        with self._learner.ranks.torch_threads(), self._watch.call("an update"):
            return self._run_update()

    def _run_update(self) -> UpdateResult:
        start = time.perf_counter()
        update_id = self._learner.weights_seq_no
        batches, metas, num_steps = self._sample()
        sampled = time.perf_counter()
        num_consumed = self.accounting.num_consumed + num_steps
        learner = self._learner
        # Values that users log are reduced update by update, as in other runs.
        with_results = len(learner.metrics) > 0
        results = learner.update(
            episodes=batches,
            # If nothing is sampled, schedules follow the learner's count of trained steps.
            timesteps={"num_env_steps_sampled_lifetime": num_consumed} if num_consumed else None,
            with_results=with_results,
        )
        if not with_results and len(learner.metrics):  # logged for the first time
            results = learner.results()
        trained = time.perf_counter()
        num_kept = num_steps if self._learner.was_trained else 0
        self.accounting.add(trained=num_kept, dropped={"skipped": num_steps - num_kept})
        if learner.source.keeps_data:
            self.accounting.note_sources([{ALL_MODULES: {BATCH_SOURCE: learner.source_counts()}}])
        self.push_weights()
        if self._connectors.is_needed and self._runner is not None:
            state = self._connectors.merge(meta.get("connector_delta") for meta in metas)
            self._runner.set_connector_state(state)
        return UpdateResult(
            update_id=update_id,
            weights_version=self._learner.weights_seq_no,
            learner_results=[results] if results else lambda: [learner.results()],
            fragments=metas,
            num_env_steps_trained=learner.num_env_steps_of_update,
            timers={
                "sample": sampled - start,
                "learn": trained - sampled,
                "synch_weights": time.perf_counter() - trained,
            },
            steps_by_lag={0: num_steps} if num_steps else {},
        )

    async def settle(self) -> list[UpdateResult]:
        """Return [], since every update is complete when `run_update` returns."""
        return []

    def give_up_updates(self) -> None:
        """Do nothing, since an update that was interrupted has been undone."""

    def _sample(self) -> tuple[list[Any], list[dict[str, Any]], int]:
        """Return batches with the env steps of an update, all batches' metadata, and the number of these steps."""
        plan, runner = self._plan, self._runner
        if runner is not None:
            self._watch.attend(runner.env)  # it may have been replaced
        remaining = self._num_env_steps
        batches: list[Any] = []
        metas: list[dict[str, Any]] = []
        while remaining > 0:
            length = plan_lease(remaining, 1, runner.num_envs, plan.fragment_length)
            with self._watch.work():
                batch = runner.take_fragment(length)
            metas.append(batch.meta)
            if plan.keeps_episodes:
                batch, _ = sorted_by_env(batch, runner.num_envs)
            num_steps = batch.num_env_steps
            num_unusable = num_left_out(batch.meta)
            self.accounting.add(sampled=num_steps + num_unusable, dropped={"not_finite": num_unusable})
            if num_steps:
                batches.append(batch)
            remaining -= num_steps
        return batches, metas, self._num_env_steps - remaining

    def push_weights(self) -> None:
        """Load the learner's current weights and version into the runner, if there is one."""
        if self._runner is None:
            return
        self._runner.copy_weights(
            self._learner.module, self._learner.weights_seq_no, self.accounting.num_consumed
        )

    def tell_bottleneck(self, text: str) -> None:
        """Do nothing, since a serial run has no observers."""

    def fault_tolerance(self) -> dict[str, int]:
        """Return {}, since no process can die alone."""
        return {}

    async def pause(self) -> None:
        """Do nothing, since no work runs between two updates."""

    async def restart(self) -> None:
        """Continue from the state that was loaded into the learner."""
        if self._runner is None:
            return
        self.push_weights()
        self._runner.set_connector_state(self._connectors.get_state())

    async def stop(self) -> None:
        """Account for steps that were sampled but never trained."""
        self.accounting.drop_pending("stopped")
