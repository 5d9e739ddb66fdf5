"""A multi-agent runner's sampling state, taken to a new runner: it goes on bit for bit as the first one would."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.envs import multi_agent_replay as multi_agent_replay
from rlzmq.envs.multi_agent_env import MultiAgentEnv
from rlzmq.envs.rng_state import get_random_states, set_random_states
from tests.runners.multi_agent_envs import RestlessAgentsEnv
from tests.runners.test_multi_agent_columnar_pieces import PIECES, make_config
from tests.runners.test_multi_agent_env_runner import (
    assert_equal,
    cartpole_config,
    make_runner,
    restless_config,
)
from tests.runners.test_sampling_state import plain, travelled


def check(config: Any, folder: Path, *, fused: bool, num_fragments: int = 6) -> None:
    """After each fragment a new runner takes over; what comes of it equals one runner's samples."""
    with make_runner(config.copy(), fused=fused) as runner:
        weights = runner.get_state("rl_module")
        expected = [runner.sample_lease(3 + i % 4) for i in range(num_fragments)]
        metrics = runner.get_metrics()
    state: dict[str, Any] | None = None
    for index in range(num_fragments):
        with make_runner(config.copy(), fused=fused) as runner:
            runner.set_state(weights)
            if state is not None:
                assert runner.set_sampling_state(state) == 0
                assert without_times(plain(runner.get_sampling_state())) == without_times(plain(state))
            assert_equal(runner.sample_lease(3 + index % 4), expected[index])
            state = travelled(runner.get_sampling_state(), folder)
            last = runner.get_metrics()
    names = [name for name in metrics if name.startswith(("num_", "episode_return", "episode_len"))]
    counted = {name for name in names if name.endswith("lifetime") or not name.startswith("num_")}
    assert counted
    assert {name: metrics[name] for name in counted} == {name: last[name] for name in counted}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "age_s"}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("fused", [True, False])
def test_cartpoles_go_on_bit_for_bit(fused: bool, tmp_path: Path) -> None:
    check(cartpole_config(num_envs=3), tmp_path / "c", fused=fused, num_fragments=12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("action", ["discrete", "box", "mixed"])
def test_agents_that_come_wait_and_go_go_on_with_their_states(
    fused: bool, action: str, tmp_path: Path
) -> None:
    config = restless_config(3, num_envs=3, env_config={"action": action, "p_end": 0.1})
    check(config, tmp_path / "c", fused=fused, num_fragments=12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pieces", PIECES)
def test_connector_pieces_and_memory_go_on(fused: bool, pieces: str, tmp_path: Path) -> None:
    config = make_config(pieces, mapping="changing", lstm=True, lookback=2, p_end=0.1)
    check(config, tmp_path / "c", fused=fused)


@pytest.mark.parametrize("fused", [True, False])
def test_nested_observations_go_on(fused: bool, tmp_path: Path) -> None:
    check(make_config("flatten", space="nested"), tmp_path / "c", fused=fused)


class SavesItself(RestlessAgentsEnv):
    """Has a state of its own."""

    def get_state(self) -> Any:
        names = ("t", "_num_obs", "_unborn", "agents")
        return {**{name: getattr(self, name) for name in names}, "waiting": sorted(self._waiting)}

    def set_state(self, state: Any) -> None:
        self._waiting = set(state["waiting"])
        self.__dict__ |= {name: value for name, value in state.items() if name != "waiting"}


@pytest.mark.parametrize("fused", [True, False])
def test_an_env_with_a_state_of_its_own_is_put_back(fused: bool, tmp_path: Path) -> None:
    config = restless_config(1, env_config={"p_end": 0.1}).environment(SavesItself)
    with make_runner(config.copy(), fused=fused) as runner:
        runner.sample_lease(6)
        kinds = {env_state["kind"] for env_state in runner.get_sampling_state()["envs"]}
    assert "own" in kinds
    assert "replay" not in kinds
    check(config, tmp_path / "c", fused=fused)


def test_ways_back_over_several_episodes_begin_at_a_reset_not_too_long_ago(
    monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(multi_agent_replay, "_STEPS_BETWEEN_BEGINS", 8)
    config = restless_config(2, num_envs=2, env_config={"p_end": 0.2})
    check(config, tmp_path / "c", fused=True, num_fragments=15)
    with make_runner(config, fused=True) as runner:
        runner.sample_lease(100)
        nums = [len(env_state["history"]["num_acted"]) for env_state in runner.get_sampling_state()["envs"]]
    assert max(nums) < 60


class Unpredictable(RestlessAgentsEnv):
    """Has randomness that nobody can see."""

    def _observation(self, agent: str) -> Any:
        return super()._observation(agent) + np.float32(np.random.default_rng().random())


@pytest.mark.parametrize("fused", [True, False])
def test_an_env_that_does_not_arrive_begins_a_new_episode(fused: bool, caplog: Any) -> None:
    config = restless_config(0, num_envs=3).environment(Unpredictable)
    with make_runner(config, fused=fused) as one, make_runner(config, fused=fused) as two:
        one.sample_lease(5)
        state = one.get_sampling_state()
        num_ongoing = sum(env_state["kind"] == "replay" for env_state in state["envs"])
        assert num_ongoing
        with caplog.at_level(logging.WARNING, logger="rlzmq.runners"):
            assert two.set_sampling_state(state) == num_ongoing
        assert "led to another observation" in caplog.text
        batch = two.sample_lease(6)
        assert all(chunk.env_t_started == 0 for chunk in batch)
        assert batch.num_env_steps < 6 * 3  # the resets took steps
        for episode in two.sample_lease(30):
            episode.validate()


def test_episodes_that_are_too_long_begin_anew(monkeypatch: Any) -> None:
    monkeypatch.setattr(multi_agent_replay, "MAX_REPLAYED_STEPS", 10)
    config = restless_config(0, env_config={"p_end": 0.0, "p_death": 0.0})
    with make_runner(config, fused=True) as one, make_runner(config, fused=True) as two:
        one.sample_lease(100)
        state = one.get_sampling_state()
        assert [env_state["kind"] for env_state in state["envs"]] == ["unknown"] * 2
        assert two.set_sampling_state(state) == 2
        assert all(chunk.env_t_started == 0 for chunk in two.sample_lease(20))


@pytest.mark.parametrize("fused", [True, False])
def test_random_actions_and_whole_episodes_go_on(fused: bool, tmp_path: Path) -> None:
    config = restless_config(5, env_config={"p_end": 0.1})
    with make_runner(config.copy(), fused=fused) as one, make_runner(config.copy(), fused=fused) as two:
        two.set_state(one.get_state("rl_module"))
        for _ in range(2):
            one.sample(num_timesteps=7, random_actions=True)
            two.set_sampling_state(travelled(one.get_sampling_state(), tmp_path / "c"))
            assert_equal(one.sample(num_timesteps=9), two.sample(num_timesteps=9))
        one.sample(num_episodes=3)
        two.set_sampling_state(travelled(one.get_sampling_state(), tmp_path / "c"))
        assert_equal(one.sample(num_episodes=4), two.sample(num_episodes=4))


def test_after_a_failed_env_was_replaced_the_state_is_that_of_the_new_one(tmp_path: Path) -> None:
    config = restless_config(4, env_config={"p_raise": 0.1})
    config.fault_tolerance(restart_failed_sub_environments=True, env_failures_per_minute_tolerance=None)
    check(config, tmp_path / "c", fused=True, num_fragments=10)


class HoldsGenerators(MultiAgentEnv):
    def __init__(self) -> None:
        super().__init__()
        self.deep = {"a": [np.random.default_rng(1), random.Random(2)], 3: (np.random.RandomState(4),)}
        self.deep["again"] = self.deep["a"]
        self.space = gym.spaces.Box(0, 1, (2,))

    def draw(self) -> list[float]:
        generator, python = self.deep["a"]
        legacy = self.deep[3][0]
        return [generator.normal(), python.gauss(), legacy.normal(), *self.space.sample().tolist()]


def test_generators_are_found_wherever_an_env_keeps_them() -> None:
    one, two = HoldsGenerators(), HoldsGenerators()
    one.draw()
    states = get_random_states(one)
    assert len(states) == 4
    set_random_states(two, states)
    assert [two.draw() for _ in range(3)] == [one.draw() for _ in range(3)]
    two.deep["a"] = [np.random.default_rng(1), np.random.default_rng(1)]
    with pytest.raises(ValueError, match=r"expected a Random as random number generator .* got Generator"):
        set_random_states(two, states)
    with pytest.raises(ValueError, match="no random number generator '/"):
        set_random_states(object(), states)
