"""What a multi-agent env returns against its own rules: the same error on both sampling paths, at that step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.core.errors import MultiAgentEnvError
from rlzmq.envs.multi_agent_env import MultiAgentEnv
from tests.runners.test_multi_agent_env_runner import assert_equal, make_runner
from tests.support.runs import small

Row = list[dict[Any, Any]]
Change = Callable[[Row], Any]
OBS, REWARDS, TERMINATEDS, TRUNCATEDS, INFOS = range(5)

BAD_STEP = 5  # of the environment's life; agent "gone" was done after step 2


class TwoAgentsEnv(MultiAgentEnv):
    """Agents "a", "b" (and "gone", for two steps) act at every step; one step's return is changed.

    Args:
        config: ``change`` is done to what step `BAD_STEP` returns, or the first reset if ``at_reset``.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = dict(config or {})
        self.possible_agents = ["a", "b", "gone", "late"]
        self.observation_spaces = {agent: gym.spaces.Box(-1e3, 1e3, (3,)) for agent in self.possible_agents}
        self.action_spaces = {agent: gym.spaces.Discrete(2) for agent in self.possible_agents}
        self.num_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        self.agents = ["a", "b", "gone"]
        row: Any = [{agent: np.full(3, 0.5, np.float32) for agent in self.agents}, {}]
        if self.config.get("at_reset"):
            self.config["change"](row)
        return tuple(row)

    def step(self, action_dict: Any) -> Any:
        self.t += 1
        self.num_steps += 1
        row: Any = [
            {agent: np.full(3, self.t, np.float32) for agent in self.agents},
            dict.fromkeys(self.agents, 1.0),
            {"gone": True} if self.t == 2 else dict.fromkeys(self.agents, False),
            {},
            {},
        ]
        if self.num_steps == BAD_STEP and not self.config.get("at_reset"):
            self.config["change"](row)
        if self.t == 2 or self.num_steps == BAD_STEP:
            flags: Any = [part for part in row[2:4] if isinstance(part, dict)]
            over = [agent for agent in self.agents if any(np.any(part.get(agent)) for part in flags)]
            self.agents = [agent for agent in self.agents if agent not in over]
        return tuple(row)


def put(place: int, agent_id: Any, value: Any) -> Change:
    return lambda row: row[place].__setitem__(agent_id, value)


def replace(place: int, value: Any) -> Change:
    return lambda row: row.__setitem__(place, value)


def runner_of(change: Change, *, fused: bool, num_envs: int = 1, **env_config: Any) -> Any:
    config = small(env=TwoAgentsEnv, env_config={"change": change, **env_config})
    config.env_runners(num_envs_per_env_runner=num_envs)
    config.multi_agent(policies={"p"}, policy_mapping_fn=lambda agent_id, episode, **kw: "p")
    return make_runner(config, fused=fused)


REFUSED: dict[str, tuple[Change, list[str]]] = {
    "reward missing": (lambda row: row[REWARDS].__delitem__("b"), ["agent 'b'", "no reward"]),
    "reward of two numbers": (put(REWARDS, "b", np.zeros(2)), ["agent 'b'", "one number", "array([0., 0.])"]),
    "reward a text": (put(REWARDS, "a", "1.5"), ["agent 'a'", "one number", "str '1.5'"]),
    "observation of a done agent": (
        put(OBS, "gone", np.zeros(3, np.float32)),
        ["agent 'gone'", "done already", "observation"],
    ),
    "info a text": (put(INFOS, "a", "fine"), ["agent 'a'", "info", "dict", "'fine'"]),
    "terminated a text": (put(TERMINATEDS, "a", "no"), ["agent 'a'", "terminateds", "True or False", "'no'"]),
    "all terminated a text": (put(TERMINATEDS, "__all__", "no"), ["'__all__'", "terminateds", "'no'"]),
    "truncated without an observation": (
        lambda row: (row[OBS].pop("a"), row[TRUNCATEDS].update(a=True)),
        ["agent 'a'", "truncated", "no last observation"],
    ),
    "observation of another shape": (
        put(OBS, "a", np.zeros(4, np.float32)),
        ["agent 'a'", "shape (4,)", "expected (3,)"],
    ),
    "observation a dict": (put(OBS, "b", {"x": np.zeros(3)}), ["agent 'b'", "dict"]),
    "first observation of another shape": (
        put(OBS, "late", np.zeros(1, np.float32)),
        ["agent 'late'", "shape (1,)"],
    ),
    "observations None": (replace(OBS, None), ["observations", "not a dict", "NoneType"]),
    "four values": (lambda row: row.pop(), ["returned 4", "5 values"]),
}

ALLOWED: dict[str, Change] = {
    "reward an array of one": put(REWARDS, "a", np.array([2.5])),
    "reward of an agent to come": put(REWARDS, "late", 2.0),
    "flags by number": lambda row: row[TERMINATEDS].update(a=0, b=1),
    "flags of unknown and done agents": lambda row: row[TERMINATEDS].update(gone=True, nobody=False),
    "all done by number": put(TERMINATEDS, "__all__", np.int64(1)),
    "info of all": put(INFOS, "__common__", {"x": 1}),
    "observation of float64": put(OBS, "a", np.full(3, 0.25)),
    "observation None": put(OBS, "a", None),
    "an agent without a space": put(OBS, "nobody", np.zeros(3, np.float32)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_is_the_same_on_both_paths_and_says_who_sent_what(name: str) -> None:
    change, texts = REFUSED[name]
    errors, after = [], []
    for fused in (True, False):
        runner = runner_of(change, fused=fused)
        runner.sample(num_timesteps=3)
        with pytest.raises(MultiAgentEnvError) as caught:
            runner.sample(num_timesteps=6)
        errors.append(str(caught.value))
        after.append(runner.sample(num_timesteps=4))
        runner.stop()
    assert errors[0] == errors[1]
    for text in texts:
        assert text in errors[0], errors[0]
    assert "step() returned" in errors[0] or (
        "episode 000000000001" in errors[0] and "env step 5" in errors[0]
    )
    assert_equal(*after)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_odd_but_sound_is_taken_alike(name: str) -> None:
    runners = [runner_of(ALLOWED[name], fused=fused, num_envs=2) for fused in (True, False)]
    for num_steps in (6, 20):
        batch, other = (runner.sample(num_timesteps=num_steps) for runner in runners)
        assert_equal(batch, other)
        for episode in batch:
            assert {own.get_observations().dtype for own in episode.agent_episodes.values()} == {
                np.dtype("f4")
            }
    for runner in runners:
        runner.stop()


@pytest.mark.parametrize("fused", [True, False])
def test_a_reset_is_looked_at_too(fused: bool) -> None:
    runner = runner_of(put(0, "b", np.zeros(2, np.float32)), fused=fused, at_reset=True)
    with pytest.raises(MultiAgentEnvError, match=r"agent 'b', column 'obs': .* shape \(2,\)"):
        runner.sample(num_timesteps=3)
    runner.stop()
