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
from rlzmq.learners.offline_learner import estimated_returns, recorded_returns
from rlzmq.replay import open_shards, write_shard

CARTPOLE = gym.spaces.Box(-1.0, 1.0, (4,), np.float32), gym.spaces.Discrete(2)
BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32), gym.spaces.Box(-2.0, 2.0, (1,), np.float32)


def record(
    path: Path,
    spaces: tuple[gym.Space[Any], gym.Space[Any]],
    *lengths: int,
    logp: float | None = None,
    action: Any = None,
    reward: float = 1.0,
) -> None:
    """Write episodes of these lengths, with random observations and actions, of which `logp` is the log-probability."""
    observation_space, action_space = spaces
    observation_space.seed(sum(lengths))
    action_space.seed(sum(lengths))
    episodes = []
    for length in lengths:
        actions = [action_space.sample() if action is None else action for _ in range(length)]
        episodes.append(
            SingleAgentEpisode(
                observations=[observation_space.sample() for _ in range(length + 1)],
                actions=[drawn / 2 for drawn in actions] if action_space is BOX[1] else actions,
                extra_model_outputs={} if logp is None else {Columns.ACTION_LOGP: [np.float32(logp)] * length},
                rewards=[reward] * length, truncated=True, len_lookback_buffer=0,
                observation_space=observation_space, action_space=action_space,
            )
        )  # fmt: skip
    write_shard(path, episodes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("data")
    record(path / "trained", CARTPOLE, 700, 500, 400)
    record(path / "held-out", CARTPOLE, 300, 250)
    record(path / "with-logp", CARTPOLE, 30, 20, 10, logp=np.log(0.5))
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
    seen: list[Any] = []
    config.callbacks(
        on_evaluate_offline_start=lambda algorithm, **kwargs: seen.append(algorithm.iteration),
        on_evaluate_offline_end=lambda evaluation_metrics, **kwargs: seen.append(evaluation_metrics),
    )
    with config.evaluation(offline_eval_batch_size_per_runner=len(steps)).build() as algo:
        assert "evaluation" not in algo.train()
        result = algo.train()
        columns = {
            name: torch.from_numpy(shard.columns[name][steps]) for name in (Columns.OBS, Columns.ACTIONS)
        }
        module = algo.get_module()
        logits = module.forward_inference(columns)[Columns.ACTION_DIST_INPUTS]
        logp = logits.log_softmax(-1).gather(-1, columns[Columns.ACTIONS][:, None].long())
        assert seen == [2, result["evaluation"]]
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


def test_returns_are_weighted_by_running_products_per_decision_or_as_a_whole() -> None:
    """Two episodes: ratios 2, ½, 3 and ¼; rewards 1, 2, 4 and 8; γ = ½."""
    rewards, lengths = np.array([1.0, 2.0, 4.0, 8.0]), np.array([3, 1])
    log_ratios = np.log([2.0, 0.5, 3.0, 0.25])
    assert recorded_returns(rewards, lengths, 0.5).tolist() == [1.0 + 1.0 + 1.0, 8.0]
    found = {
        per_decision: estimated_returns(log_ratios, rewards, lengths, 0.5, per_decision=per_decision)
        for per_decision in (False, True)
    }
    assert found[False].tolist() == pytest.approx([3.0 * 3.0, 2.0])
    assert found[True].tolist() == pytest.approx([2.0 + 1.0 + 3.0, 2.0])
    huge = estimated_returns(np.full(4, 1e4), rewards, lengths, 1.0, per_decision=True)
    assert np.isfinite(huge).all()


@pytest.mark.parametrize("kind", ["is", "pdis"])
def test_the_policys_return_is_estimated_from_its_ratio_to_the_recorded_one(kind: str, data: Path) -> None:
    config = offline(MARWILConfig, data, offline_evaluation_interval=1, offline_evaluation_type=kind)
    config.evaluation(
        evaluation_config={"input_": str(data / "with-logp")}, dataset_num_iters_per_offline_eval_runner=None
    )
    with config.training(gamma=0.9).build() as algo:
        result = algo.train()
        module = algo.get_module()
    estimates, recorded = [], []
    for episode in (episode for shard in open_shards(data / "with-logp").shards for episode in shard):
        obs = torch.tensor(episode.get_observations(slice(0, len(episode))))
        logits = module.forward_inference({Columns.OBS: obs})[Columns.ACTION_DIST_INPUTS]
        actions = torch.tensor(episode.get_actions())[:, None]
        logp = logits.log_softmax(-1).gather(-1, actions).squeeze(-1).double()
        ratios, discounts = (logp - np.log(0.5)).exp(), 0.9 ** torch.arange(len(episode)).double()
        products = ratios.cumprod(0) if kind == "pdis" else ratios.prod()
        estimates.append(float((products * discounts).sum()))
        recorded.append(float(discounts.sum()))
    found = held_out(result)
    assert found["num_episodes"] == 3
    assert found["v_behavior"] == pytest.approx(np.mean(recorded))
    assert found["episode_return_mean"] == pytest.approx(np.mean(estimates), rel=1e-4)
    assert found["episode_return_max"] == pytest.approx(max(estimates), rel=1e-4)
    assert found["__all_modules__"]["num_env_steps_sampled"] == 60


def test_an_estimate_needs_the_recorded_probabilities_and_a_stateless_module(data: Path) -> None:
    config = offline(BCConfig, data, offline_evaluation_interval=1, offline_evaluation_type="is")
    with pytest.raises(ConfigurationError, match="needs the column 'action_logp'"):
        config.build()
    with pytest.raises(ConfigurationError, match=r"module .* is stateful"):
        config.rl_module(model_config={"use_lstm": True}).build()


@pytest.mark.parametrize(("config_class", "num_learners"), [(BCConfig, 0), (MARWILConfig, 2)])
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
    assert states[0]["counters"] == states[1]["counters"]
    np.testing.assert_equal(*(state["rl_module"]["default_policy"] for state in states))
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


def test_the_data_for_it_must_exist_and_those_that_are_trained_on_are_warned_about(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = offline(BCConfig, data, offline_evaluation_interval=1)
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        config.evaluation(evaluation_config={"input_": "nowhere"}).build()
    with config.evaluation(evaluation_config=None).build() as algo:
        assert np.isfinite(held_out(algo.train())["default_policy"]["total_eval_loss"])
    assert "evaluation_config={'input_': " in caplog.text


def test_it_is_refused_for_online_algorithms_and_of_other_kinds(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match="PPOConfig has no recorded data to evaluate on"):
        PPOConfig().environment("CartPole-v1").evaluation(offline_evaluation_interval=1).build()
    with pytest.raises(ConfigurationError, match="expected one of 'eval_loss', 'is', 'pdis'"):
        BCConfig().evaluation(offline_evaluation_type="wis")
    with caplog.at_level(logging.WARNING, "rlzmq"):
        BCConfig().evaluation(offline_evaluation_type="eval_loss")
    assert not caplog.records
