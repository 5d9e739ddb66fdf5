"""TrainingLoop: what happens in an iteration, in which order.

training step ──reports──► complete? ──► evaluation ──► result ──► callbacks ──► checkpoints
      ▲                       │ no
      └───────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlzmq.algorithms.checkpoint_keeper import CheckpointKeeper
from rlzmq.algorithms.face import Face
from rlzmq.algorithms.iterations import Iterations
from rlzmq.algorithms.results import merge_into
from rlzmq.core.metrics import MetricsLogger
from rlzmq.runtime.session import Session

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """Runs one iteration after the other.

    Args:
        session: Who samples and who learns.
        iterations: Takes in the reports.
        keeper: Writes checkpoints between two iterations.
        face: Whose callbacks are called.
        metrics: The algorithm's MetricsLogger.
    """

    def __init__(
        self,
        session: Session,
        iterations: Iterations,
        keeper: CheckpointKeeper,
        face: Face,
        metrics: MetricsLogger,
    ) -> None:
        self._session = session
        self._iterations = iterations
        self._keeper = keeper
        self._face = face
        self._metrics = metrics

    async def train(
        self, training_step: Callable[[], Awaitable[Any]], evaluate: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """One iteration; its result.

        Args:
            training_step, evaluate: The algorithm's.
        """
        iterations = self._iterations
        iterations.begin()
        while True:
            start = time.perf_counter()
            returned = await training_step()
            iterations.add_training_step(returned, time.perf_counter() - start)
            if iterations.is_complete():
                break
        is_whole = iterations.end()
        await self._tell_of_recreated_runners()
        interval = self._session.config.evaluation_interval
        is_due = interval is not None and iterations.num_done % interval == 0 and is_whole
        return await self._finish(await evaluate() if is_due else None)

    async def _tell_of_recreated_runners(self) -> None:
        recreated = self._session.take_recreated_runners()
        if recreated:
            await self._face.call(
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
            merge_into(evaluation, result.get("evaluation", {}))  # what callbacks logged
            result["evaluation"] = evaluation
        await self._face.call("on_train_result", metrics_logger=self._metrics, result=result)
        await self._face.log_result(result)
        await self._keeper.after_iteration(result)
        return result
