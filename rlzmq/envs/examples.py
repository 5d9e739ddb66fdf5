"""Small environments for examples, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from numpy.typing import NDArray

from rlzmq.envs.multi_agent_env import make_multi_agent
from rlzmq.envs.registry import EnvContext

__all__ = ["MultiAgentCartPole", "MultiAgentPendulum", "RandomEnv", "StatelessCartPole", "module_of_agent"]


class MultiAgentCartPole(make_multi_agent("CartPole-v1")):  # type: ignore[misc]
    """n agents (0 … n-1), each in its own CartPole-v1; the episode ends when the last one is done.

    Args:
        config: ``{"num_agents": 2}``; the default is 1 agent.
    """


class MultiAgentPendulum(make_multi_agent("Pendulum-v1")):  # type: ignore[misc]
    """n agents (0 … n-1), each in its own Pendulum-v1.

    Args:
        config: ``{"num_agents": 2}``; the default is 1 agent.
    """


class StatelessCartPole(CartPoleEnv):
    """CartPole without its two velocities: only a model with memory can balance the pole.

    Observation: Box of shape (2,), float32: cart position (m) and pole angle (rad). Actions, rewards and
    ends as in CartPole-v1, the 500-step limit included.

    Args:
        config: ``{"max_episode_steps": 500, "render_mode": None}``, all optional.
    """

    _KEPT = np.array([0, 2])

    def __init__(self, config: EnvContext | dict[str, Any] | None = None) -> None:
        settings = dict(config or {})
        super().__init__(render_mode=settings.get("render_mode"))
        self._max_episode_steps = int(settings.get("max_episode_steps", 500))
        self._num_steps = 0
        full = self.observation_space
        assert isinstance(full, gym.spaces.Box)
        self.observation_space: gym.Space[Any] = gym.spaces.Box(
            full.low[self._KEPT], full.high[self._KEPT], dtype=np.float32
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self._num_steps = 0
        return observation[self._KEPT], info

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        self._num_steps += 1
        truncated = truncated or self._num_steps >= self._max_episode_steps
        return observation[self._KEPT], float(reward), terminated, truncated, info


class RandomEnv(gym.Env[Any, Any]):
    """Random observations and rewards from given spaces, for tests and benchmarks.

    Args:
        config: ``observation_space``, ``action_space``, ``p_terminated`` (probability that a step
            terminates, default 0.05), ``max_episode_steps`` (then truncated, default 50),
            ``static`` (True: sample 64 observations once and cycle through them, which makes the environment
            nearly free; default False), ``check_actions`` (raise on an action outside the
            space; default True).
    """

    def __init__(self, config: EnvContext | dict[str, Any] | None = None) -> None:
        settings = dict(config or {})
        self.observation_space: gym.Space[Any] = settings.get("observation_space") or gym.spaces.Box(
            -1.0, 1.0, (3,)
        )
        self.action_space: gym.Space[Any] = settings.get("action_space") or gym.spaces.Discrete(2)
        self._p_terminated = float(settings.get("p_terminated", 0.05))
        self._max_episode_steps = int(settings.get("max_episode_steps", 50))
        self._checks_actions = bool(settings.get("check_actions", True))
        self._num_steps = 0
        self._pool = [self.observation_space.sample() for _ in range(64)] if settings.get("static") else []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._num_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._checks_actions and not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        self._num_steps += 1
        terminated = bool(self.np_random.random() < self._p_terminated)
        truncated = not terminated and self._num_steps >= self._max_episode_steps
        reward = float(self.np_random.normal())
        return self._observe(), reward, terminated, truncated, {}

    def _observe(self) -> object:
        if self._pool:
            return self._pool[self._num_steps % 64]
        return self.observation_space.sample()


def module_of_agent(agent_id: Hashable, episode: Any = None) -> str:
    """Return ``"p0"`` for agent 0, and so on, and text as it is: a ``policy_mapping_fn`` with one module per agent."""
    return agent_id if isinstance(agent_id, str) else f"p{agent_id}"
