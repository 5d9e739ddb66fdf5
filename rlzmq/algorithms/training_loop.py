"""TrainingLoop: the order of the steps in an iteration.

training step ──reports──► complete? ──► evaluation ──► result ──► callbacks ──► checkpoints
      ▲                       │ no           ▲
      └───────────────────────┘              │
evaluation runners, if parallel to training ─┘
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlzmq.algorithms.callback_dispatch import CallbackDispatch
from rlzmq.algorithms.checkpoint_keeper import CheckpointKeeper
from rlzmq.algorithms.evaluation import Evaluation
from rlzmq.algorithms.iterations import Iterations
from rlzmq.algorithms.results import merge_into
from rlzmq.core.errors import StandstillError
from rlzmq.core.metrics import MetricsLogger
from rlzmq.driver.session import Session

_LAST_CHECKPOINT_S = 10.0

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """Runs iterations.

    Args:
        session: Owner of the env runners and learners.
        iterations: Records the reports.
        evaluation: Runs evaluation rounds when due.
        keeper: Writes checkpoints between two iterations.
        dispatch: Calls callbacks.
        metrics: The algorithm's MetricsLogger.
    """

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

    async def train(
        self, training_step: Callable[[], Awaitable[Any]], evaluate: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Run one iteration and return its result.

        Args:
            training_step, evaluate: The algorithm's methods.
        """
        iterations, evaluation = self._iterations, self._evaluation
        iterations.begin()
        in_parallel = evaluation.is_parallel and self._evaluation_is_due(iterations.num_done + 1)
        try:
            if in_parallel:
                await self._begin_parallel_round()
            while True:
                start = time.perf_counter()
                returned = await training_step()
                iterations.add_training_step(returned, time.perf_counter() - start)
                if iterations.is_complete() or evaluation.has_failed:
                    break
            evaluation.end()
            is_whole = iterations.end()
            await self._report_recreated_runners()
            metrics = None
            if is_whole and self._evaluation_is_due(iterations.num_done):
                metrics = await (evaluation.finish() if in_parallel else evaluate())
        except StandstillError:
            await self._keeper.write_if_possible(_LAST_CHECKPOINT_S)
            raise
        finally:
            await evaluation.abandon()
            iterations.results.release_logged()
        return await self._finish(metrics)

    def _evaluation_is_due(self, iteration: int) -> bool:
        interval = self._session.config.evaluation_interval
        return interval is not None and iteration % interval == 0

    async def _begin_parallel_round(self) -> None:
        if self._evaluation.calls_custom_function:
            # The function may be called on another thread than this loop's, and log there.
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

    async def _finish(self, evaluation: dict[str, Any] | None) -> dict[str, Any]:
        session = self._session
        fault_tolerance = {**session.fault_tolerance(), **self._keeper.counters()}
        result = self._iterations.build_result(fault_tolerance)
        result["config_seed"] = session.config.seed
        if evaluation is not None:
            merge_into(evaluation, result.get("evaluation", {}))  # values logged by callbacks
            result["evaluation"] = evaluation
        await self._dispatch.call("on_train_result", metrics_logger=self._metrics, result=result)
        await self._dispatch.log_result(result)
        await self._keeper.after_iteration(result)
        return result
