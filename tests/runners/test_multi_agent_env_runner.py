"""MultiAgentEnvRunner: what it samples, chunk by chunk, with real episodes and fused."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.core.errors import EnvError
from rlzmq.envs.multi_agent_env import MultiAgentEnv
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runners.vector_env_runners import MultiAgentEnvRunner
from tests.runners.multi_agent_envs import AGENTS, RestlessAgentsEnv, SteadyModule, TracingModule
from tests.runners.sampling_cases import assert_alike
from tests.support.runs import two_agents


def mapping(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    return "tracing" if agent_id in ("a", "c") else "steady"


def restless_config(
    seed: int = 0, num_envs: int = 2, lookback: int = 1, env_config: Any = None, **runner_settings: Any
) -> Any:
    specs = {
        "tracing": RLModuleSpec(module_class=TracingModule, model_config={"max_seq_len": 5}),
        "steady": RLModuleSpec(module_class=SteadyModule),
    }
    return (
        PPOConfig()
        .environment(RestlessAgentsEnv, env_config=env_config or {})
        .env_runners(num_envs_per_env_runner=num_envs, episode_lookback_horizon=lookback, **runner_settings)
        .multi_agent(policies={"tracing", "steady"}, policy_mapping_fn=mapping)
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
        .debugging(seed=seed)
    )


def make_runner(config: Any, *, fused: bool) -> MultiAgentEnvRunner:
    runner = MultiAgentEnvRunner(config=config)
    runner.use_rows = fused
    runner._id_prefix = ""
    return runner


def assert_equal(left: Any, right: Any) -> None:
    """Two batches hold the same episodes, number by number."""
    assert left.episode_ids == right.episode_ids
    assert left.env_index.tolist() == right.env_index.tolist()
    for one, two in zip(left, right, strict=True):
        one.validate()
        two.validate()
        assert_alike(one.get_state(), two.get_state())
        spaces = [[own.observation_space for own in e.agent_episodes.values()] for e in (one, two)]
        assert spaces[0] == spaces[1]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("fragment", [1, 3])
def test_agents_born_and_dying_at_fragment_borders_keep_their_own_state_and_data(
    fragment: int, fused: bool
) -> None:
    for seed in range(6):
        env_config = {"p_birth": 0.5, "p_death": 0.3, "p_wait": 0.4}
        runner = make_runner(restless_config(seed, env_config=env_config), fused=fused)
        steps: dict[Any, list[Any]] = defaultdict(list)
        for _ in range(40 // fragment):
            for episode in runner.sample_lease(fragment):
                for agent_id, sae in episode.agent_episodes.items():
                    check_chunk(sae, agent_id)
                    steps[episode.id_, agent_id].append(sae)
        assert len(steps) > 8
        for chunks in steps.values():
            assert [chunk.t_started for chunk in chunks] == [0, *(chunk.t for chunk in chunks[:-1])]
            assert not any(chunk.is_done for chunk in chunks[:-1])


def check_chunk(sae: Any, agent_id: str) -> None:
    """All of a chunk's data are its agent's own, and its states follow from each other."""
    number, lookback = AGENTS.index(agent_id), sae.observations.lookback
    observations = np.asarray(sae.observations.data)
    assert (observations[:, 0] == number).all()
    first = sae.t_started - lookback
    expected = first + np.arange(len(observations))
    if sae.is_terminated and observations[-1, 1] == observations[-2, 1]:
        expected[-1] -= 1  # died without a last observation: the one before is repeated
    assert observations[:, 1].tolist() == expected.tolist()
    rewards = np.asarray(sae.rewards.data)
    assert (rewards >= 100 * number).all()
    if sae.module_id != "tracing":
        return
    states = np.asarray(sae.extra_model_outputs["state_out"].data["h"])
    assert (states[:, 1] == number).all()
    assert states[:, 0].tolist() == [first + k + 1 for k in range(len(states))]
    own = 7 + np.cumsum(np.arange(first + len(states)))[first:]
    assert states[:, 2].tolist() == own.tolist()
    before = sae.initial_state["h"]
    if sae.t_started == 0:
        assert before.tolist() == [0.0, -1.0, 7.0]
    else:
        assert before[0] == sae.t_started
        assert before[1] == number


@pytest.mark.parametrize("fused", [True, False])
def test_count_steps_by_agent_steps_samples_so_many_agent_steps(fused: bool) -> None:
    runner = make_runner(two_agents(count_steps_by="agent_steps", seed=3), fused=fused)
    for _ in range(4):
        batch = runner.sample(num_timesteps=30)
        assert 30 <= batch.num_agent_steps <= 33
        assert batch.num_agent_steps == sum(episode.agent_steps() for episode in batch)


def test_mapping_function_is_asked_once_per_agent_and_episode_also_across_chunks() -> None:
    calls: list[Any] = []

    def count(agent_id: Any, episode: Any, **kwargs: Any) -> str:
        if episode is not None and hasattr(episode, "env_t"):
            calls.append((episode.id_, agent_id))
        return "p0"

    for fused in (True, False):
        calls.clear()
        runner = make_runner(two_agents(seed=3).multi_agent(policy_mapping_fn=count), fused=fused)
        for _ in range(10):
            for episode in runner.sample_lease(7):
                assert set(episode.get_actions()) == {sae.agent_id for sae in episode.agent_episodes.values()}
        assert len(calls) == len(set(calls)) > 4


@pytest.mark.parametrize("fused", [True, False])
def test_a_failing_env_is_recreated_and_its_episode_ends_truncated(fused: bool) -> None:
    config = restless_config(1, num_envs=2, env_config={"p_raise": 0.05})
    config.fault_tolerance(restart_failed_sub_environments=False)
    with pytest.raises(EnvError, match=r"To reproduce: reset\(.*\), then \d+ step"):
        make_runner(config.copy(), fused=fused).sample(num_timesteps=400)
    config.fault_tolerance(restart_failed_sub_environments=True, env_failures_per_minute_tolerance=None)
    runner, other = make_runner(config.copy(), fused=fused), make_runner(config.copy(), fused=not fused)
    for _ in range(3):
        batch = runner.sample(num_timesteps=100)
        assert batch.num_env_steps >= 100
        assert_equal(batch, other.sample(num_timesteps=100))
    assert runner.failures.num == other.failures.num > 0


def test_metrics_tell_agents_and_modules_apart() -> None:
    runner = make_runner(two_agents(seed=3), fused=True)
    batch = runner.sample(num_timesteps=300)
    metrics = runner.get_metrics()
    assert metrics["num_env_steps_sampled"] == batch.num_env_steps
    assert sum(metrics["num_agent_steps_sampled"].values()) == batch.num_agent_steps
    assert set(metrics["num_module_steps_sampled"]) == {"p0", "p1"}
    assert set(metrics["agent_episode_return_mean"]) == {0, 1}
    assert set(metrics["module_episode_return_mean"]) == {"p0", "p1"}
    total = sum(metrics["agent_episode_return_mean"].values())
    assert metrics["episode_return_mean"] == pytest.approx(total)


def test_callbacks_come_in_order_with_real_episodes() -> None:
    events: list[str] = []

    def on(name: str) -> Any:
        def hook(*, episode: Any, **kwargs: Any) -> None:
            events.append(name)
            if name != "created":
                assert episode.agent_ids

        return hook

    config = two_agents(num_envs_per_env_runner=1, seed=3).callbacks(
        on_episode_created=on("created"),
        on_episode_start=on("start"),
        on_episode_step=on("step"),
        on_episode_end=on("end"),
    )
    batch = make_runner(config, fused=True).sample(num_episodes=2)
    assert events.count("start") == events.count("end") == events.count("created") == 2
    assert events.count("step") == batch.num_env_steps
    assert events[:3] == ["created", "start", "step"]


class Reuses(MultiAgentEnv):
    """Returns the same arrays and infos again and again, changes its actions, and has small integers as rewards."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.possible_agents = self.agents = ["a", "b"]
        self.observation_space = spaces.Box(0, 99, (1,))
        self.action_space = spaces.MultiDiscrete([5, 5])
        self.infos: Any = {agent_id: {"t": 0} for agent_id in self.agents}
        self.array = np.zeros(1, np.float32)

    def observe(self, t: int) -> Any:
        self.t = self.infos["a"]["t"] = self.infos["b"]["t"] = self.array[0] = t
        return dict.fromkeys("ab"[: 2 - t % 2], self.array)

    def reset(self, **kwargs: Any) -> Any:
        return self.observe(0), self.infos

    def step(self, action_dict: Any) -> Any:
        rewards = {agent_id: np.uint8(100) for agent_id in self.agents}
        for agent_id, action in action_dict.items():
            rewards[agent_id] += action.sum().astype(np.uint8)
            action[:] = 0
        return self.observe(self.t + 1), rewards, {"__all__": self.t == 4}, {}, self.infos


@pytest.mark.parametrize("fused", [True, False])
def test_values_are_those_of_their_step_although_the_env_reuses_and_changes_them(fused: bool) -> None:
    config = PPOConfig().environment(Reuses).multi_agent(policies={"p"}, policy_mapping_fn=lambda *_: "p")
    runner = make_runner(config.env_runners(num_envs_per_env_runner=2), fused=fused)
    total = 0.0
    for episode in runner.sample(num_episodes=2):
        for sae in episode.agent_episodes.values():
            times = sae.get_observations()[:, 0].tolist()  # "b" observes every second step
            assert [info["t"] for info in sae.get_infos()] == times
            rewards = [100 * (after - t) for t, after in itertools.pairwise(times)] + sae.get_actions().sum(
                -1
            )
            assert sae.get_rewards().tolist() == rewards.tolist()
            assert sae.get_rewards().dtype == np.float64
            total += sum(sae.get_rewards().tolist())
    assert runner.get_metrics()["episode_return_mean"] == total / 2 > 800
