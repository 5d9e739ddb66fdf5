"""CQL and IQL from recorded data: which action they learn, on a learner process, after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import CQLConfig, IQLConfig, SingleAgentEpisode
from rlzmq.replay import write_shard

STATES, ACTIONS = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Box(-2.0, 2.0, (1,), np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of one step with random actions a, whose reward is 4 - (2a - 1)²."""
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(256):
        action = rng.uniform(-1.0, 1.0, 1).astype(np.float32)
        episodes.append(
            SingleAgentEpisode(
                observations=list(rng.uniform(-1.0, 1.0, (2, 2)).astype(np.float32)), actions=[action],
                rewards=[4.0 - float(2.0 * action[0] - 1.0) ** 2], terminated=True, observation_space=STATES,
                action_space=ACTIONS, len_lookback_buffer=0,
            )
        )  # fmt: skip
    write_shard(path, episodes)
    return path


def offline(algorithm: str, data: Path, **training: Any) -> Any:
    config: Any = {"cql": CQLConfig, "iql": IQLConfig}[algorithm]()
    rates = {"actor_lr": 1e-2, "critic_lr": 1e-2}
    return (
        config.environment(observation_space=STATES, action_space=ACTIONS)
        .offline_data(input_=str(data), dataset_num_iters_per_learner=3)
        .training(**{"train_batch_size_per_learner": 64, **rates, **training})
        .rl_module(model_config={"fcnet_hiddens": [32, 32], "fcnet_activation": "relu"})
        .debugging(seed=7)
    )


LEARNING: dict[str, dict[str, Any]] = {
    "cql": {"bc_iters": 10, "min_q_weight": 0.1, "num_actions": 4, "initial_alpha": 0.01, "alpha_lr": 1e-4},
    "iql": {"beta": 3.0, "value_lr": 1e-2, "tau": 0.05},
}


@pytest.mark.parametrize("algorithm", ["cql", "iql"])
def test_the_better_of_the_recorded_actions_are_learned(algorithm: str, data: Path) -> None:
    config = offline(algorithm, data, **LEARNING[algorithm]).offline_data(dataset_num_iters_per_learner=200)
    with config.build() as algo:
        result = algo.train()
        states = torch.rand(64, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
        module: Any = algo.get_module()
        with torch.no_grad():
            logits = module.forward_inference({"obs": states})["action_dist_inputs"]
        means = logits[:, 0].tanh()
    assert 0.3 < float(means.mean()) < 0.7  # that of the data is 0
    values = result["learners"]["default_policy"]
    assert values["num_target_updates"] == 200
    assert ("cql_loss" in values) == (algorithm == "cql")
    assert all(np.isfinite(value) for value in values.values())


@pytest.mark.parametrize("algorithm", ["cql", "iql"])
def test_one_learner_process_and_a_resumed_run_train_on_the_same_numbers_as_a_serial_run(
    algorithm: str, data: Path, tmp_path: Path
) -> None:
    training = {"bc_iters": 4, "num_actions": 2} if algorithm == "cql" else {"beta": 3.0}

    def weights(algo: Any) -> dict[str, np.ndarray]:
        return algo.learner_group.get_weights()["default_policy"]  # type: ignore[no-any-return]

    config = offline(algorithm, data, **training)
    with config.build() as serial, config.copy().learners(num_learners=1).build() as other:
        serial.train()
        serial.save_to_path(tmp_path / "checkpoint")
        serial.train()
        other.train()
        other.train()
        with config.build() as resumed:
            resumed.restore_from_path(tmp_path / "checkpoint")
            resumed.train()
            for name, value in weights(serial).items():
                assert np.array_equal(value, weights(other)[name]), name
                assert np.array_equal(value, weights(resumed)[name]), name
