"""Multi-agent environments: base class, make_multi_agent, groups, PettingZoo, vectorization."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.core.errors import ConfigurationError, MultiAgentEnvError
from rlzmq.envs.examples import MultiAgentCartPole
from rlzmq.envs.multi_agent_env import (
    MultiAgentEnv,
    ParallelPettingZooEnv,
    PettingZooEnv,
    agent_spaces,
    make_multi_agent,
    make_multi_agent_vec,
)
from rlzmq.envs.registry import EnvContext
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode


class Countdown(MultiAgentEnv):
    """Three agents; after 4 steps all are terminated."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.possible_agents = self.agents = ["a", "b", "c"]
        self.observation_spaces = dict.fromkeys(self.agents, gym.spaces.Discrete(10))
        self.action_spaces = dict.fromkeys(self.agents, gym.spaces.Discrete(2))
        self.seed: int | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.seed = 4, seed
        return dict.fromkeys(self.agents, self.t), {}

    def step(self, action_dict: Any) -> Any:
        self.t -= 1
        rewards = {agent: float(action) for agent, action in action_dict.items()}
        return dict.fromkeys(self.agents, self.t), rewards, {"__all__": self.t == 0}, {"__all__": False}, {}


def play(env: Any, num_steps: int = 300, seed: int = 0) -> MultiAgentEpisode:
    """A random episode, as the episodes' rules see it."""
    observation_spaces, action_spaces = agent_spaces(env)
    episode = MultiAgentEpisode(observation_space=observation_spaces, action_space=action_spaces)
    observations, infos = env.reset(seed=seed)
    episode.add_env_reset(observations=observations, infos=infos)
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        actions = {}
        for agent in episode.get_agents_to_act():
            observation = episode.agent_episodes[agent].get_observations(-1)
            assert env.get_observation_space(agent).contains(observation), (agent, observation)
            mask = observation.get("action_mask") if isinstance(observation, dict) else None
            if mask is not None:
                actions[agent] = int(rng.choice(np.flatnonzero(mask)))
            else:
                action_spaces[agent].seed(int(rng.integers(2**31)))
                actions[agent] = action_spaces[agent].sample()
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        episode.add_env_step(
            observations, actions, rewards, infos, terminateds=terminateds, truncateds=truncateds
        )
        if episode.is_done:
            assert True in (terminateds["__all__"], truncateds["__all__"])
            break
        assert True not in (terminateds.get("__all__"), truncateds.get("__all__"))
    episode.validate()
    env.close()
    return episode


def test_spaces_come_by_agent_or_as_one_for_all() -> None:
    env = Countdown()
    assert env.get_observation_space("a") == gym.spaces.Discrete(10)
    assert (env.num_agents, env.max_num_agents) == (3, 3)
    with pytest.raises(ConfigurationError, match="no agent 'd'"):
        env.get_action_space("d")
    env.observation_spaces = None
    with pytest.raises(ConfigurationError, match="has no spaces"):
        env.get_observation_space("a")
    env.observation_space = gym.spaces.Discrete(4)
    assert env.get_observation_space("b") == gym.spaces.Discrete(4)
    assert list(agent_spaces(Countdown())[0].spaces) == ["a", "b", "c"]
    with pytest.raises(ConfigurationError, match="possible_agents"):
        agent_spaces(MultiAgentEnv())


# -- make_multi_agent ---------------------------------


def test_the_pictures_of_all_agents_lie_side_by_side() -> None:
    one = gym.make("CartPole-v1", render_mode="rgb_array")
    env = make_multi_agent("CartPole-v1")(EnvContext({"num_agents": 2, "render_mode": "rgb_array"}))
    for made in (one, env):
        made.reset(seed=0)
    height, width, _ = one.render().shape
    assert env.render_mode == "rgb_array"
    assert env.render().shape == (height, 2 * width, 3)
    for made in (one, env):
        made.close()


def test_independent_agents_end_one_by_one_and_the_last_one_ends_the_episode() -> None:
    env = MultiAgentCartPole({"num_agents": 3})
    assert env.possible_agents == [0, 1, 2]
    episode = play(env, 500)
    assert episode.is_terminated
    lengths = [len(sae) for sae in episode.agent_episodes.values()]
    assert max(lengths) == len(episode) > min(lengths)
    assert all(sae.is_terminated for sae in episode.agent_episodes.values())


def test_agents_of_one_env_and_seed_differ() -> None:
    env = MultiAgentCartPole({"num_agents": 2})
    first, _ = env.reset(seed=1)
    again, _ = env.reset(seed=1)
    assert not np.array_equal(first[0], first[1])
    assert np.array_equal(first[1], again[1])
    with pytest.raises(ConfigurationError, match="num_agents"):
        MultiAgentCartPole({"num_agents": 0})


# -- groups ---------------------------------


def test_groups_observe_and_act_in_tuples_and_share_the_reward() -> None:
    env = Countdown().with_agent_groups({"ab": ["a", "b"]})
    assert env.possible_agents == ["ab", "c"]
    assert env.get_observation_space("ab") == gym.spaces.Tuple([gym.spaces.Discrete(10)] * 2)
    observations, _ = env.reset()
    assert observations == {"ab": (4, 4), "c": 4}
    _, rewards, terminateds, _, infos = env.step({"ab": (1, 1), "c": 0})
    assert rewards == {"ab": 2.0, "c": 0.0}
    assert infos["ab"]["_group_rewards"] == [1.0, 1.0]
    assert not terminateds["__all__"]
    assert len(play(env)) == 4


class EndsByFlags(Countdown):
    """Whose agents end as the config says: step -> (terminated, truncated)."""

    def __init__(self, ends: dict[int, tuple[str, str]]) -> None:
        super().__init__()
        self.ends = ends

    def step(self, action_dict: Any) -> Any:
        observations, rewards, *_ = super().step(action_dict)
        terminated, truncated = self.ends.get(4 - self.t, ("", ""))
        return observations, rewards, dict.fromkeys(terminated, True), dict.fromkeys(truncated, True), {}


@pytest.mark.parametrize(
    ("ends", "end_of_group"),
    [
        ({3: ("a", "b")}, (3, True, False)),  # in different ways
        ({1: ("", "a"), 3: ("b", "")}, (3, True, False)),  # at different steps
        ({2: ("", "ab")}, (2, False, True)),
        ({2: ("ac", "")}, None),
    ],
)
def test_a_group_ends_once_with_the_last_of_its_members(ends: Any, end_of_group: Any) -> None:
    env = EndsByFlags(ends).with_agent_groups({"g": ["a", "b"]})
    for _ in range(2):
        env.reset()
        found = []
        for step in range(1, 5):
            _, _, terminateds, truncateds, _ = env.step({"g": (0, 0), "c": 0})
            if terminateds["g"] or truncateds["g"]:
                found.append((step, terminateds["g"], truncateds["g"]))
        assert found == ([end_of_group] if end_of_group else [])


def test_groups_of_unknown_shared_or_separate_agents_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="unknown agent 'z'"):
        Countdown().with_agent_groups({"g": ["a", "z"]})
    with pytest.raises(ConfigurationError, match="two groups"):
        Countdown().with_agent_groups({"g": ["a"], "h": ["a"]})
    env = MultiAgentCartPole({"num_agents": 2}).with_agent_groups({"g": [0, 1]})
    env.reset(seed=0)

    def play_on() -> None:
        for _ in range(500):
            env.step({"g": (0, 1)})

    with pytest.raises(MultiAgentEnvError, match="all members or of none"):
        play_on()


# -- PettingZoo ---------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["rps_v2", "tictactoe_v3"])
def test_turn_based_pettingzoo_games_play_to_the_end(name: str) -> None:
    classic = pytest.importorskip("pettingzoo.classic")
    module = getattr(classic, name)
    for seed in range(3):
        episode = play(PettingZooEnv(module.env()), seed=seed)
        assert episode.is_done
        assert len(episode.agent_ids) == 2
        steps = [len(sae) for sae in episode.agent_episodes.values()]
        assert sum(steps) == episode.agent_steps() > 0
        if name != "rps_v2":
            assert episode.get_return() in (0.0, -1.0)  # zero-sum, or an agent gave up an illegal move


@pytest.mark.filterwarnings("ignore")
def test_a_turn_based_agent_gets_its_outcome_with_its_next_turn() -> None:
    classic = pytest.importorskip("pettingzoo.classic")
    env = PettingZooEnv(classic.tictactoe_v3.env())
    observations, _ = env.reset(seed=0)
    assert list(observations) == ["player_1"]
    for action in (0, 3, 1, 4):
        (agent,) = observations
        observations, rewards, *_ = env.step({agent: action})
        assert list(observations) == list(rewards) != [agent]
    observations, rewards, terminateds, truncateds, _ = env.step({"player_1": 2})
    assert rewards == {"player_1": 1, "player_2": -1}
    assert set(observations) == {"player_1", "player_2"}
    assert terminateds["__all__"]
    assert not truncateds["__all__"]


@pytest.mark.filterwarnings("ignore")
def test_the_wrong_kind_of_pettingzoo_env_is_refused_with_the_right_adapter_named() -> None:
    classic = pytest.importorskip("pettingzoo.classic")
    with pytest.raises(ConfigurationError, match="Use PettingZooEnv"):
        ParallelPettingZooEnv(classic.rps_v2.env())
    with pytest.raises(ConfigurationError, match="Use ParallelPettingZooEnv"):
        PettingZooEnv(classic.rps_v2.parallel_env())
    with pytest.raises(ConfigurationError, match="got int"):
        PettingZooEnv(3)


# -- vectorization ---------------------------------


def test_the_step_after_an_end_resets_and_ignores_the_actions() -> None:
    vector = make_multi_agent_vec(Countdown, num_envs=2, context=EnvContext())
    observations, _ = vector.reset(seed=5)
    assert observations == [dict.fromkeys("abc", 4)] * 2
    assert [env.seed for env in vector.envs] == [5, 1005]
    actions = [dict.fromkeys("abc", 1)] * 2
    for t in (3, 2, 1, 0):
        observations, rewards, terminateds, _, _ = vector.step(actions)
        assert observations[0]["a"] == t
        assert not vector.resetting.any()
    assert vector.needs_reset.all()
    assert terminateds[0]["__all__"]
    observations, rewards, terminateds, truncateds, _ = vector.step([{}, {}])
    assert vector.resetting.all()
    assert (observations[1]["b"], rewards[1], terminateds[1], truncateds[1]) == (4, {}, {}, {})
    assert vector.envs[0].seed is None
    with pytest.raises(ValueError, match="2 action dicts"):
        vector.step([{}])
    vector.close()


def test_what_cannot_be_vectorised_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'sync' only"):
        make_multi_agent_vec(Countdown, mode="async")
    with pytest.raises(ConfigurationError, match="not multi-agent"):
        make_multi_agent_vec("CartPole-v1")
    with pytest.raises(ConfigurationError, match="int >= 1"):
        make_multi_agent_vec(Countdown, num_envs=0)
