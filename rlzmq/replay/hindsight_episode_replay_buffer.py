"""HindsightEpisodeReplayBuffer: transitions as if a later observation had been the goal (Andrychowicz et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_rows
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.replay.episode_replay_buffer import _SLOT_MASK, EpisodeReplayBuffer
from rlzmq.replay.step_store import NONE

__all__ = ["HindsightEpisodeReplayBuffer"]

_GOAL, _ACHIEVED = "desired_goal", "achieved_goal"


class _GoalSettings(Protocol):
    n_step: int | tuple[int, int]

    def make_env(self) -> Any: ...


class HindsightEpisodeReplayBuffer(EpisodeReplayBuffer):
    """An EpisodeReplayBuffer for goal environments, arXiv:1707.01495, with the strategy "future".

    Observations are Dicts with ``achieved_goal`` and ``desired_goal``. Of `n_sampled_goal` + 1 drawn transitions,
    `n_sampled_goal` get another goal: what the same episode achieves at a later step, drawn uniformly.
    Their rewards are computed anew.

    In a run, ``replay_buffer_config={"type": "HindsightEpisodeReplayBuffer", "capacity": …}`` takes `compute_reward`,
    and `compute_terminated` if there is one, from the environment (Gymnasium-Robotics' ``GoalEnv``).

    Args:
        capacity, options: See `EpisodeReplayBuffer`.
        compute_reward: ``compute_reward(achieved_goal, desired_goal, info)`` of K steps at once: arrays ``[K, …]`` and
            a list of K info dicts in, float [K] out. The achieved goal is that after the step.
        compute_terminated: The same for a single step: whether it ends the episode; None: it ends as recorded.
        n_sampled_goal: Number of transitions with another goal for each one with the recorded goal, >= 0.
    """

    draws_sequences: ClassVar[bool] = False

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        compute_reward: Callable[[Any, Any, Any], Any],
        compute_terminated: Callable[[Any, Any, Any], Any] | None = None,
        n_sampled_goal: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(capacity, **options)
        self._compute_reward, self._compute_terminated = compute_reward, compute_terminated
        self._share = n_sampled_goal / (n_sampled_goal + 1)

    @classmethod
    def from_config(cls, config: object, **arguments: Any) -> Self:
        """Return a learner's buffer, with the reward of the config's environment.

        Raises:
            ConfigurationError: The environment has no ``compute_reward``, or n_step is not 1.
        """
        settings = cast(_GoalSettings, config)
        if settings.n_step != 1:
            raise ConfigurationError(
                f"config.n_step={settings.n_step}: a sum of rewards belongs to the recorded goal. Set n_step=1."
            )
        env = settings.make_env().unwrapped
        for name in ("compute_reward", "compute_terminated"):
            if hasattr(env, name):
                arguments.setdefault(name, getattr(env, name))
        if "compute_reward" not in arguments:
            raise ConfigurationError(
                f"config.replay_buffer_config['type']={cls.__name__!r}: {type(env).__name__} has no method "
                "compute_reward(achieved_goal, desired_goal, info). Add it, or use 'EpisodeReplayBuffer'."
            )
        return cls(**arguments)

    def sample(self, num_items: int | None = None, **options: Any) -> EpisodeBatch:
        """Sample transitions, see `EpisodeReplayBuffer.sample`; `n_step` is 1."""
        rng = options.setdefault("rng", self._rng)
        batch = super().sample(num_items, **options)
        store, starts = self._store, batch.columns["replay_key"][::2] & _SLOT_MASK
        changed = np.flatnonzero(rng.random(len(starts)) < self._share)
        path = self._walk(starts[changed], store.longest)[:, 1:]
        later = (rng.random(len(changed)) * (path != NONE).sum(1)).astype(np.int64)
        achieved = store.columns[Columns.OBS][_ACHIEVED]
        goals = tree_rows(achieved, path[np.arange(len(changed)), later])
        reached = tree_rows(achieved, path[:, 0])
        infos = [store.infos.get(slot, {}) for slot in path[:, 0].tolist()]
        rewards = self._compute_reward(reached, goals, infos)
        for row in (2 * changed, 2 * changed + 1):
            batch.columns[Columns.OBS][_GOAL][row] = goals
            batch.columns[Columns.REWARDS][row] = rewards
        if self._compute_terminated is not None:
            ends = map(self._compute_terminated, reached, goals, infos)
            batch.terminated[changed] = np.fromiter(ends, np.bool_)
        return batch
