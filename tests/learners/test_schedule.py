"""Schedules over lifetime env steps."""

from __future__ import annotations

import pytest

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.update_plan import Schedule


def test_a_number_is_constant() -> None:
    schedule = Schedule(0.5)
    assert schedule.is_constant
    assert [schedule.value(t) for t in (0, 10, 10**9)] == [0.5] * 3


def test_points_are_interpolated_and_the_last_value_is_held() -> None:
    schedule = Schedule([(0, 1.0), (100, 0.5), (300, 0.1)], name="lr")
    assert schedule.value(0) == 1.0
    assert schedule.value(50) == pytest.approx(0.75)
    assert schedule.value(100) == pytest.approx(0.5)
    assert schedule.value(200) == pytest.approx(0.3)
    assert schedule.value(10**9) == 0.1


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([(0, 1.0)], "1 point"),
        ([(5, 1.0), (10, 0.0)], "5 env steps instead of 0"),
        ([(0, 1.0), (10, 0.5), (10, 0.0)], "rising env steps"),
        ([(0, 1.0), 3], "the point 3"),
        ("fast", "'fast'"),
        (True, "True"),
    ],
)
def test_wrong_schedules_are_refused_with_their_name(value: object, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"entropy_coeff.*{complaint}"):
        Schedule(value, name="entropy_coeff")  # type: ignore[arg-type]
