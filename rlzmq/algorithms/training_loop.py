"""TrainingLoop: the order of the steps in an iteration.

training step ──reports──► complete? ──► evaluation ──► result ──► callbacks ──► checkpoints
      ▲                       │ no           ▲
      └───────────────────────┘              │
evaluation runners, if parallel to training ─┘
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from rlzmq.actors.host import awaited
from rlzmq.algorithms.callback_dispatch import CallbackDispatch
from rlzmq.algorithms.checkpoint_keeper import CheckpointKeeper
from rlzmq.algorithms.evaluation import Evaluation
from rlzmq.algorithms.results import ResultBuilder, merge_into
from rlzmq.config.base_config import BaseConfig
from rlzmq.core import trace
from rlzmq.core.errors import Interrupted, StandstillError
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.plain import decode, encode_supported
from rlzmq.driver.session import Session

__all__ = ["Iterations", "TrainingLoop"]

_LAST_CHECKPOINT_S = 10.0
_LOOK_S = 0.1


class TrainingLoop:
    """Runs iterations."""

    def __init__(
        self,
        session: Session,
        iterations: Iterations,
        evaluation: Evaluation,
        keeper: CheckpointKeeper,
        dispatch: CallbackDispatch,
        metrics: MetricsLogger,
    ) -> None:
        self._session = session
        self._iterations = iterations
        self._evaluation = evaluation
        self._keeper = keeper
        self._dispatch = dispatch
        self._metrics = metrics
        self._last_evaluation: dict[str, Any] = {}

    async def train(
        self,
        training_step: Callable[[], Awaitable[Any]],
        evaluate: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
    ) -> dict[str, Any]:
        """Run one iteration and return its result."""
        iterations, evaluation = self._iterations, self._evaluation
        iterations.begin()
        config = self._session.config
        in_parallel = evaluation.is_parallel and _is_due(config.evaluation_interval, iterations.num_done + 1)
        try:
            if in_parallel:
                await self._begin_parallel_round()
            while True:
                start = time.perf_counter()
                returned = await awaited(training_step())
                end = time.perf_counter()
                iterations.add_training_step(returned, end - start)
                if trace.is_on:
                    trace.span("training_step", start, end)
                if iterations.is_complete() or evaluation.has_failed:
                    break
            evaluation.end()
            is_whole = iterations.end()
            await self._report_recreated_runners()
            metrics: dict[str, Any] = {}
            if is_whole and _is_due(config.evaluation_interval, iterations.num_done):
                metrics |= await self._evaluated(evaluation.finish() if in_parallel else evaluate())
                is_whole = not iterations.take_cut()
            if is_whole and _is_due(config.offline_evaluation_interval, iterations.num_done):
                metrics |= await evaluation.run_offline()
        except StandstillError:
            await self._keeper.write_if_possible(_LAST_CHECKPOINT_S)
            raise
        finally:
            await evaluation.abandon()
            iterations.results.release_logged()
        return await self._finish(metrics)

    async def _evaluated(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the result of an evaluation round; {} if the iteration is cut short in the meantime."""
        iterations = self._iterations
        if iterations.is_cut_short:
            work.close()
            return {}
        if not self._session.config.evaluation_num_env_runners:
            try:
                return await work
            except Interrupted:
                if not iterations.is_cut_short:
                    raise
                return {}
        task = asyncio.ensure_future(work)
        try:
            while not iterations.is_cut_short:
                if (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
                    return task.result()
            return {}
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    async def _begin_parallel_round(self) -> None:
        if self._evaluation.calls_custom_function:
            # The function may be called, and log, on another thread than this loop's.
            self._iterations.results.hold_logged()
        await self._evaluation.begin(self._iterations.last_training_s)

    async def _report_recreated_runners(self) -> None:
        recreated = self._session.take_recreated_runners()
        if recreated:
            await self._dispatch.call(
                "on_env_runners_recreated",
                metrics_logger=self._metrics,
                env_runner_group=self._session.env_runner_group,
                env_runner_indices=recreated,
                is_evaluation=False,
            )

    async def _finish(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        session = self._session
        fault_tolerance = {**session.fault_tolerance(), **self._keeper.counters()}
        start = time.perf_counter()
        result = self._iterations.build_result(fault_tolerance)
        result["config_seed"] = session.config.seed
        session.tell_bottleneck("{stage}: {advice}".format_map(result["bottleneck"]))
        if evaluation:
            merge_into(evaluation, result.get("evaluation", {}))  # values logged by callbacks
            result["evaluation"] = self._last_evaluation = evaluation
        elif self._last_evaluation:
            merge_into(result.setdefault("evaluation", {}), copy.deepcopy(self._last_evaluation))
        await self._dispatch.call("on_train_result", metrics_logger=self._metrics, result=result)
        await self._dispatch.log_result(result)
        await self._keeper.after_iteration(result, evaluation)
        if trace.is_on:
            trace.span("report", start, time.perf_counter(), training_iteration=result["training_iteration"])
        return result


def _is_due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


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
