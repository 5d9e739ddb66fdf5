"""EnvPool's environments, stepped by C++ threads, as native vector environments."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.envs.extras import extra_hint

__all__ = ["EnvPoolVectorEnv"]


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """The environments of one EnvPool task, selected with e.g. ``env="envpool/CartPole-v1"``.

    The first `reset` creates the pool with its seed.

    Args:
        task_id: Id of the task in ``envpool.list_all_envs()``.
        num_envs: Number of environments.
        settings: Settings of the pool, e.g. ``num_threads=2``, or ``stack_num=4`` for Atari.

    Raises:
        ConfigurationError: EnvPool is not installed, or has no such task or setting.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, task_id: str, num_envs: int = 1, **settings: Any) -> None:
        try:
            self._envpool: Any = importlib.import_module("envpool")
        except ImportError as error:
            raise ConfigurationError(
                f"config.env='envpool/{task_id}' needs envpool, which cannot be imported ({error}).{extra_hint(error)}"
            ) from error
        tasks = self._envpool.list_all_envs()
        if task_id not in tasks:
            raise ConfigurationError(f"EnvPool has no task {task_id!r}.{did_you_mean(task_id, tasks)}")
        self._task_id = task_id
        self._settings = settings
        self._pool: Any = None
        self.num_envs = num_envs
        try:
            with warnings.catch_warnings(action="ignore"):  # about the precision of bounds
                spec = self._envpool.make_spec(task_id, num_envs=num_envs, **settings)
                self.single_observation_space: gym.Space[Any] = spec.gymnasium_observation_space
                self.single_action_space: gym.Space[Any] = spec.gymnasium_action_space
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"EnvPool's {task_id} does not take the settings of config.env_config {settings}: {error}"
            ) from error
        self.observation_space: gym.Space[Any] = batch_space(self.single_observation_space, num_envs)
        self.action_space: gym.Space[Any] = batch_space(self.single_action_space, num_envs)
        self._action_dtype = getattr(self.single_action_space, "dtype", None)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments. A seed (an int, or one per environment) creates a new pool."""
        if self._pool is not None and seed is None:
            return self._pool.reset()[0], {}
        seeds = np.zeros(1) if seed is None else np.atleast_1d(seed)
        self.close_extras()
        with warnings.catch_warnings(action="ignore"):  # about the precision of bounds
            self._pool = self._envpool.make_gymnasium(
                self._task_id, num_envs=self.num_envs, seed=int(seeds[0]) % 2**31, **self._settings
            )
            return self._pool.reset()[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments. Those whose episode has ended are reset, and their actions are ignored."""
        given = np.asarray(actions, dtype=self._action_dtype)
        observations, rewards, terminations, truncations, _ = self._pool.step(given)
        return observations, rewards, terminations, truncations, {}

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the pool's threads."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
