"""BC and MARWIL from recorded data: serial, on two ranks, after a resume, and on as PPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import (
    Algorithm,
    APPOConfig,
    BCConfig,
    ConfigurationError,
    MARWILConfig,
    RLModuleSpec,
    SingleAgentEpisode,
)
from rlzmq.replay import open_shards, write_shard
from tests.support.runs import small

CARTPOLE = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)


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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of scripted episodes."""
    path = tmp_path_factory.mktemp("data")
    for seed in range(4):
        write_shard(path, scripted_episodes(5, seed))
    return path


def offline(algorithm: str, data: Any, **training: Any) -> Any:
    config: Any = {"bc": BCConfig, "marwil": MARWILConfig}[algorithm]()
    return (
        config.environment("CartPole-v1")
        .offline_data(input_=str(data), dataset_num_iters_per_learner=3)
        .training(**{"train_batch_size_per_learner": 256, "lr": 3e-3, **training})
        .rl_module(model_config={"fcnet_hiddens": [32]})
        .debugging(seed=7)
    )


def weights(algo: Any) -> dict[str, np.ndarray]:
    return algo.learner_group.get_weights()["default_policy"]  # type: ignore[no-any-return]


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
    assert overall["num_shards_skipped"] == 0
    assert overall["num_gradient_updates"] == 20
    if algorithm == "bc":
        assert overall["num_env_steps_trained"] == 20 * 256
    values = result["learners"]["default_policy"]
    assert np.isfinite(values["policy_loss"])
    assert ("moving_avg_sqd_adv_norm" in values) == (algorithm == "marwil")


@pytest.mark.parametrize("algorithm", ["bc", "marwil"])
def test_one_learner_process_trains_on_the_same_numbers_as_a_serial_run(algorithm: str, data: Path) -> None:
    with (
        offline(algorithm, data).build() as serial,
        offline(algorithm, data).learners(num_learners=1).build() as other,
    ):
        for _ in range(2):
            serial.train()
            other.train()
        np.testing.assert_equal(weights(serial), weights(other))


@pytest.mark.parametrize("algorithm", ["bc", "marwil"])
def test_a_resumed_run_continues_bit_for_bit(algorithm: str, data: Path, tmp_path: Path) -> None:
    config = offline(algorithm, data, lr=[(0, 1e-2), (5000, 1e-4)])
    if algorithm == "marwil":
        config.training(moving_average_sqd_adv_norm_update_rate=0.1)
    with config.build() as algo:
        algo.train()
        algo.save_to_path(tmp_path / "checkpoint")
        for _ in range(2):
            result = algo.train()
        with config.build() as other:
            other.restore_from_path(tmp_path / "checkpoint")
            for _ in range(2):
                resumed = other.train()
            np.testing.assert_equal(weights(algo), weights(other))
    learned, again = (one["learners"]["default_policy"] for one in (result, resumed))
    assert learned["policy_loss"] == again["policy_loss"]
    # Schedules follow the trained steps.
    trained = result["num_env_steps_trained_lifetime"]
    before = trained - result["learners"]["__all_modules__"]["num_env_steps_trained"]
    expected = 1e-2 + (1e-4 - 1e-2) * np.array([before, trained]) / 5000
    assert expected[1] - 1e-9 <= learned["default_optimizer_learning_rate"] <= expected[0] + 1e-9


def test_two_ranks_share_the_data_and_evaluate(data: Path) -> None:
    config = offline("bc", data).learners(num_learners=2)
    config.evaluation(evaluation_interval=2, evaluation_num_env_runners=1, evaluation_duration=2)
    with config.build() as algo:
        for _ in range(2):
            result = algo.train()
    assert result["learners"]["__all_modules__"]["num_gradient_updates_lifetime"] == 6
    assert result["num_env_steps_trained_lifetime"] == 2 * 2 * 3 * 256
    assert result["evaluation"]["env_runners"]["num_episodes"] == 2


def test_without_a_number_of_batches_an_update_is_an_epoch(data: Path) -> None:
    num_steps = sum(shard.num_env_steps for shard in open_shards(data).shards)
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
            found.append((result["num_env_steps_trained_lifetime"], weights(algo)["pi.layers.0.weight"]))
    assert found[0][0] == found[1][0]
    assert not np.array_equal(found[0][1], found[1][1])
    learner = config.build_learner()
    (drawn,) = learner.source.batches(1, np.random.default_rng(0))
    assert (
        learner.prepare(drawn).columns["default_policy"]["loss_mask"].shape[1] == 10 + 9
    )  # without an update


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
        cloned, moments = weights(algo), optimizer(algo)
    config = small(num_envs_per_env_runner=1, minibatch_size=64, model_config={"fcnet_hiddens": [32]})
    with config.build() as ppo:
        ppo.restore_from_path(tmp_path / "checkpoint", component)
        np.testing.assert_equal(weights(ppo), cloned)
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


def targets_equal_networks(state: dict[str, Any]) -> bool:
    old = [name for name in state if name.startswith("_old_")]
    return bool(old) and all(np.array_equal(state[name], state[name.removeprefix("_old_")]) for name in old)


def test_every_way_to_load_cloned_weights_into_appo_sets_its_target_networks(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offline("bc", data).build() as algo:
        algo.save_to_path(tmp_path / "checkpoint")
    module = str(tmp_path / "checkpoint/learner_group/learner/rl_module/default_policy")
    config = APPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=64)
    config.env_runners(num_env_runners=0).rl_module(model_config={"fcnet_hiddens": [32]}).debugging(seed=1)
    with config.build() as appo:
        initial = whole(appo)
        appo.restore_from_path(tmp_path / "checkpoint")
        restored = whole(appo)
        assert targets_equal_networks(restored)
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
    write_shard(tmp_path, scripted_episodes(1))
    steps = open_shards(tmp_path).shards[0].num_env_steps
    with offline("bc", tmp_path, train_batch_size_per_learner=steps + num_missing).build() as algo:
        for _ in range(2):
            overall = algo.train()["learners"]["__all_modules__"]
    assert overall["num_env_steps_trained"] == 3 * steps
    logged = [message for message in caplog.messages if "train_batch_size_per_learner" in message]
    assert len(logged) == num_missing
    if logged:
        assert f"train_batch_size_per_learner={steps + 1} is more than the {steps} env steps" in logged[0]


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config.offline_data(input_=None), "config.input_ is None: BCConfig trains on recorded data"),
        (lambda config: config.env_runners(num_env_runners=2), "num_env_runners=2: BCConfig trains on recorded"),
        (
            lambda config: config.environment("Acrobot-v1").learners(num_learners=1),
            "column 'obs'"
        ),
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


def test_each_learner_needs_an_episode(data: Path) -> None:
    config = offline("bc", data).learners(num_learners=21)
    spec = config.get_multi_rl_module_spec(spaces={"default_policy": (CARTPOLE, gym.spaces.Discrete(2))})
    learner = config.learner_class(config=config, module_spec=spec, rank=20, num_ranks=21)
    with pytest.raises(ConfigurationError, match=r"for rank 20 of 21, got 20 episodes .*lower num_learners"):
        learner.build()


def test_torn_shards_are_counted_and_never_trained(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in open_shards(data).paths:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torn = tmp_path / path.name
    torn.write_bytes(torn.read_bytes()[:-100])
    with offline("bc", tmp_path).build() as algo:
        overall = algo.train()["learners"]["__all_modules__"]
    assert overall["num_shards"] == 3
    assert overall["num_shards_skipped"] == 1
    assert any(f"skipped {torn}: torn" in record.getMessage() for record in caplog.records)


def test_box_actions_must_be_stored_as_the_module_gives_them(tmp_path: Path) -> None:
    spaces = gym.spaces.Box(-1.0, 1.0, (3,)), gym.spaces.Box(-2.0, 2.0, (1,))
    episode = SingleAgentEpisode(
        observations=[np.zeros(3, np.float32)] * 5, actions=[np.zeros(1, np.float32)] * 4, rewards=[0.0] * 4,
        terminated=True, observation_space=spaces[0], action_space=spaces[1], len_lookback_buffer=0,
    )  # fmt: skip
    write_shard(tmp_path, [episode], normalize_actions=False)
    config = offline("bc", tmp_path, train_batch_size_per_learner=4)
    config.environment(None, observation_space=spaces[0], action_space=spaces[1])
    with pytest.raises(ConfigurationError, match=r"Set .environment\(normalize_actions=False\)"):
        config.build()
    with config.environment(normalize_actions=False).build() as algo:
        algo.train()
