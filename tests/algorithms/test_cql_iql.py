"""CQL and IQL from recorded data: which action they learn, on a learner process, after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import BCConfig, CQLConfig, IQLConfig, SACConfig, SingleAgentEpisode, make_multi_agent
from rlzmq.core.errors import CheckpointError
from rlzmq.replay import write_shard
from tests.support.runs import ShortEnv

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


# -- as SAC -----------------------------------------------------------------------------------------


class OneStepEnv(ShortEnv):
    """The environment of `data`."""

    observation_space, action_space, length = STATES, ACTIONS, 1

    def observation(self) -> Any:
        if not self.t:
            self._state = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        return self._state

    def reward(self, action: Any) -> float:
        return 4.0 - float(action[0] - 1.0) ** 2  # actions arrive in (-2, 2)


def sac() -> Any:
    return (
        SACConfig()
        .environment(lambda _: OneStepEnv())
        .env_runners(num_env_runners=0)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=64)
        .training(train_batch_size_per_learner=16, num_steps_sampled_before_learning_starts=32)
        .training(actor_lr=1e-3, critic_lr=1e-3)
        .rl_module(model_config={"fcnet_hiddens": [32, 32], "fcnet_activation": "relu"})
    )


def learner_state(algo: Any) -> dict[str, Any]:
    return algo.learner_group.get_state()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("algorithm", "component"),
    [("cql", None), ("iql", "learner_group/learner"), ("iql", "learner_group/learner/rl_module")],
)
def test_an_offline_checkpoint_goes_on_as_sac(
    algorithm: str, component: str | None, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = {"bc_iters": 4, "num_actions": 2} if algorithm == "cql" else {}
    with offline(algorithm, data, **training).build() as algo:
        algo.train()
        algo.save_to_path(tmp_path / "checkpoint")
        before = learner_state(algo)
    saved, moments = (before[part]["default_policy"] for part in ("rl_module", "optimizer"))
    with sac().build() as online:
        alpha = learner_state(online)["rl_module"]["default_policy"]["log_alpha"]
        caplog.clear()
        online.restore_from_path(tmp_path / "checkpoint", component)
        after = learner_state(online)
        for name, value in after["rl_module"]["default_policy"].items():
            assert np.array_equal(value, saved.get(name, alpha)), name
        if component != "learner_group/learner/rl_module":
            for part in ("qf", "policy"):
                state = after["optimizer"]["default_policy"][part]["state"]
                assert set(state) == set(moments[part]["state"])
                for name, entries in state.items():
                    assert np.array_equal(entries["exp_avg_sq"], moments[part]["state"][name]["exp_avg_sq"])
        assert after["counters"]["source_progress"] == {"num_sampled": 0, "num_trained": 0}
        lines = [record.getMessage() for record in caplog.records if "recorded data" in record.getMessage()]
        assert len(lines) == 1
        assert ("left out: vf; with initial weights: log_alpha" in lines[0]) == (algorithm == "iql")
        result = online.train()
        assert result["num_env_steps_sampled_lifetime"] == result["accounting"]["sampled"] == 64
        assert result["num_env_steps_trained_lifetime"] > 0


@pytest.mark.parametrize(
    ("config_class", "hidden", "text"),
    [
        (BCConfig, 32, r"acts with pi_encoder, which the checkpoint lacks; it has .*pi"),
        (
            CQLConfig,
            3,
            r"other networks than the checkpoint: \S+weight has the shape .* same model_config",
        ),
    ],
)
def test_a_checkpoint_of_other_networks_is_an_error_that_names_them_and_changes_nothing(
    config_class: Any, hidden: int, text: str, data: Path, tmp_path: Path
) -> None:
    config = config_class().environment(observation_space=STATES, action_space=ACTIONS)
    config.offline_data(input_=str(data)).rl_module(model_config={"fcnet_hiddens": [32, 32]})
    with config.build() as algo:
        algo.save_to_path(tmp_path / "checkpoint")
    with sac().rl_module(model_config={"fcnet_hiddens": [hidden, 32]}).build() as online:
        before = learner_state(online)["rl_module"]["default_policy"]
        with pytest.raises(CheckpointError, match=text):
            online.restore_from_path(tmp_path / "checkpoint")
        np.testing.assert_equal(learner_state(online)["rl_module"]["default_policy"], before)


def test_a_checkpoint_of_a_module_that_the_run_lacks_is_an_error_that_says_how_to_load_it(
    data: Path, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint"
    with offline("cql", data, bc_iters=4, num_actions=2).build() as algo:
        algo.train()
        algo.save_to_path(place)
        cloned = learner_state(algo)["rl_module"]["default_policy"]
    config = sac().environment(make_multi_agent(lambda _: OneStepEnv()))
    config.multi_agent(policies={"p0"}, policy_mapping_fn=lambda agent_id, episode: "p0")
    with config.build() as online:
        with pytest.raises(CheckpointError, match=r"expected modules \['p0'\]"):
            online.restore_from_path(place)
        online.learner_group.load_module_state(
            rl_module_ckpt_dirs={"p0": f"{place}/learner_group/learner/rl_module/default_policy"}
        )
        after = learner_state(online)["rl_module"]["p0"]
        assert all(np.array_equal(value, cloned[name]) for name, value in after.items())


def test_the_counts_of_another_algorithm_are_an_error_that_says_what_to_load(data: Path) -> None:
    with offline("cql", data).build() as algo, sac().build() as online:
        with pytest.raises(ValueError, match="counts num_sampled, num_trained"):
            online.set_state(algo.get_state("learner_group/learner"))
        online.set_state(algo.get_state("learner_group/learner/rl_module"))
        state = learner_state(online)
        del state["extra"]["num_target_updates"]
        with pytest.raises(ValueError, match="lacks 'num_target_updates' in 'extra'"):
            online.learner_group.set_state(state)
