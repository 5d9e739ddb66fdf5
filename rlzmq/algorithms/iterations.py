"""Iterations: how many there were, whether the current one is complete, and the reports of its training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rlzmq.algorithms.results import ResultBuilder
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.plain import decode, encode_supported
from rlzmq.driver.session import Session

__all__ = ["Iterations"]


class Iterations:
    """Counts iterations and collects their reports.

    Args:
        config: The run's config; `config.reporting()` sets the length of an iteration.
        session: Provides the reports.
        metrics: The algorithm's MetricsLogger.

    Attributes:
        is_cut_short: Whether `cut_short` was called for the current iteration.
        num_done: Number of completed iterations.
        last_training_s: Duration of the last iteration's training in seconds; None before the first.
        results: Builds results from the reports.
        counters: Numbers that callbacks keep under names of their own, as ``algorithm._counters`` in RLlib.
    """

    def __init__(self, config: BaseConfig, session: Session, metrics: MetricsLogger) -> None:
        self._config = config
        self._session = session
        self._metrics = metrics
        self.is_cut_short: bool = False
        self.num_done: int = 0
        self.last_training_s: float | None = None
        self.results: ResultBuilder = ResultBuilder(config, metrics)
        self.counters: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin the next iteration."""
        self.results.begin_iteration()

    def add_training_step(self, returned: Any, seconds: float) -> None:
        """Record the end of a `training_step`.

        Raises:
            ValueError: It returned something other than None.
        """
        if returned is not None:
            raise ValueError(
                f"training_step() returned a {type(returned).__name__}; expected None: report values through "
                "self.metrics.log_value(…)."
            )
        for metas in self._session.take_sampled_metas():
            self.results.add_fragments(metas)
        accounting = self._session.accounting
        accounting.add(sampled=max(self.results.num_env_steps_lifetime - accounting.sampled, 0))
        for results, num_env_steps in self._session.take_learner_results():
            self.results.add_learner_results(results, num_env_steps)
        self.results.add_training_step(seconds)

    async def settle(self) -> None:
        """Wait until no update is open, and record the reports of updates that ran ahead of the training steps.

        Called before the learners' state is read or replaced.
        """
        for report in await self._session.settle():
            self.results.add_update(report)

    def cut_short(self) -> None:
        """End the current iteration after the current update, and its evaluation. A signal handler may call this."""
        self.is_cut_short = True

    def is_complete(self) -> bool:
        """Return whether the minima of `config.reporting()` are met or `cut_short` was called."""
        config, results = self._config, self.results
        return self.is_cut_short or (
            results.time_this_iter_s >= (config.min_time_s_per_iteration or 0.0)
            and results.num_env_steps_this_iter >= (config.min_sample_timesteps_per_iteration or 0)
            and results.num_training_step_calls * config.total_train_batch_size
            >= (config.min_train_timesteps_per_iteration or 0)
        )

    def end(self) -> bool:
        """End the training of the current iteration; return False if it was cut short."""
        self.num_done += 1
        self.last_training_s = self.results.time_this_iter_s
        return not self.take_cut()

    def take_cut(self) -> bool:
        """Return whether `cut_short` was called since the last call of this method."""
        was_cut, self.is_cut_short = self.is_cut_short, False
        return was_cut

    def build_result(self, fault_tolerance: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of the iteration that ended (see ResultBuilder.build)."""
        return self.results.build(self.num_done, self._session.accounting, fault_tolerance)

    # -- checkpoints ----------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the component "algorithm" of a checkpoint: counters, smoothing windows and metrics."""
        return {
            "iteration": self.num_done,
            "results": self.results.get_state(),
            "metrics": encode_supported(self._metrics.get_state()),
            "counters": encode_supported(dict(self.counters)),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`, or a part of it."""
        self.num_done = state.get("iteration", self.num_done)
        if "results" in state:
            self.results.set_state(state["results"])
        if "metrics" in state:
            self._metrics.set_state(decode(state["metrics"]))
        if "counters" in state:
            self.counters.clear()
            self.counters.update(decode(state["counters"]))
