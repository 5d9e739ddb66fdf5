"""NaN, infinity and absurd numbers from an environment: left out where rare, else the run's end and a recipe."""

from __future__ import annotations

import logging
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from sampling_cases import make_config

from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.core.errors import EnvError
from rlzmq.envs.multi_agent_env import MultiAgentEnv
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runners.vector_env_runners import MultiAgentEnvRunner, SingleAgentEnvRunner
from tests.learners.cases import LinearModule
from tests.support.runs import ShortEnv


class Spoils(ShortEnv):
    """Counts its steps over all episodes; puts ``value`` into ``place`` at those of ``at`` and each ``every``-th."""

    observation_space = gym.spaces.Box(-9, 999, (2,), np.float32)
    n = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.length = config.get("length", 20)

    def spoilt(self, value: float, place: str) -> float:
        config = self.config
        is_bad = self.n in config.get("at", ()) or (self.n and self.n % config.get("every", 10**9) == 0)
        return config.get("value", np.nan) if is_bad and config.get("place", "reward") == place else value

    def observation(self) -> Any:
        return np.array([self.t, self.spoilt(self.t, "obs") if self.t else 0], np.float32)

    def reward(self, action: Any) -> float:
        self.n += 1
        return self.spoilt(float(self.t), "reward")


@pytest.fixture
def make_runner(runner_of: Any) -> Any:
    def make(num_envs: int = 1, **env_config: Any) -> Any:
        return runner_of(make_config(Spoils, num_envs=num_envs, env_config=env_config))

    return make


def sample_often(runner: Any, lease: int) -> None:
    for _ in range(200):
        runner.sample_lease(lease)


def chunks_of(batch: Any) -> list[tuple[int, int, bool]]:
    for episode in batch:
        assert np.isfinite(episode.get_observations()).all()
        assert episode.get_observations()[:, 0].tolist() == list(range(episode.t_started, episode.t + 1))
    return [(episode.t_started, episode.t, episode.is_truncated) for episode in batch]


@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_a_rare_bad_reward_costs_its_chunk_and_one_line(make_runner: Any, value: float, caplog: Any) -> None:
    runner = make_runner(at=[7, 30], value=value)
    with caplog.at_level(logging.WARNING, logger="rlzmq.runners"):
        batch = runner.sample_lease(26)
        more = runner.sample_lease(26)
    # Both values lie in the last chunk of an episode.
    assert chunks_of(batch) == [(0, 5, False)]
    assert chunks_of(more) == [(0, 10, False)]
    assert batch.num_env_steps == batch.meta["num_env_steps"] == 5
    assert batch.meta["num_env_steps_not_finite"] == 20
    assert batch.meta["episode_metrics"]["returns"] == []
    (record,) = caplog.records
    assert (
        f"Environment 0 of env runner 0 returned {value} in column 'rewards' at step 7" in record.getMessage()
    )
    assert f"To reproduce: reset(seed={runner.env_seed()}), then 7 steps" in record.getMessage()
    assert "20 env steps, the chunks with such values, were left out" in record.getMessage()


def test_after_a_bad_chunk_of_an_ongoing_episode_all_begin_again(make_runner: Any) -> None:
    runner = make_runner(num_envs=2, at=[10], place="obs")
    first, second = runner.sample_lease(10), runner.sample_lease(5)
    assert chunks_of(first) == []
    assert chunks_of(second) == [(0, 5, False), (0, 5, False)]
    assert first.meta["num_env_steps_not_finite"] == 20
    assert "num_env_steps_not_finite" not in second.meta


def test_values_that_are_rare_and_spoil_most_chunks_end_the_run(make_runner: Any) -> None:
    runner = make_runner(every=150, length=300)
    with pytest.raises(EnvError, match=r"env steps spoil the chunks of \d+ of them"):
        sample_often(runner, 250)


@pytest.mark.parametrize("place", ["reward", "obs"])
@pytest.mark.parametrize(("every", "lease", "length"), [(1, 3, 20), (61, 250, 300)])
def test_an_env_that_is_often_bad_ends_the_run_with_what_leads_there_again(
    make_runner: Any, place: str, every: int, lease: int, length: int
) -> None:
    runner = make_runner(num_envs=2, every=every, place=place, length=length)
    with pytest.raises(EnvError) as caught:
        sample_often(runner, lease)
    text, way = str(caught.value), caught.value.way_there  # type: ignore[attr-defined]
    column = {"reward": "rewards", "obs": "obs"}[place]
    match = re.search(
        rf"returned nan in column '{column}' at step (\d+) of an episode .* more than 1 %", text
    )
    assert match is not None, text
    env = Spoils({"every": every, "place": place, "length": length})
    env.reset(seed=way.seed)
    is_over = False
    for action in way.actions:
        if is_over:
            env.reset()
            is_over = False
            continue
        observation, reward, is_over, *_ = env.step(action)
    assert env.t == int(match[1])
    if way.seed is not None:  # else it counted on from episodes before
        assert np.isnan(reward if place == "reward" else observation[1])


class PutsOutNaN(LinearModule):
    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {"action_dist_inputs": self.layer(batch["obs"]) * float("nan")}


def test_a_module_that_puts_out_nan_is_blamed_itself() -> None:
    config = make_config(Spoils, num_envs=1).rl_module(rl_module_spec=RLModuleSpec(PutsOutNaN))
    runner = SingleAgentEnvRunner(config=config)
    with pytest.raises(ValueError, match="nan in column 'action_dist_inputs'"):
        runner.sample_lease(10)


@pytest.mark.parametrize("value", [np.nan, 3e38])
@pytest.mark.parametrize("use_rows", [True, False])
def test_the_filters_statistics_stay_what_good_observations_made_them(value: float, use_rows: bool) -> None:
    config = make_config(Spoils, num_envs=1, env_config={"at": [10], "place": "obs", "value": value})
    config.env_runners(
        env_to_module_connector=lambda env, spaces, device=None: MeanStdFilter(clip_by_value=None)
    )
    runner = SingleAgentEnvRunner(config=config)
    runner.use_rows = use_rows
    batch = runner.sample_lease(40)
    assert batch.num_env_steps == 19  # without the first episode; one is the reset between the two
    assert np.isfinite(np.concatenate([episode.get_observations() for episode in batch])).all()
    (delta,) = runner.get_connector_delta()["env_to_module_connector"].values()
    (stats,) = delta.values()
    assert stats["num"] == 40
    assert np.isfinite(stats["means"][0]).all()


class Agents(MultiAgentEnv):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.possible_agents = self.agents = ["a", "b"]
        box = gym.spaces.Box(-9, 999, (1,), np.float32)
        self.observation_spaces = dict.fromkeys(self.agents, box)
        self.action_spaces = dict.fromkeys(self.agents, gym.spaces.Discrete(2))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return dict.fromkeys(self.agents, np.zeros(1, np.float32)), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        observations = {agent_id: np.full(1, self.t, np.float32) for agent_id in self.agents}
        rewards = dict.fromkeys(self.agents, 1.0)
        if self.t in self.config["at"]:
            if self.config["place"] == "reward":
                rewards["b"] = np.nan
            else:
                observations["b"][0] = np.nan
        return observations, rewards, {"__all__": False}, {"__all__": self.t == 50}, {}


@pytest.mark.parametrize("use_rows", [True, False])
@pytest.mark.parametrize("place", ["reward", "obs"])
def test_of_several_agents_the_chunk_of_one_is_left_out_for_all(use_rows: bool, place: str) -> None:
    config = make_config(Agents, num_envs=1, env_config={"at": [17], "place": place})
    config.multi_agent(policies={"p"}, policy_mapping_fn=lambda agent_id, episode: "p")
    runner = MultiAgentEnvRunner(config=config)
    runner.use_rows = use_rows
    spans = []
    for _ in range(3):
        batch = runner.sample_lease(10)
        spans.append([(episode.env_t_started, episode.env_t) for episode in batch])
        assert batch.meta.get("num_env_steps_not_finite", 0) == 10 - batch.num_env_steps
    assert spans == [[(0, 10)], [], [(0, 10)]]
    config.environment(env_config={"at": range(3, 50), "place": place})
    with pytest.raises(EnvError, match=r"column '.*' of agent 'b' at step 3") as caught:
        MultiAgentEnvRunner(config=config).sample_lease(20)
    assert [action.keys() for action in caught.value.way_there.actions] == [{"a", "b"}] * 3  # type: ignore[attr-defined]
