"""SampleRequest: the extent of one sampling call, and the number of vector steps that remain."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlzmq.config.base_config import BaseConfig

__all__ = ["SampleRequest"]


@dataclass(frozen=True)
class SampleRequest:
    """The extent of a sampling call; exactly one of the three counts is set.

    Attributes:
        explore: Sample from the exploration distribution instead of acting greedily.
        random_actions: Sample actions from the action space.
        num_vector_steps: Exact number of vector steps (a lease).
        num_timesteps: Minimum number of env steps, or of agent steps (``config.count_steps_by``).
        num_episodes: Exact number of finished episodes.
        max_env_steps: With num_vector_steps: stop once this number of env steps is reached.
        ends_at: With num_vector_steps: stop after the vector step that ends after this time.perf_counter().
    """

    explore: bool
    random_actions: bool = False
    num_vector_steps: int | None = None
    num_timesteps: int | None = None
    num_episodes: int | None = None
    max_env_steps: int | None = None
    ends_at: float | None = None

    @classmethod
    def of_sample(
        cls,
        config: BaseConfig,
        num_envs: int,
        worker_index: int,
        num_timesteps: int | None,
        num_episodes: int | None,
        *,
        explore: bool,
        random_actions: bool,
    ) -> SampleRequest | None:
        """Return the request of `EnvRunner.sample`; None if nothing is to be sampled.

        Raises:
            AssertionError: Both counts are given, or one is negative.
        """
        if num_timesteps is not None and num_episodes is not None:
            raise AssertionError("sample(): give num_timesteps or num_episodes, not both.")
        for name, value in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes)):
            if value is not None and value < 0:
                raise AssertionError(f"sample({name}={value}): expected a number >= 0.")
        if num_timesteps is None and num_episodes is None:
            if config.batch_mode == "complete_episodes":
                num_episodes = num_envs
            else:
                num_timesteps = config.get_rollout_fragment_length(worker_index) * num_envs
        if not (num_timesteps or num_episodes):
            return None
        return cls(explore, random_actions, num_timesteps=num_timesteps, num_episodes=num_episodes)

    def num_more_vector_steps(
        self, num_vector_steps: int, num_env_steps: int, num_ends: int, num_envs: int, block: int
    ) -> int:
        """Return the number of vector steps to make before the next call; 0 when the request is fulfilled.

        Args:
            num_vector_steps: Vector steps made so far.
            num_env_steps: Env steps so far, without autoreset steps; agent steps if ``num_timesteps`` counts those.
            num_ends: Number of episodes that have ended so far.
            num_envs: Maximum number of env steps per vector step.
            block: Number of vector steps at once while waiting for episodes to end.
        """
        if self.num_episodes is not None:
            return block if num_ends < self.num_episodes else 0
        if self.num_timesteps is not None:
            return max(-(-(self.num_timesteps - num_env_steps) // num_envs), 0)
        if num_vector_steps and self.is_over(num_env_steps):
            return 0
        return (self.num_vector_steps or 0) - num_vector_steps

    def is_over(self, num_env_steps: int) -> bool:
        """Return whether the request ends early: there are enough env steps, or the time is over."""
        if self.max_env_steps is not None and num_env_steps >= self.max_env_steps:
            return True
        return self.ends_at is not None and time.perf_counter() >= self.ends_at

    def num_vector_steps_expected(self, num_envs: int) -> int:
        """Return the number of vector steps to allocate at first."""
        if self.num_vector_steps is not None:
            return self.num_vector_steps
        if self.num_timesteps is not None:
            least = -(-self.num_timesteps // num_envs)
            return least + least // 8 + 2  # autoresets use some slots
        return 256
