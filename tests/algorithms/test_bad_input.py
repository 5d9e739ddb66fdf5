"""Input that no algorithm can train on is an error when the run is built, and the text says what to change."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import (
    Algorithm,
    ConfigurationError,
    ConnectorV2,
    EpisodeBatch,
    IMPALAConfig,
    NotFiniteError,
    Policy,
    PPOConfig,
    RlzmqError,
    UnsupportedSpaceError,
)
from rlzmq.algorithms.registry import get_config_class
from rlzmq.envs.examples import MultiAgentCartPole
from rlzmq.replay import open_shards
from tests.algorithms.test_offline_evaluation import record
from tests.learners.all_algorithms import REPLAYING
from tests.support.runs import ShortEnv, small

OBSERVATIONS = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(3)
BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
SPACES: dict[str, gym.Space[Any]] = {
    "Discrete": DISCRETE,
    "MultiDiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "MultiBinary": gym.spaces.MultiBinary(3),
    "Box": BOX,
    "unbounded Box": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "Box of integers": gym.spaces.Box(0, 5, (2,), np.int64),
    "Tuple": gym.spaces.Tuple((DISCRETE, BOX)),
    "Dict": gym.spaces.Dict({"a": DISCRETE}),
    "Text": gym.spaces.Text(5),
}
OFFLINE = {"bc": DISCRETE, "marwil": DISCRETE, "cql": BOX, "iql": BOX}
USABLE = {
    "dqn": ["Discrete"],
    "sac": ["Discrete", "Box"],
    "tqc": ["Box"],
    "td3": ["Box"],
    "cql": ["Box"],
    "iql": ["Box"],
    "bc": [name for name in SPACES if name != "Text"],
    "marwil": [name for name in SPACES if name != "Text"],
}


class Still(ShortEnv):
    """Zeros as observations, for any action."""

    observation_space, length = OBSERVATIONS, 1

    def __init__(self, env_config: Any) -> None:
        super().__init__(env_config)
        self.action_space = env_config["action_space"]

    def observation(self) -> Any:
        return np.zeros(3, np.float32)


def config(algorithm: str, actions: gym.Space[Any], directory: Path) -> Any:
    made: Any = get_config_class(algorithm)().environment(Still, env_config={"action_space": actions})
    if algorithm in OFFLINE:
        made.offline_data(input_=str(directory), dataset_num_iters_per_learner=1)
    return made.training(train_batch_size_per_learner=4).rl_module(model_config={"fcnet_hiddens": [4]})


@pytest.mark.parametrize("algorithm", USABLE)
@pytest.mark.parametrize("space", SPACES)
def test_an_action_space_is_trained_or_refused_by_the_algorithms_name(
    algorithm: str, space: str, tmp_path: Path
) -> None:
    actions = SPACES[space]
    if algorithm in OFFLINE:
        record(tmp_path, (OBSERVATIONS, DISCRETE if space == "Text" else actions), 5)
    made = config(algorithm, actions, tmp_path)
    if space in USABLE[algorithm]:
        made.build_learner()
        return
    with pytest.raises(UnsupportedSpaceError) as error:
        made.build()
    text = str(error.value)
    assert type(actions).__name__ in text
    assert "rap the environment" in text


WIDER = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
DATA: dict[str, tuple[Callable[[Path, Any], None], str]] = {
    "no directory": (lambda path, actions: path.rmdir(), "does not exist. Name the directory"),
    "observations of another shape": (
        lambda path, actions: record(path, (WIDER, actions), 5),
        r"column 'obs': expected .*\(3,\).* got .*\(4,\)",
    ),
    "actions of another kind": (
        lambda path, actions: record(path, (OBSERVATIONS, BOX if actions is DISCRETE else DISCRETE), 5),
        "column 'actions': expected .* got (Box|Discrete)",
    ),
    "actions out of range": (
        lambda path, actions: record(
            path, (OBSERVATIONS, actions), 5, action=7 if actions is DISCRETE else np.full(2, 7.0, np.float32)
        ),
        "column 'actions': .* got values from 7 to 7. (Set|Scale)",
    ),
}


@pytest.mark.parametrize("algorithm", OFFLINE)
@pytest.mark.parametrize("case", DATA)
def test_recorded_data_that_does_not_fit_is_refused(algorithm: str, case: str, tmp_path: Path) -> None:
    actions, directory = OFFLINE[algorithm], tmp_path / "data"
    directory.mkdir()
    write, text = DATA[case]
    write(directory, actions)
    with pytest.raises(ConfigurationError, match=text):
        config(algorithm, actions, directory).build()


def test_actions_beyond_their_range_are_taken_if_the_config_says_that_a_policy_drew_them(
    tmp_path: Path,
) -> None:
    record(tmp_path, (OBSERVATIONS, BOX), 5, action=np.full(2, 7.0, np.float32))
    made = config("bc", BOX, tmp_path).offline_data(actions_in_input_normalized=True)
    learner = made.build_learner()
    learner.update(episodes=[])
    with pytest.raises(ConfigurationError, match="without fresh env steps"):
        learner.update(episodes=[EpisodeBatch.from_episodes(list(open_shards(tmp_path).shards[0]))])


@pytest.mark.parametrize("algorithm", OFFLINE)
def test_data_without_a_finite_step_ends_the_run(algorithm: str, tmp_path: Path) -> None:
    record(tmp_path, (OBSERVATIONS, OFFLINE[algorithm]), 5, reward=float("nan"))
    learner = config(algorithm, OFFLINE[algorithm], tmp_path).build_learner()
    with pytest.raises(NotFiniteError, match=r"offline data: no step .* can be trained"):
        learner.update(episodes=[])


@pytest.mark.parametrize("algorithm", OFFLINE)
def test_an_iteration_that_waits_for_samples_is_refused_by_algorithms_that_take_none(
    algorithm: str, tmp_path: Path
) -> None:
    record(tmp_path, (OBSERVATIONS, OFFLINE[algorithm]), 5)
    made = config(algorithm, OFFLINE[algorithm], tmp_path)
    made.reporting(min_train_timesteps_per_iteration=8).validate()
    with pytest.raises(ConfigurationError, match="set min_train_timesteps_per_iteration"):
        made.reporting(min_sample_timesteps_per_iteration=1).build()


SETTINGS: list[tuple[dict[str, Any], str]] = [
    (
        {"train_batch_size_per_learner": 200, "replay_buffer_config": {"capacity": 100}},
        "fewer than train_batch_size_per_learner=200. Raise the capacity to 200 or more",
    ),
    ({"n_step": 160, "replay_buffer_config": {"capacity": 400}}, "Raise the capacity to 640 or more, or lower n_step"),
    ({"n_step": 300}, r"an episode of Pendulum-v1 ends after at most 200 steps .* Lower n_step to 200"),
    ({"n_step": (2, 201)}, r"n_step=\(2, 201\): an episode of Pendulum-v1 ends"),
    ({"replay_buffer_config": {"beta": float("nan")}}, r"'beta'\]: expected a number >= 0, got nan"),
    ({"training_intensity": 1e7}, "Lower training_intensity or rollout_fragment_length, or raise train_batch_size"),
]  # fmt: skip


@pytest.mark.parametrize("algorithm", REPLAYING)
@pytest.mark.parametrize(("training", "text"), SETTINGS)
def test_replay_settings_that_cannot_work_are_refused(
    algorithm: str, training: dict[str, Any], text: str
) -> None:
    made: Any = get_config_class(algorithm)().environment("Pendulum-v1").training(**training)
    with pytest.raises(ConfigurationError, match=text):
        made.build()


@pytest.mark.parametrize(
    ("algorithm", "name", "value"),
    [
        ("ppo", "lr", -1e-3),
        ("sac", "critic_lr", float("nan")),
        ("iql", "value_lr", [(0, 1e-3), (100, -1e-3)]),
        ("dqn", "epsilon", 1.5),
        ("dqn", "epsilon", [(0, 1.0), (100, -0.1)]),
    ],
)
def test_a_rate_out_of_its_range_is_refused(algorithm: str, name: str, value: Any) -> None:
    made: Any = get_config_class(algorithm)()
    with pytest.raises(ConfigurationError, match=rf"config.{name}: expected float ≥ 0.0"):
        made.training(**{name: value})


def test_a_limit_of_episodes_that_the_config_sets_counts() -> None:
    made: Any = get_config_class("dqn")().environment("CartPole-v1", env_config={"max_episode_steps": 10})
    with pytest.raises(ConfigurationError, match="Lower n_step to 10 or less"):
        made.training(n_step=11).validate()
    made.training(n_step=10).validate()


class NoSpaces(gym.Env[Any, Any]):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}


class NoEnv:
    pass


class HalfWrapper(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, config: Any) -> None:
        pass  # forgets super().__init__(env)


@pytest.mark.parametrize("env", [NoSpaces, HalfWrapper])
def test_an_env_without_spaces_is_named_with_what_is_missing(env: type) -> None:
    with pytest.raises(ConfigurationError, match=f"observation_space of {env.__name__}"):
        PPOConfig().environment(env).build()


class NoCallback:
    """Derives from nothing, and does not take what the hook is given."""

    def on_episode_end(self, episode: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (lambda: PPOConfig().callbacks(NoCallback), r"got NoCallback\.on_episode_end"),
        (lambda: PPOConfig().environment(lambda config: None).build(), "returned None"),
        (lambda: PPOConfig().environment(NoEnv).build(), r"returned .*\(NoEnv\); expected a gymnasium.Env"),
        (lambda: PPOConfig().environment(gym.make("CartPole-v1")).build(), "pass the id 'CartPole-v1'"),
        (lambda: PPOConfig().training(lr="fast"), "config.lr: expected"),
        (lambda: Algorithm.from_checkpoint("/nowhere"), "/nowhere does not exist"),
        (lambda: Policy.load("/nowhere"), "/nowhere does not exist"),
    ],
)
def test_a_mistake_is_told_in_the_frame_that_made_it(mistake: Callable[[], Any], text: str) -> None:
    with pytest.raises(RlzmqError, match=text) as caught:
        mistake()
    assert places(caught.value) <= {Path(__file__)}


def places(error: BaseException) -> set[Path]:
    return {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}


def test_a_mistake_with_a_running_algorithm_is_told_in_the_frame_that_made_it() -> None:
    with small(env=MultiAgentCartPole, policies={"a"}, policy_mapping_fn=lambda *_: "a").build() as algo:
        result = algo.train()
        for mistake, text in {
            lambda: algo.get_module("b"): "No module 'b'. Valid: a.",
            lambda: algo.remove_module("b"): "no module 'b'. Valid: a.",
            lambda: result["episode_return_men"]: "Did you mean 'env_runners/episode_return_mean'?",
            lambda: result["env_runners"]["episode_return_men"]: "Did you mean 'episode_return_mean'?",
        }.items():
            with pytest.raises(KeyError, match=re.escape(text)) as caught:
                mistake()
            ours = [path for path in places(caught.value) if path != Path(__file__)]
            assert len(ours) <= 1, f"{text}: only the function that was called"


class KeepsActionsOnly(ConnectorV2):
    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": batch["actions"]}


@pytest.mark.parametrize("config_class", [PPOConfig, IMPALAConfig])
def test_a_piece_that_drops_what_the_loss_needs_is_told_what_to_return(config_class: Any) -> None:
    config = small(config_class, module_to_env_connector=lambda env, spaces: KeepsActionsOnly())
    text = "module 'default_policy': .* column 'action_.*return the whole batch"
    with config.build() as algo, pytest.raises(ConfigurationError, match=text):
        algo.train()


class PromisesSeven(ConnectorV2):
    def recompute_output_observation_space(self, *spaces: Any) -> gym.Space[Any]:
        return gym.spaces.Box(-1.0, 1.0, (7,))

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return batch


def test_observations_that_do_not_fit_the_default_module_are_told_with_both_shapes() -> None:
    config = small(env_to_module_connector=lambda env, spaces, device: PromisesSeven())
    with config.build() as algo, pytest.raises(ValueError, match=r"shape \(2, 4\), expected \[batch, 7\]"):
        algo.train()
