"""The loss of offline algorithms on recorded data that they do not train on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import (
    Algorithm,
    BCConfig,
    Columns,
    ConfigurationError,
    CQLConfig,
    IQLConfig,
    MARWILConfig,
    PPOConfig,
    SingleAgentEpisode,
)
from rlzmq.replay import open_shards, write_shard

CARTPOLE = gym.spaces.Box(-1.0, 1.0, (4,), np.float32), gym.spaces.Discrete(2)
BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32), gym.spaces.Box(-2.0, 2.0, (1,), np.float32)


def record(path: Path, spaces: tuple[gym.Space[Any], gym.Space[Any]], *lengths: int) -> None:
    """Write episodes of these lengths, with random observations and actions."""
    observation_space, action_space = spaces
    observation_space.seed(sum(lengths))
    action_space.seed(sum(lengths))
    episodes = []
    for length in lengths:
        actions = [action_space.sample() for _ in range(length)]
        episodes.append(
            SingleAgentEpisode(
                observations=[observation_space.sample() for _ in range(length + 1)],
                actions=[action / 2 for action in actions] if action_space is BOX[1] else actions,
                rewards=[1.0] * length, truncated=True, len_lookback_buffer=0,
                observation_space=observation_space, action_space=action_space,
            )
        )  # fmt: skip
    write_shard(path, episodes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("data")
    record(path / "trained", CARTPOLE, 700, 500, 400)
    record(path / "held-out", CARTPOLE, 300, 250)
    return path


def offline(config_class: Any, data: Path, **evaluation: Any) -> Any:
    return (
        config_class()
        .environment("CartPole-v1")
        .offline_data(input_=str(data / "trained"), dataset_num_iters_per_learner=3)
        .training(train_batch_size_per_learner=256)
        .evaluation(evaluation_config={"input_": str(data / "held-out")}, **evaluation)
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=3)
    )


def held_out(result: dict[str, Any]) -> dict[str, Any]:
    return result["evaluation"]["offline_eval_runners"]  # type: ignore[no-any-return]


def test_the_loss_is_the_mean_over_the_held_out_data(data: Path) -> None:
    config = offline(
        BCConfig, data, offline_evaluation_interval=2, dataset_num_iters_per_offline_eval_runner=None
    )
    (shard,) = open_shards(data / "held-out").shards
    steps = shard.step_slots()
    with config.evaluation(offline_eval_batch_size_per_runner=len(steps)).build() as algo:
        assert "evaluation" not in algo.train()
        result = algo.train()
        columns = {
            name: torch.from_numpy(shard.columns[name][steps]) for name in (Columns.OBS, Columns.ACTIONS)
        }
        module = algo.get_module()
        logits = module.forward_inference(columns)[Columns.ACTION_DIST_INPUTS]
        logp = logits.log_softmax(-1).gather(-1, columns[Columns.ACTIONS][:, None].long())
        found, overall = held_out(result)["default_policy"], held_out(result)["__all_modules__"]
        assert found["total_eval_loss"] == pytest.approx(-float(logp.mean()), rel=1e-5)
        assert found["policy_loss"] == found["total_eval_loss"]
        assert overall["num_env_steps_sampled"] == len(steps)
        assert overall["dataset_num_iters_evaluated"] == 1
        assert algo.evaluate_offline()["offline_eval_runners"]["default_policy"] == found, (
            "the same batches again"
        )
        assert (
            held_out(algo.train() and algo.train())["__all_modules__"]["dataset_num_iters_evaluated_lifetime"]
            == 3
        )


@pytest.mark.parametrize("config_class", [BCConfig, MARWILConfig])
@pytest.mark.parametrize("num_learners", [0, 2])
def test_an_evaluation_changes_nothing_and_its_count_goes_on_after_a_resume(
    config_class: Any, num_learners: int, data: Path, tmp_path: Path
) -> None:
    states = []
    for interval in (None, 1):
        config = offline(
            config_class, data, offline_evaluation_interval=interval, offline_evaluation_duration=2
        )
        if config_class is MARWILConfig:
            config.training(moving_average_sqd_adv_norm_update_rate=0.5)
        with config.learners(num_learners=num_learners).build() as algo:
            for _ in range(2):
                result = algo.train()
            states.append(algo.learner_group.get_state())
            if interval:
                algo.save_to_path(tmp_path / "checkpoint")
    assert held_out(result)["__all_modules__"]["num_env_steps_sampled_lifetime"] > 0
    assert states[0]["extra"] == states[1]["extra"]
    for name, value in states[0]["rl_module"]["default_policy"].items():
        assert np.array_equal(value, states[1]["rl_module"]["default_policy"][name]), name
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as resumed:
        overall = held_out(resumed.train())["__all_modules__"]
    assert overall["dataset_num_iters_evaluated"] == 2
    assert overall["dataset_num_iters_evaluated_lifetime"] == 6


@pytest.mark.parametrize(
    ("config_class", "model"),
    [(MARWILConfig, {"use_lstm": True, "max_seq_len": 10}), (CQLConfig, {}), (IQLConfig, {})],
)
def test_each_algorithm_evaluates_with_its_own_loss(config_class: Any, model: Any, tmp_path: Path) -> None:
    for name, length in (("trained", 40), ("held-out", 20)):
        record(tmp_path / name, BOX, length)
    config = offline(
        config_class, tmp_path, offline_evaluation_interval=1, offline_eval_batch_size_per_runner=20
    )
    config.environment(None, observation_space=BOX[0], action_space=BOX[1])
    config.training(train_batch_size_per_learner=20).rl_module(model_config={"fcnet_hiddens": [16], **model})
    with config.build() as algo:
        result = algo.train()
    found, overall = held_out(result)["default_policy"], held_out(result)["__all_modules__"]
    assert np.isfinite(found["total_eval_loss"])
    assert np.isfinite(found["policy_loss"])
    assert overall["num_env_steps_sampled"] == 20


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        (
            {"evaluation_config": None},
            r"data that are not trained on, got input_=.*trained'\. Set \.evaluation\(",
        ),
        ({"evaluation_config": {"input_": "nowhere"}}, "nowhere does not exist"),
    ],
)
def test_the_data_for_it_must_be_others(evaluation: Any, words: str, data: Path) -> None:
    config = offline(BCConfig, data, offline_evaluation_interval=1).evaluation(**evaluation)
    with pytest.raises(ConfigurationError, match=words):
        config.build()


def test_the_data_for_it_must_fit_the_module(data: Path, tmp_path: Path) -> None:
    record(tmp_path, BOX, 3)
    config = offline(BCConfig, data, offline_evaluation_interval=1)
    with pytest.raises(ConfigurationError, match="column 'obs': expected observations of"):
        config.evaluation(evaluation_config={"input_": str(tmp_path)}).build()


def test_only_the_loss_is_evaluated_and_only_by_offline_algorithms(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match="PPOConfig has no recorded data to evaluate on"):
        PPOConfig().environment("CartPole-v1").evaluation(offline_evaluation_interval=1).build()
    with pytest.raises(ConfigurationError, match="evaluate returns in an environment"):
        BCConfig().evaluation(offline_evaluation_type="pdis")
    with caplog.at_level(logging.WARNING, "rlzmq"):
        BCConfig().evaluation(offline_evaluation_type="eval_loss")
    assert not caplog.records
