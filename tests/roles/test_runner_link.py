"""RunnerLink: weights that were published before a runner's modules changed; what it waits for between leases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq import PPOConfig
from rlzmq.core.metrics import StageTimers
from rlzmq.protocol.core import ApplyWeights
from rlzmq.roles.runner_role import EnvRunnerRole, IdleTime, RunnerLink
from rlzmq.wire.codec import Publication


@pytest.fixture
def role() -> Any:
    config = PPOConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [4]})
    role = EnvRunnerRole(config, 1)
    yield role
    role.close()


def publication(role: EnvRunnerRole, layout_digest: str, num_bytes: int) -> ApplyWeights:
    header = Publication("run", 1, 1, "digest", layout_digest, num_bytes)
    return ApplyWeights(header, bytes(num_bytes))


def test_weights_of_the_former_modules_are_not_loaded_after_a_change(role: EnvRunnerRole) -> None:
    link = SimpleNamespace(_role=role, _submit=lambda job: job())
    layout = role.env_runner.get_weights_layout()
    role.change_modules(role.env_runner.config, None)
    RunnerLink.act(link, publication(role, "other", layout.num_bytes + 8))
    assert role.env_runner.weights_seq_no == 0
    RunnerLink.act(link, publication(role, layout.digest, layout.num_bytes))
    assert role.env_runner.weights_seq_no == 1


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
