"""StageTimers: the mean duration of each stage of sampling and training, and the stages' names in results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlzmq.core import trace

__all__ = [
    "ENV_RESET_TIMER",
    "ENV_STEP_TIMER",
    "ENV_TO_MODULE_TIMER",
    "FRAGMENT_DELIVERY_TIMER",
    "FRAGMENT_ENCODE_TIMER",
    "INFERENCE_TIMER",
    "LEARNER_STAGES",
    "MODULE_TO_ENV_TIMER",
    "NUM_VECTOR_STEPS_PER_SAMPLE",
    "VECTOR_STEPS_TIMER",
    "WEIGHTS_WAIT_TIMER",
    "StageTimers",
]

# Keys below `env_runners` in a result, with slashes between levels, with RLlib's names.
ENV_RESET_TIMER = "env_reset_timer"
ENV_STEP_TIMER = "env_step_timer"
INFERENCE_TIMER = "rlmodule_inference_timer"
ENV_TO_MODULE_TIMER = "env_to_module_connector/connector_pipeline_timer"
MODULE_TO_ENV_TIMER = "module_to_env_connector/connector_pipeline_timer"
NUM_VECTOR_STEPS_PER_SAMPLE = "num_vector_steps_per_sample"
VECTOR_STEPS_TIMER = "vector_steps_timer"
FRAGMENT_ENCODE_TIMER = "fragment_encode_timer"
FRAGMENT_DELIVERY_TIMER = "fragment_delivery_timer"
WEIGHTS_WAIT_TIMER = "weights_wait_timer"

_IN_TRACE = {
    ENV_RESET_TIMER: "env",
    ENV_STEP_TIMER: "env",
    INFERENCE_TIMER: "inference",
    ENV_TO_MODULE_TIMER: "connector",
    MODULE_TO_ENV_TIMER: "connector",
}

LEARNER_STAGES = ("learner_forward_timer", "learner_backward_timer", "learner_reduce_timer")
"""Stages of an update's seconds in a learner's results."""


class StageTimers:
    """Sums by name: [number of calls, total]. Totals are seconds, or another quantity that is averaged per call.

    Sums of several runners, or of several fragments, are added: `take` them from one object and `merge` them into
    another.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, total: float, num_calls: int = 1) -> None:
        """Add a number of calls and their total time."""
        sums = self._sums.get(name)
        if sums is None:
            self._sums[name] = [num_calls, total]
        else:
            sums[0] += num_calls
            sums[1] += total

    def add_stage(self, name: str, begin_s: float, end_s: float) -> None:
        """Add one call between two times of ``time.perf_counter``, also to the trace."""
        self.add(name, end_s - begin_s)
        if trace.is_on:
            trace.span(_IN_TRACE[name], begin_s, end_s)

    def add_pieces(self, pipeline: Any, prefix: str = "") -> None:
        """Add the result of a connector pipeline's `take_piece_timers`, under ``<prefix>timers/connectors/<piece>``.

        Piece names have RLlib's form: ``NumpyToTensor`` becomes ``numpy_to_tensor``.
        """
        for piece, (num_calls, seconds) in pipeline.take_piece_timers().items():
            self.add(f"{prefix}timers/connectors/{_snake_case(piece)}", seconds, int(num_calls))

    def take(self) -> dict[str, list[float]]:
        """Return all sums as plain values, and reset them."""
        sums, self._sums = self._sums, {}
        return sums

    def merge(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Add what another's `take` returned."""
        mine = self._sums
        for name, (num_calls, total) in sums.items():
            known = mine.get(name)
            if known is None:
                mine[name] = [int(num_calls), total]
            else:
                known[0] += int(num_calls)
                known[1] += total

    def reduce(self) -> dict[str, Any]:
        """Return means per call, nested by name, and reset the sums."""
        result: dict[str, Any] = {}
        for name, (num_calls, total) in self.take().items():
            *groups, last = name.split("/")
            place = result
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = total / num_calls if num_calls else 0.0
        return result


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
