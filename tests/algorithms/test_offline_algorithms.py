"""BC, MARWIL, CQL and IQL from recorded data: what they learn, in more processes, resumed, and on as PPO or SAC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import (
    Algorithm,
    APPOConfig,
    BCConfig,
    ConfigurationError,
    CQLConfig,
    RLModuleSpec,
    SACConfig,
    SingleAgentEpisode,
    make_multi_agent,
)
from rlzmq.algorithms.registry import get_config_class
from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.core.errors import CheckpointError
from rlzmq.replay import open_shards, write_shard
from tests.support.runs import ShortEnv, small, weights_of

CARTPOLE = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
STATES, ACTIONS = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Box(-2.0, 2.0, (1,), np.float32)
ALGORITHMS = ("bc", "marwil", "cql", "iql")


def scripted_episodes(num: int, seed: int = 0) -> list[SingleAgentEpisode]:
    """CartPole, balanced by a rule that gets 500 as a rule; some actions are random."""
    env = gym.make("CartPole-v1")
    rng = np.random.default_rng(seed)
    episodes = []
    for index in range(num):
        observation, _ = env.reset(seed=1000 * seed + index)
        episode = SingleAgentEpisode(
            id_=f"{seed}-{index}", observations=[observation], observation_space=env.observation_space,
            action_space=env.action_space, len_lookback_buffer=0,
        )  # fmt: skip
        while not episode.is_done:
            best = int(
                observation[2] + 0.5 * observation[3] + 0.05 * observation[0] + 0.1 * observation[1] > 0
            )
            action = int(rng.integers(2)) if rng.random() < 0.1 else best
            observation, reward, terminated, truncated, _ = env.step(action)
            episode.add_env_step(
                observation, np.int64(action), float(reward), {}, terminated=terminated, truncated=truncated
            )
        episodes.append(episode)
    env.close()
    return episodes


def one_step_episodes(num: int) -> list[SingleAgentEpisode]:
    """Random actions a, whose reward is 4 - (2a - 1)²."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1.0, 1.0, (num, 1)).astype(np.float32)
    return [
        SingleAgentEpisode(
            observations=list(rng.uniform(-1.0, 1.0, (2, 2)).astype(np.float32)), actions=[action],
            rewards=[4.0 - float(2.0 * action[0] - 1.0) ** 2], terminated=True, observation_space=STATES,
            action_space=ACTIONS, len_lookback_buffer=0,
        )
        for action in actions
    ]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of scripted episodes beside a torn one, and one of one-step episodes."""
    path = tmp_path_factory.mktemp("data")
    for seed in range(4):
        write_shard(path / "cartpole", scripted_episodes(5, seed))
    write_shard(path / "one-step", one_step_episodes(256))
    (path / "cartpole" / "torn.shard").write_bytes(b"torn")
    return path


def offline(algorithm: str, data: Path, **training: Any) -> Any:
    """Return a config of three minibatches per update, of CartPole for BC and MARWIL, else of the one-step data."""
    config: Any = get_config_class(algorithm)().debugging(seed=7)
    if algorithm in ("bc", "marwil"):
        config.environment("CartPole-v1").offline_data(input_=str(data / "cartpole"))
        config.training(train_batch_size_per_learner=256, lr=3e-3).rl_module(
            model_config={"fcnet_hiddens": [32]}
        )
    else:
        config.environment(observation_space=STATES, action_space=ACTIONS)
        config.offline_data(input_=str(data / "one-step"))
        config.training(train_batch_size_per_learner=64, actor_lr=1e-2, critic_lr=1e-2)
        config.rl_module(model_config={"fcnet_hiddens": [32, 32], "fcnet_activation": "relu"})
    if algorithm == "cql":
        config.training(bc_iters=4, num_actions=2)
    return config.offline_data(dataset_num_iters_per_learner=3).training(**training)


def optimizer(algo: Any) -> dict[str, Any]:
    state = algo.learner_group.get_state()["optimizer"]
    return state["default_policy"]["default_optimizer"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("algorithm", ["bc", "marwil"])
def test_the_policy_that_recorded_the_data_is_cloned(algorithm: str, data: Path) -> None:
    """On three seeds: 450 and more (BC), 260 and more (MARWIL); a random policy gets 22."""
    config = offline(algorithm, data, lr=1e-2).offline_data(dataset_num_iters_per_learner=20)
    config.evaluation(evaluation_interval=4, evaluation_duration=5, evaluation_config={"explore": False})
    with config.build() as algo:
        for _ in range(4):
            result = algo.train()
    overall = result["learners"]["__all_modules__"]
    assert result["evaluation"]["env_runners"]["episode_return_mean"] > 200
    assert result["accounting"] == {"sampled": 0, "trained": 0, "dropped": {}, "pending": 0}
    assert overall["num_shards"] == 4
    assert overall["num_shards_skipped"] == 1
    assert overall["num_gradient_updates"] == 20
    if algorithm == "bc":
        assert overall["num_env_steps_trained"] == 20 * 256
    values = result["learners"]["default_policy"]
    assert np.isfinite(values["policy_loss"])
    assert ("moving_avg_sqd_adv_norm" in values) == (algorithm == "marwil")


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


def test_target_networks_follow_the_steps_that_an_update_trains(data: Path) -> None:
    config = offline("iql", data, train_batch_size_per_learner=4, target_network_update_freq=12)
    learner: Any = config.offline_data(dataset_num_iters_per_learner=10).build_learner()
    for updates in (3, 6):
        learner.update(episodes=[])
        assert learner.num_target_updates == updates


SCHEDULE = {"lr": [(0, 1e-2), (5000, 1e-4)]}
OF: dict[str, dict[str, Any]] = {
    "bc": SCHEDULE,
    "marwil": {**SCHEDULE, "moving_average_sqd_adv_norm_update_rate": 0.1},
    "cql": {},
    "iql": {"beta": 3.0},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_learner_process_and_a_resumed_run_train_on_the_same_numbers_as_a_serial_run(
    algorithm: str, data: Path, tmp_path: Path
) -> None:
    config = offline(algorithm, data, **OF[algorithm])
    with config.build() as serial, config.copy().learners(num_learners=1).build() as other:
        serial.train()
        serial.save_to_path(tmp_path / "checkpoint")
        result = serial.train()
        other.train()
        other.train()
        with config.build() as resumed:
            resumed.restore_from_path(tmp_path / "checkpoint")
            again = resumed.train()
            np.testing.assert_equal(weights_of(other), weights_of(serial))
            np.testing.assert_equal(weights_of(resumed), weights_of(serial))
    learned = result["learners"]["default_policy"]
    assert learned["policy_loss"] == again["learners"]["default_policy"]["policy_loss"]
    if "lr" in OF[algorithm]:  # schedules follow the trained steps
        trained = result["num_env_steps_trained_lifetime"]
        before = trained - result["learners"]["__all_modules__"]["num_env_steps_trained"]
        expected = 1e-2 + (1e-4 - 1e-2) * np.array([before, trained]) / 5000
        assert expected[1] - 1e-9 <= learned["default_optimizer_learning_rate"] <= expected[0] + 1e-9


def test_without_a_number_of_batches_an_update_is_an_epoch(data: Path) -> None:
    num_steps = sum(shard.num_env_steps for shard in open_shards(data / "cartpole").shards)
    config = offline("bc", data).offline_data(dataset_num_iters_per_learner=None)
    with config.build() as algo:
        overall = algo.train()["learners"]["__all_modules__"]
        assert overall["num_env_steps_trained"] == num_steps // 256 * 256
        assert overall["dataset_num_epochs"] == 1


def test_a_burn_in_trains_each_step_once_with_a_warmer_state(data: Path) -> None:
    """With an initial state of 0 and no burn-in, each sequence forgets what came before it."""
    model = {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 10}
    found = []
    for burnin_len in (0, 9):
        config = offline("marwil", data, burnin_len=burnin_len).rl_module(model_config=model)
        with config.build() as algo:
            result = algo.train()
            found.append((result["num_env_steps_trained_lifetime"], weights_of(algo)["pi.layers.0.weight"]))
    assert found[0][0] == found[1][0]
    assert not np.array_equal(found[0][1], found[1][1])
    learner = config.build_learner()
    (drawn,) = learner.source.batches(1, np.random.default_rng(0))
    # without an update
    assert learner.prepare(drawn).columns["default_policy"]["loss_mask"].shape[1] == 10 + 9


@pytest.mark.parametrize(
    ("training", "model", "words"),
    [
        ({"burnin_len": 10}, {"use_lstm": True, "max_seq_len": 10}, r"burnin_len=10: .*max_seq_len=10"),
        ({"burnin_len": 2}, {}, "no state to warm up"),
        ({"bc_logstd_coeff": 0.1}, {}, r"bc_logstd_coeff=0.1: its actions have no standard deviation"),
    ],
)
def test_marwils_settings_must_fit_the_module(training: Any, model: Any, words: str, data: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        offline("marwil", data, **training).rl_module(model_config=model).build()


@pytest.mark.parametrize(
    ("algorithm", "component"),
    [("bc", None), ("marwil", "learner_group/learner"), ("marwil", "learner_group/learner/rl_module")],
)
def test_an_offline_checkpoint_goes_on_as_ppo(
    algorithm: str, component: str | None, data: Path, tmp_path: Path
) -> None:
    with offline(algorithm, data).build() as algo:
        algo.train()
        algo.save_to_path(tmp_path / "checkpoint")
        cloned, moments = weights_of(algo), optimizer(algo)
    config = small(num_envs_per_env_runner=1, minibatch_size=64, model_config={"fcnet_hiddens": [32]})
    with config.build() as ppo:
        ppo.restore_from_path(tmp_path / "checkpoint", component)
        np.testing.assert_equal(weights_of(ppo), cloned)
        states = optimizer(ppo)["state"]
        assert (set(states) == set(moments["state"])) == (component != "learner_group/learner/rl_module")
        for name, state in states.items():
            assert np.array_equal(state["exp_avg"], moments["state"][name]["exp_avg"]), name
        result = ppo.train()
        assert result["learners"]["default_policy"]["num_module_steps_trained"] == 64
        assert result["num_env_steps_trained_lifetime"] == 64
        assert result["accounting"] == {"sampled": 64, "trained": 64, "dropped": {}, "pending": 0}


def whole(algo: Any) -> dict[str, np.ndarray]:
    """The learner's weights with those that only learners need."""
    return algo.learner_group.get_state()["rl_module"]["default_policy"]  # type: ignore[no-any-return]


def test_every_way_to_load_cloned_weights_into_appo_sets_its_target_networks(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offline("bc", data).build() as algo:
        algo.save_to_path(tmp_path / "checkpoint")
    module = str(tmp_path / "checkpoint/learner_group/learner/rl_module/default_policy")
    config = small(APPOConfig, train_batch_size_per_learner=64, model_config={"fcnet_hiddens": [32]})
    config.reporting(min_time_s_per_iteration=0)
    with config.build() as appo:
        initial = whole(appo)
        appo.restore_from_path(tmp_path / "checkpoint")
        restored = whole(appo)
        old = [name for name in restored if name.startswith("_old_")]
        assert old
        assert all(np.array_equal(restored[name], restored[name.removeprefix("_old_")]) for name in old)
        assert not np.array_equal(restored["pi.layers.0.weight"], initial["pi.layers.0.weight"])
        assert "_old" not in caplog.text
        appo.set_state({"learner_group": {"learner": {"rl_module": {"default_policy": initial}}}})
        appo.learner_group.load_module_state(rl_module_ckpt_dirs={"default_policy": module})
        np.testing.assert_equal(whole(appo), restored)
        stale = {**restored, "_old_pi.layers.0.bias": restored["pi.layers.0.bias"] + 1}
        appo.set_state({"learner_group": {"learner": {"rl_module": {"default_policy": stale}}}})
        np.testing.assert_equal(whole(appo), stale)  # what a state has is not overwritten
    config.rl_module(
        rl_module_spec=RLModuleSpec(load_state_path=module, model_config={"fcnet_hiddens": [32]})
    )
    with config.build() as appo:
        np.testing.assert_equal(whole(appo), restored)
    config.env_runners(num_env_runners=1).learners(num_learners=1)
    with Algorithm.from_checkpoint(tmp_path / "checkpoint", config=config) as appo:
        np.testing.assert_equal(whole(appo), restored)
        assert appo.train()["num_env_steps_trained_lifetime"] >= 64


@pytest.mark.parametrize("num_missing", [0, 1])
def test_a_batch_larger_than_the_data_is_warned_about_once(
    num_missing: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shard(tmp_path / "cartpole", scripted_episodes(1))
    steps = open_shards(tmp_path).shards[0].num_env_steps
    with offline("bc", tmp_path, train_batch_size_per_learner=steps + num_missing).build() as algo:
        for _ in range(2):
            overall = algo.train()["learners"]["__all_modules__"]
    assert overall["num_env_steps_trained"] == 3 * steps
    logged = [message for message in caplog.messages if "train_batch_size_per_learner" in message]
    assert len(logged) == num_missing
    if logged:
        assert f"train_batch_size_per_learner={steps + 1} is more than the {steps} env steps" in logged[0]


# -- as SAC -----------------------------------------------------------------------------------------


class OneStepEnv(ShortEnv):
    """The environment of `one_step_episodes`."""

    observation_space, action_space, length = STATES, ACTIONS, 1

    def observation(self) -> Any:
        if not self.t:
            self._state = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        return self._state

    def reward(self, action: Any) -> float:
        return 4.0 - float(action[0] - 1.0) ** 2  # actions arrive in (-2, 2)


def sac() -> Any:
    return small(
        SACConfig,
        OneStepEnv,
        num_envs_per_env_runner=1,
        min_time_s_per_iteration=0,
        min_sample_timesteps_per_iteration=64,
        train_batch_size_per_learner=16,
        num_steps_sampled_before_learning_starts=32,
        actor_lr=1e-3,
        critic_lr=1e-3,
        model_config={"fcnet_hiddens": [32, 32], "fcnet_activation": "relu"},
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
    with offline(algorithm, data).build() as algo:
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
    config.offline_data(input_=str(data / "one-step")).rl_module(model_config={"fcnet_hiddens": [32, 32]})
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
    with offline("cql", data).build() as algo:
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


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config.offline_data(input_=None), "config.input_ is None: BCConfig trains on recorded data"),
        (lambda config: config.env_runners(num_env_runners=2), "num_env_runners=2: BCConfig trains on recorded"),
        (
            lambda config: config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent, episode: "a"),
            "single-agent environments only",
        ),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_is_an_error_when_the_algorithm_is_built(
    change: Any, words: str, data: Path
) -> None:
    config = offline("bc", data)
    change(config)
    with pytest.raises(ConfigurationError, match=words):
        config.build()


def test_observations_that_a_filter_changed_on_one_side_only_are_warned_about(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = offline("bc", data).env_runners(env_to_module_connector=lambda *args, **kwargs: MeanStdFilter())
    with config.build(), offline("bc", data).build():
        (warning,) = [r.getMessage() for r in caplog.records if "MeanStdFilter" in r.getMessage()]
    assert "gets observations of Box(-10.0, 10.0, (4,), float32), and those of Box([-4.8" in warning


def test_each_learner_needs_an_episode(data: Path) -> None:
    config = offline("bc", data).learners(num_learners=21)
    spec = config.get_multi_rl_module_spec(spaces={"default_policy": (CARTPOLE, gym.spaces.Discrete(2))})
    learner = config.learner_class(config=config, module_spec=spec, rank=20, num_ranks=21)
    with pytest.raises(ConfigurationError, match="for rank 20 of 21, got 20 episodes"):
        learner.build()


def test_box_actions_must_be_stored_as_the_module_gives_them(tmp_path: Path) -> None:
    spaces = gym.spaces.Box(-1.0, 1.0, (3,)), gym.spaces.Box(-2.0, 2.0, (1,))
    episode = SingleAgentEpisode(
        observations=[np.zeros(3, np.float32)] * 5, actions=[np.zeros(1, np.float32)] * 4, rewards=[0.0] * 4,
        terminated=True, observation_space=spaces[0], action_space=spaces[1], len_lookback_buffer=0,
    )  # fmt: skip
    write_shard(tmp_path / "cartpole", [episode], normalize_actions=False)
    config = offline("bc", tmp_path, train_batch_size_per_learner=4)
    config.environment(None, observation_space=spaces[0], action_space=spaces[1])
    with pytest.raises(ConfigurationError, match=r"Set .environment\(normalize_actions=False\)"):
        config.build()
    with config.environment(normalize_actions=False).build() as algo:
        algo.train()
