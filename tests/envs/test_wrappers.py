"""config.wrappers and is_atari: the forms, what a wrong one is told, and that every way to make an env uses them."""

from __future__ import annotations

import re
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import PPOConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.envs.multi_agent_env import MultiAgentEnv
from rlzmq.envs.registry import make_env, resolve_env
from rlzmq.envs.vector import make_vec
from rlzmq.envs.wrappers import split_wrappers, wrap_env
from tests.support.runs import ShortEnv, small

HERE = __name__


class TenTimes(gym.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return 10.0 * float(reward)


class Plus(gym.RewardWrapper[Any, Any]):
    def __init__(self, env: Any, amount: float = 1.0) -> None:
        super().__init__(env)
        self.amount = amount

    def reward(self, reward: Any) -> float:
        return float(reward) + self.amount


@pytest.mark.parametrize(
    ("wrappers", "expected"),
    [
        ([TenTimes, Plus], 11.0),
        ([Plus, TenTimes], 20.0),
        ([f"{HERE}:Plus(amount=2.5)", f"{HERE}:TenTimes"], 35.0),
        ([f"{HERE}:Plus(-1)"], 0.0),
        (["ClipReward(max_reward=0.25)"], 0.25),
        ([lambda env: TenTimes(env)], 10.0),
    ],
)
def test_the_first_wrapper_is_the_innermost(wrappers: list[object], expected: float) -> None:
    env = wrap_env(gym.make("CartPole-v1"), tuple(wrappers))
    env.reset(seed=0)
    assert env.step(0)[1] == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("A", ["A"]),
        ("A, b.c:D(x=1, y=(2, 3)),E", ["A", "b.c:D(x=1, y=(2, 3))", "E"]),
        ("A(x='a,(b'),B", ["A(x='a,(b')", "B"]),
        ("", []),
    ],
)
def test_a_text_is_split_outside_of_brackets_and_quotes(text: str, parts: list[str]) -> None:
    assert split_wrappers(text) == parts


@pytest.mark.parametrize(
    ("wrapper", "expected"),
    [
        ("ClipRewards", r"gymnasium\.wrappers has no wrapper 'ClipRewards'\. Did you mean 'ClipReward'"),
        (f"{HERE}:TenTime", "Did you mean 'TenTimes'"),
        ("no.such.module:Thing", r"'no\.such\.module:Thing' cannot be found"),
        ("TransformReward(func=abs)", r"cannot read the arguments of 'TransformReward\(func=abs\)'"),
        ("TimeLimit(", "cannot read the arguments"),
        ("TimeLimit(**3)", "cannot read the arguments"),
        ("TimeLimit(steps=3)", r"'TimeLimit\(steps=3\)' cannot wrap .*: TypeError: .*'steps'"),
        ("AtariPreprocessing", r"'AtariPreprocessing' cannot wrap .*CartPole"),
        (lambda env: None, "<lambda> returned None; expected the wrapped environment"),
        (7, "got 7"),
    ],
)
def test_a_wrong_wrapper_is_refused_with_the_way_out(wrapper: object, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        wrap_env(gym.make("CartPole-v1"), [wrapper])


def test_spaces_runners_and_vectors_have_the_wrapped_env() -> None:
    wrappers = [f"{HERE}:TenTimes", "TimeAwareObservation", "TimeLimit(max_episode_steps=7)"]
    config = small(wrappers=wrappers, seed=0)
    assert config.single_spaces()[0].shape == (5,)
    again = PPOConfig.from_toml(config.to_toml())
    assert again.wrappers == wrappers
    with again.build() as algo:
        found = algo.train()["env_runners"]
    assert found["episode_return_max"] == 10.0 * found["episode_len_max"] == 70.0


def test_a_pettingzoo_env_is_made_multi_agent_by_a_wrapper() -> None:
    pytest.importorskip("pettingzoo")
    wrappers = ["rlzmq:ParallelPettingZooEnv"]
    entry = PPOConfig().environment("pettingzoo.classic.rps.rps:parallel_env", wrappers=wrappers).env_entry()
    env = make_env(entry)
    assert isinstance(env, MultiAgentEnv)
    assert env.possible_agents == ["player_0", "player_1"]
    env.close()


def test_a_native_vector_env_has_no_single_envs_to_wrap() -> None:
    entry = PPOConfig().environment("CartPole-v1", wrappers=["ClipReward"]).env_entry()
    with pytest.raises(ConfigurationError, match="native vector env"):
        make_vec(entry, num_envs=2, mode="vector_entry_point")


@pytest.mark.parametrize(
    ("env", "module", "package"),
    [
        ("ALE/Pong-v5", "ale_py", "rlzmq[atari]"),
        ("MiniGrid-Empty-8x8-v0", "minigrid", "rlzmq[minigrid]"),
        ("dm_control/cartpole-balance-v0", "shimmy", "rlzmq[dm-control]"),
        ("envpool/CartPole-v1", "envpool", "envpool"),
        ("LunarLander-v3", "Box2D", "rlzmq[box2d]"),
        ("HalfCheetah-v5", "mujoco", "rlzmq[mujoco]"),
    ],
)
def test_a_missing_library_names_its_extra(
    env: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in list(sys.modules):
        if loaded.partition(".")[0] == module or loaded.startswith(
            ("gymnasium.envs.box2d", "gymnasium.envs.mujoco")
        ):
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    if module not in ("Box2D", "mujoco"):  # these ids are Gymnasium's
        monkeypatch.delitem(gym.registry, env, raising=False)
    with pytest.raises(ConfigurationError, match=re.escape(f"pip install {package!r}")):
        make_env(env)


class Game(ShortEnv):
    """What AtariPreprocessing reads of an Atari game."""

    _frameskip = 1
    observation_space, action_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8), gym.spaces.Discrete(3)

    @property
    def ale(self) -> Any:
        return self

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "LEFT", "RIGHT"]

    def lives(self) -> int:
        return 3

    def getScreenGrayscale(self, out: Any) -> None:
        out[:] = 100

    def observation(self) -> Any:
        return np.zeros((210, 160, 3), np.uint8)


def test_is_atari_stacks_four_grey_frames_of_84_by_84() -> None:
    pytest.importorskip("cv2")
    env = make_env(PPOConfig().environment(Game, is_atari=True).env_entry())
    observation, _ = env.reset(seed=0)
    assert (observation.shape, observation.dtype) == ((4, 84, 84), np.uint8)
    observation, reward, *_ = env.step(1)
    assert reward == 4.0  # of four frames
    assert observation.max() == 100


@pytest.mark.parametrize(
    ("library", "env", "settings", "shape"),
    [
        ("ale_py", "ALE/Pong-v5", {"is_atari": True}, (4, 84, 84)),
        ("Box2D", "LunarLander-v3", {}, (8,)),
        ("mujoco", "HalfCheetah-v5", {}, (17,)),
        ("minigrid", "MiniGrid-Empty-5x5-v0", {"wrappers": ["minigrid.wrappers:ImgObsWrapper"]}, (7, 7, 3)),
        ("dm_control", "dm_control/cartpole-balance-v0", {"wrappers": ["FlattenObservation"]}, (5,)),
        ("envpool", "envpool/CartPole-v1", {}, (4,)),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_an_installed_library_is_sampled_and_trained(
    library: str, env: str, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    pytest.importorskip(library)
    config = small(env=env, train_batch_size_per_learner=32, **settings)
    assert config.single_spaces()[0].shape == shape
    with config.build() as algo:
        assert algo.train()["num_env_steps_sampled_lifetime"] == 32


def test_the_native_vector_env_of_an_atari_game_gives_the_games_rewards() -> None:
    pytest.importorskip("ale_py")
    entry = PPOConfig().environment("ALE/Breakout-v5", is_atari=True).env_entry()
    env = make_vec(entry, num_envs=2, mode="vector_entry_point")
    assert env.single_observation_space == resolved_space("ALE/Breakout-v5")
    assert env.spec is not None
    assert env.spec.kwargs["reward_clipping"] is False
    env.close()


def resolved_space(name: str) -> gym.Space[Any]:
    pytest.importorskip("cv2")
    env = make_env(PPOConfig().environment(name, is_atari=True).env_entry())
    assert resolve_env(name).gym_id == name
    return env.observation_space  # type: ignore[no-any-return]


def test_envpool_repeats_its_episodes_with_the_same_seed() -> None:
    pytest.importorskip("envpool")
    env = make_vec("envpool/CartPole-v1", num_envs=3)
    first, _ = env.reset(seed=5)
    again, _ = env.reset(seed=5)
    other, _ = env.reset(seed=6)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    env.close()
    with pytest.raises(ConfigurationError, match="Did you mean 'CartPole-v1'"):
        make_vec("envpool/CartPol-v1", num_envs=3)
