"""A policy outside of training acts as the runners act: same pipelines, state, statistics, scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import (
    PPO,
    CheckpointError,
    DefaultModelConfig,
    DQNConfig,
    FrameStackingEnvToModule,
    FrameStackingLearner,
    MeanStdFilter,
    MultiRLModuleSpec,
    Policy,
    PrevActionsPrevRewards,
    RLModuleSpec,
    SingleAgentEnvRunner,
)
from rlzmq.algorithms.policy_agents import as_value_of
from rlzmq.envs.examples import MultiAgentCartPole, StatelessCartPole
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from tests.connectors.connector_fakes import PassThrough
from tests.support.runs import small as small_run
from tests.support.runs import two_agents


class OwnModule(DefaultActorCriticModule):
    """A module of a user's."""


def small(env: Any = "CartPole-v1", pieces: Any = None, **model: Any) -> Any:
    model = {"fcnet_hiddens": [16], **model}
    batch = {"train_batch_size_per_learner": 120, "lr": 1e-2, "seed": 3}
    return small_run(env=env, env_to_module_connector=pieces, model_config=model, **batch)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": ("CartPole-v1", None, {}),
    "filter and unsquashing": ("Pendulum-v1", MeanStdFilter, {}),
    "custom piece": ("Pendulum-v1", lambda: [PassThrough(), MeanStdFilter()], {}),
    "lstm": (StatelessCartPole, None, {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 5}),
    "previous actions": (StatelessCartPole, lambda: PrevActionsPrevRewards(n_prev_actions=2), {}),
    "frame stacking": ("stacked", lambda: FrameStackingEnvToModule(num_frames=3), {}),
}


class Recorded(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps what its env gave since the last reset, in `log`: (observation, reward that came with it)."""

    log: ClassVar[list[tuple[Any, float]]] = []

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        Recorded.log = [(np.array(observation), 0.0)]
        return observation, info

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        Recorded.log.append((np.array(result[0]), float(result[1])))
        return result


def with_last_axis(config: Any) -> Any:
    env = gym.make("CartPole-v1")
    space = gym.spaces.Box(-np.inf, np.inf, (2, 2, 1), np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs.reshape(2, 2, 1), space)


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_policy_repeats_the_runners_greedy_actions(name: str, tmp_path: Path) -> None:
    env, pieces, model = CASES[name]

    def make(config: Any) -> Any:
        if env == "stacked":
            return Recorded(with_last_axis(config))
        return Recorded(gym.make(env) if isinstance(env, str) else env(config))

    config = small(make, pieces, **model)
    config.env_runners(num_envs_per_env_runner=1)
    if env == "stacked":
        config.learners(learner_connector=lambda: FrameStackingLearner(num_frames=3))
    with config.build() as algo:
        algo.train()
        path = algo.save_to_path(tmp_path / "c")
        from_algorithm = algo.get_policy()
        runner = SingleAgentEnvRunner(config=algo.config)
        (modules,) = algo.learner_group.foreach_learner(lambda learner: learner.module)
        runner.set_weights(runner.get_weights_layout().snapshot(modules), version=0)
        runner.env_to_module.freeze_statistics()
        runner.set_connector_state(algo.get_state()["env_runner"])
        episode = runner.sample(num_episodes=1, explore=False)[0]
        space = runner.env.single_action_space
        observation_space = runner.env.single_observation_space
        runner.stop()
    loaded = Policy.load(path, config=config)
    log = list(Recorded.log)
    for policy in (from_algorithm, loaded, loaded.copy()):
        actions = [
            policy.compute_action(observation, reward=reward) for observation, reward in log[: len(episode)]
        ]
        expected = [_to_env(space, action) for action in episode.get_actions()]
        np.testing.assert_allclose(np.stack(actions), np.stack(expected), rtol=1e-4, atol=1e-5)
        assert all(space.contains(np.asarray(action, space.dtype)) for action in actions)
    assert loaded.observation_space == observation_space


def _to_env(space: Any, action: Any) -> Any:
    if isinstance(space, gym.spaces.Box):
        return np.clip(space.low + (action + 1) * (space.high - space.low) / 2, space.low, space.high)
    return action


def test_reset_forgets_the_state() -> None:
    config = small(StatelessCartPole, use_lstm=True, lstm_cell_size=8)
    with config.build() as algo:
        policy = algo.get_policy()
        assert not policy.is_stateless
        observations = [np.array([0.01 * i, 0.02], np.float32) for i in range(150)]

        def logits() -> list[Any]:
            seen = []
            for observation in observations:
                policy.compute_action(observation)
                seen.append(policy._last_extras["action_dist_inputs"])
            return seen

        first, going_on = logits(), logits()
        policy.reset()
        np.testing.assert_array_equal(np.stack(first), np.stack(logits()))
        assert (np.stack(first) != np.stack(going_on)).any()
        with pytest.raises(ValueError, match=r"policy\.copy\(\)"):
            policy.compute_actions(np.stack(observations))


@pytest.mark.parametrize("pieces", [None, PassThrough])
def test_many_observations_at_once(pieces: Any) -> None:
    with small("Pendulum-v1", pieces).build() as algo:
        policy = algo.get_policy()
        batch = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
        actions = policy.compute_actions(batch)
        assert actions.shape == (7, 1)
        one_by_one = np.stack([policy.compute_action(row) for row in batch])
        np.testing.assert_allclose(actions, one_by_one, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(actions, policy.compute_actions(list(batch)))
        assert (policy.compute_actions(batch, explore=True) != actions).any()


@pytest.mark.parametrize("end", [10, 10**9])
def test_exploration_schedules_are_where_the_run_is(end: int, tmp_path: Path) -> None:
    config = DQNConfig().environment("CartPole-v1").debugging(seed=1)
    config.training(epsilon=[(0, 1.0), (end, 0.0)], num_steps_sampled_before_learning_starts=1)
    config.reporting(min_sample_timesteps_per_iteration=20, min_time_s_per_iteration=0)
    batch = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    with config.build() as algo:
        algo.train()
        for policy in (algo.get_policy(), Policy.load(algo.save_to_path(tmp_path / "checkpoint"))):
            assert policy.num_env_steps_sampled >= 10
            is_greedy = policy.compute_actions(batch, explore=True) == policy.compute_actions(batch)
            assert is_greedy.all() == (end == 10)


def test_the_algorithms_own_actions_follow_its_weights() -> None:
    with small("Pendulum-v1").build() as algo:
        observation = np.array([1.0, 0.0, 0.5])
        before = algo.compute_action(observation)
        assert algo.compute_action(observation) == before
        algo.train()
        assert algo.compute_action(observation) != before
        assert algo.compute_action(observation) == algo.get_policy().compute_action(observation)


def test_one_agent_or_all_of_them(tmp_path: Path) -> None:
    config = two_agents(model_config={"fcnet_hiddens": [16]})
    with config.build() as algo:
        path = algo.save_to_path(tmp_path / "c")
    everyone = Policy.load(path, config=config)
    alone = Policy.load(path, config=config, module_id="p1")
    env = MultiAgentCartPole({"num_agents": 2})
    observations, _ = env.reset(seed=1)
    for _ in range(80):
        actions = everyone.compute_action(observations)
        assert actions.keys() == observations.keys()
        if 1 in observations:
            assert alone.compute_action(observations[1]) == actions[1]
        observations, _, terminateds, truncateds, _ = env.step(actions)
        done = {agent_id for flags in (terminateds, truncateds) for agent_id, flag in flags.items() if flag}
        if "__all__" in done:
            break
        observations = {agent_id: obs for agent_id, obs in observations.items() if agent_id not in done}
    assert alone.compute_actions(np.zeros((3, 4), np.float32)).shape == (3,)
    with pytest.raises(KeyError, match="p1"):
        Policy.load(path, config=config, module_id="p11")


def test_bad_input_is_named(tmp_path: Path) -> None:
    with small().build() as algo:
        policy = algo.get_policy()
        with pytest.raises(ValueError, match=r"expected shape \(4,\), got \(3,\)"):
            policy.compute_action(np.zeros(3))
        with pytest.raises(ValueError, match=r"expected shape \('N', 4\)"):
            policy.compute_actions(np.zeros(4))
        with pytest.raises(ValueError, match="expected numbers, got 'left'"):
            policy.compute_action("left")
        with pytest.raises(KeyError, match="default_policy"):
            algo.get_policy(module_id="default")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        Policy.load(tmp_path)
    pixels = gym.spaces.Box(0, 255, (2,), np.uint8)  # an image in [0, 1] is not cut to zeros
    with pytest.raises(ValueError, match=r"whole numbers \(uint8\), got array\(\[0.5"):
        as_value_of(pixels, np.array([0.5, 1.0]))


def test_a_checkpoint_carries_spaces_and_specs(tmp_path: Path) -> None:
    space = gym.spaces.Box(-10.0, 10.0, (4,), np.float32)
    config = small().environment("CartPole-v1", observation_space=space)
    config.rl_module(rl_module_spec=RLModuleSpec(model_config={"fcnet_hiddens": [8]}))
    with config.build() as algo:
        path = algo.save_to_path(tmp_path / "c")
        expected = algo.compute_action(np.ones(4))
    policy = Policy.load(path)
    assert policy.observation_space == space
    assert policy.compute_action(np.ones(4)) == expected
    with PPO.from_checkpoint(path) as restored:
        assert restored.config.rl_module_spec.model_config == {"fcnet_hiddens": [8]}


def test_module_classes_that_a_foreign_checkpoint_names_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small().rl_module(
        rl_module_spec=MultiRLModuleSpec({"default_policy": RLModuleSpec(module_class=OwnModule)})
    )
    config.rl_module(model_config={})
    with config.build() as algo:
        path = algo.save_to_path(tmp_path / "c")
    assert isinstance(Policy.load(path).acting_module()[1], OwnModule)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody"))
    with pytest.raises(CheckpointError, match=r"module_class.*OwnModule(.|\n)*trust=\['test_"):
        Policy.load(path)
    handed: list[dict[str, Any]] = [
        {"config": config},
        {"trust": [__name__]},
        {"module_class": OwnModule},
    ]
    for options in handed:
        policy = Policy.load(path, **options)
        assert isinstance(policy.acting_module()[1], OwnModule)
        assert policy.compute_action(np.ones(4)) in (0, 1)


def test_functions_of_a_script_are_not_needed_by_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lambda maps the agents, another makes the pieces: the checkpoint says what they gave."""
    config = two_agents(env_to_module_connector=lambda: MeanStdFilter(multi_agent=True, clip_by_value=5.0))
    config.multi_agent(policy_mapping_fn=lambda agent_id, episode: f"p{agent_id}")
    observations = {0: np.ones(4, np.float32), 1: np.ones(4, np.float32)}
    with config.build() as algo:
        algo.train()
        expected = algo.get_policy().compute_action(observations)
        path = algo.save_to_path(tmp_path / "c")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody"))
    policy = Policy.load(path)
    assert policy.compute_action(observations) == expected
    assert [one.acting_module()[0] for one in Policy.load_each(path)] == ["p0", "p1"]
    (piece,) = (p for p in policy.pipelines()["env_to_module_connector"] if isinstance(p, MeanStdFilter))
    assert piece.clip_by_value == 5.0


# -- previous actions and rewards by settings of the model ---------------------------------------------


def stateless(**model: Any) -> Any:
    return small_run(
        env=StatelessCartPole, train_batch_size_per_learner=80, model_config={"lstm_cell_size": 8, **model}
    )


def test_an_lstm_gets_its_previous_action_and_reward_by_itself() -> None:
    config = stateless(use_lstm=True, lstm_use_prev_action=True, lstm_use_prev_reward=True)
    with config.build() as algo:
        observations = algo.env_runner.sample(num_timesteps=8)[0].get_observations()
        assert observations["prev_n_actions"].shape[1] == 2
        assert observations["prev_n_rewards"].shape[1] == 1
        assert observations["prev_n_rewards"][1] == 1.0
        result = algo.train()
        assert np.isfinite(result["learners"]["default_policy"]["total_loss"])


def test_only_what_is_asked_for_and_after_the_users_pieces() -> None:
    config = stateless(use_lstm=True, lstm_use_prev_reward=True).env_runners(
        env_to_module_connector=MeanStdFilter
    )
    pipeline = config.build_env_to_module_connector()
    assert pipeline.piece_names[:2] == ["MeanStdFilter", "PrevActionsPrevRewards"]
    assert sorted(pipeline.observation_space.spaces) == ["_orig_obs", "prev_n_rewards"]


def test_the_users_own_piece_is_enough() -> None:
    config = stateless(use_lstm=True, lstm_use_prev_action=True).env_runners(
        env_to_module_connector=lambda: PrevActionsPrevRewards(n_prev_actions=3)
    )
    pipeline = config.build_env_to_module_connector()
    assert pipeline.piece_names.count("PrevActionsPrevRewards") == 1
    assert pipeline.observation_space["prev_n_actions"].shape == (6,)


def test_settings_as_a_dataclass_and_of_several_agents() -> None:
    config = two_agents().rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[8], lstm_cell_size=8, lstm_use_prev_action=True)
    )
    with config.build() as algo:
        algo.train()
        space = algo.get_module("p1").observation_space
        assert sorted(space.spaces) == ["_orig_obs", "prev_n_actions"]


@pytest.mark.parametrize("length", [{}, {"max_seq_len": "auto"}])
def test_sequences_have_a_length_without_being_told(length: dict[str, Any]) -> None:
    with stateless(use_lstm=True, **length).build() as algo:
        algo.train()
