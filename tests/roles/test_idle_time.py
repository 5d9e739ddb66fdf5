"""What an env runner waits for between two leases, on made clocks."""

from __future__ import annotations

import pytest

from rlzmq.core.metrics import StageTimers
from rlzmq.roles.runner_role import IdleTime


def idle_times(
    *events: tuple[float, bool, bool], ended: float = 10.0, begins: float = 20.0
) -> tuple[float, float]:
    """Seconds of delivery and of waiting for weights, of looks at (time, has undelivered, lacks weights)."""
    timers = StageTimers()
    idle = IdleTime(timers)
    idle.lease_begins(5.0)  # the first lease has nothing before it
    assert not timers.take()
    idle.lease_ended(ended)
    for now, has_undelivered, lacks_weights in events:
        idle.look(now, has_undelivered=has_undelivered, lacks_weights=lacks_weights)
    idle.lease_begins(begins)
    sums = timers.take()
    idle.look(begins + 1, has_undelivered=False, lacks_weights=True)  # it samples: nothing is waited for
    assert not idle.waits_for_delivery
    return sums["fragment_delivery_timer"][1], sums["weights_wait_timer"][1]


@pytest.mark.parametrize(
    ("events", "delivery_s", "weights_s"),
    [
        ([], 10.0, 0.0),
        ([(12.0, True, False), (13.0, False, False), (14.0, False, False)], 3.0, 0.0),
        ([(11.0, False, False), (16.0, False, True), (18.0, False, True)], 1.0, 4.0),
        ([(11.0, True, True), (15.0, False, True)], 5.0, 5.0),
    ],
)
def test_idle_time_is_divided(
    events: list[tuple[float, bool, bool]], delivery_s: float, weights_s: float
) -> None:
    assert idle_times(*events) == (delivery_s, weights_s)
