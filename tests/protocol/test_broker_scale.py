"""What an event costs the broker hardly depends on the number of runners."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from scripts.bench.broker_core import TERMS, World


def _lines_per_event(kind: str, num_runners: int) -> dict[str, float]:
    """Lines of Python that the core runs per fragment and per heartbeat, once every runner has delivered."""
    world = World(kind, num_runners)
    world.run(2 * num_runners)
    step, num_lines = world.step, dict.fromkeys(("Fragment", "RunnerState"), 0)
    num_events = dict(num_lines)

    def counted(event: Any, key: str) -> None:
        def count(frame: FrameType, what: str, arg: Any) -> Any:
            num_lines[key] += what == "line"
            return count

        if key not in num_lines:
            return step(event, key)
        num_events[key] += 1
        answers: list[Any] = []
        answer, world.answer = world.answer, answers.append
        sys.settrace(count)
        try:
            step(event, key)
        finally:
            sys.settrace(None)
            world.answer = answer
        for item in answers:
            answer(item)
        return None

    world.step = counted  # type: ignore[method-assign]
    world.run(200)
    return {key: num_lines[key] / max(1, num_events[key]) for key in num_lines}


@pytest.mark.parametrize("kind", TERMS)
def test_an_event_costs_as_much_with_many_runners_as_with_few(kind: str) -> None:
    few, many = _lines_per_event(kind, 20), _lines_per_event(kind, 200)
    for key in few:
        assert many[key] < 1.5 * few[key], key
