"""What the synchronous classes take over from the asynchronous ones."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.async_algorithm import AsyncAlgorithm
from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.driver.async_env_runner_group import AsyncEnvRunnerGroup
from rlzmq.driver.async_learner_group import AsyncLearnerGroup
from rlzmq.driver.sync_groups import EnvRunnerGroup, LearnerGroup

PAIRS = [
    (Algorithm, AsyncAlgorithm),
    (EnvRunnerGroup, AsyncEnvRunnerGroup),
    (LearnerGroup, AsyncLearnerGroup),
]
# What a run calls, not its user.
NOT_FOR_USERS = {
    AsyncAlgorithm: {"start"},
    AsyncEnvRunnerGroup: {
        "cancel_calls", "change_modules", "begin_again", "get_connector_deltas", "sample_batches",
        "set_connector_state", "set_module_states", "set_weights", "spawn_runner", "start",
    },
    AsyncLearnerGroup: {"change_modules", "get_inference_weights", "start"},
}  # fmt: skip


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS)
def test_every_coroutine_method_has_a_synchronous_one_with_its_signature(
    sync: Any, asynchronous: Any
) -> None:
    missing = []
    for name, method in inspect.getmembers(asynchronous, inspect.iscoroutinefunction):
        if name.startswith("_") or name in NOT_FOR_USERS[asynchronous]:
            continue
        found = getattr(sync, name, None)
        if found is None:
            missing.append(name)
        elif hasattr(found, "__wrapped__"):
            assert inspect.signature(found) == inspect.signature(method)
            assert found.__doc__ == method.__doc__
            assert not inspect.iscoroutinefunction(found)
    assert missing == []


def test_attributes_are_read_from_the_asynchronous_object_and_cannot_be_replaced() -> None:
    assert "iterations" in str(Algorithm.iteration.__doc__)
    with PPOConfig().environment("CartPole-v1").build() as algo:
        assert algo.iteration == algo.training_iteration == 0
        assert algo.env_runner is algo.env_runner_group.local_env_runner
        with pytest.raises(AttributeError, match=r"PPO\.iteration can only be read"):
            algo.iteration = 3
