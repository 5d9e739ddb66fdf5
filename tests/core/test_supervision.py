"""Restart decisions: back-off doubles, the budget holds in every window, incarnations never repeat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.core.patience import RestartPolicy, Supervision


def test_without_restarts_the_first_death_gives_up() -> None:
    assert Supervision(RestartPolicy(max_restarts=0)).failed(1.0) is None


def test_delays_double_up_to_the_maximum() -> None:
    machine = Supervision(RestartPolicy(max_restarts=12, window_s=1e6, max_delay_s=5.0))
    delays = []
    for number in range(8):
        delays.append(machine.failed(float(number)))
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_a_long_run_starts_the_delays_over() -> None:
    machine = Supervision(RestartPolicy(max_restarts=9))
    machine.failed(0.0)
    machine.failed(1.0)
    machine.started(2.0)
    assert (machine.failed(62.0), machine.incarnation) == (0.1, 3)


@pytest.mark.parametrize(
    "wrong", [{"max_restarts": -1}, {"window_s": 0.0}, {"first_delay_s": -1.0}, {"max_delay_s": 0.0}]
)
def test_senseless_policies_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RestartPolicy(**wrong)  # type: ignore[arg-type]


@given(
    gaps=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60),
    max_restarts=st.integers(0, 6),
    runs=st.booleans(),
)
def test_no_window_ever_holds_more_restarts_than_the_budget(
    gaps: list[float], max_restarts: int, runs: bool
) -> None:
    policy = RestartPolicy(max_restarts=max_restarts)
    machine = Supervision(policy)
    now, restarts, incarnations = 0.0, [], [0]
    for gap in gaps:
        now += gap
        if runs:
            machine.started(now - gap / 2)
        delay_s = machine.failed(now)
        if delay_s is None:
            assert machine.num_failures == max_restarts + 1
            break
        assert policy.first_delay_s <= delay_s <= policy.max_delay_s
        restarts.append(now)
        incarnations.append(machine.incarnation)
    for end in restarts:
        assert sum(end - policy.window_s <= at <= end for at in restarts) <= max_restarts
    assert incarnations == list(range(len(incarnations)))
