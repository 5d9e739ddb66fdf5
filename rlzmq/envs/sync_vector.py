"""LeanSyncVectorEnv: a SyncVectorEnv with the same results and a fraction of the cost per step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from rlzmq.core.errors import EnvError
from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.envs.observation_check import misfit
from rlzmq.episodes.step_values import FLAG_TYPES, REWARD_TYPES, as_flag, as_info, as_reward

__all__ = ["ActionHistory", "LeanSyncVectorEnv", "Recover", "SparseStep", "Way"]

Recover = Callable[[int, str, Exception], int | None]

# Steps between two recorded resets, as reading the random state at every reset would slow short episodes by percents.
_STEPS_BETWEEN_BEGINS = 256
_STEPS_KEPT = 4_096
_BYTES_KEPT = 1 << 25

SparseInfos = dict[int, dict[str, Any]]
SparseStep = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], SparseInfos]


@dataclass(frozen=True, slots=True)
class Way:
    """A reset of an environment, and its actions since then. An action after an episode's end is a reset.

    Attributes:
        seed: Seed of the reset, or None.
        random: State of the environment's bit generator before the reset, or None.
        actions: The actions, leaves ``[T, ...]``; None if T = 0.
    """

    seed: int | None
    random: Any
    actions: Any


class ActionHistory:
    """The newest actions of a vector env, in a ring, and an earlier reset of each environment.

    Attributes:
        num_steps: Number of vector steps so far.
        due: For each environment, the number of steps after which `begin` must be called at a reset.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_steps: int = 0
        self.due: list[int] = [0] * num_envs
        self._begins: list[tuple[int, int | None, Any] | None] = [
            None
        ] * num_envs  # (step, seed, random state)
        self._rows: Any = None  # leaves [K, N, ...]
        self._num_kept = 1

    def record(self, actions: object) -> None:
        """Record the actions of the vector step that is about to happen, a tree of arrays ``[N, ...]``."""
        rows = self._rows
        if type(actions) is np.ndarray and type(rows) is np.ndarray and rows.dtype is actions.dtype:
            rows[self.num_steps % self._num_kept] = actions
        else:
            self._record_tree(tree_map(np.asarray, actions))
        self.num_steps += 1

    def _record_tree(self, actions: object) -> None:
        """Write nested actions, or such of another dtype."""
        if self._rows is None:
            num_bytes = sum(leaf.nbytes for leaf in tree_leaves(actions))
            self._num_kept = num = max(1, min(_STEPS_KEPT, _BYTES_KEPT // max(num_bytes, 1)))
            self._rows = tree_map(lambda leaf: np.zeros((num, *leaf.shape), leaf.dtype), actions)
        pairs = zip(tree_leaves(self._rows), tree_leaves(actions), strict=True)
        if not all(np.can_cast(leaf.dtype, rows.dtype) for rows, leaf in pairs):
            self._rows = tree_map(
                lambda rows, leaf: rows.astype(np.result_type(rows.dtype, leaf.dtype)), self._rows, actions
            )
        for rows, leaf in zip(tree_leaves(self._rows), tree_leaves(actions), strict=True):
            rows[self.num_steps % self._num_kept] = leaf

    def begin(self, index: int, env: Any, seed: int | None) -> None:
        """Record that environment `index` is about to be reset before step `num_steps`."""
        generator = getattr(env.unwrapped, "_np_random", None)
        random = None if generator is None else _plain_random(generator.bit_generator.state)
        self._begins[index] = (self.num_steps, seed, random)
        self.due[index] = self.num_steps + _STEPS_BETWEEN_BEGINS

    def restart(self, index: int, seed: int | None) -> None:
        """Record that environment `index` was replaced, and reset with `seed` in the current vector step."""
        self.forget(index)
        if seed is not None:
            self._begins[index] = (self.num_steps, seed, None)

    def forget(self, index: int) -> None:
        """Record a reset of environment `index` that cannot be repeated."""
        self._begins[index] = None
        self.due[index] = self.num_steps

    def way_of(self, index: int) -> Way | None:
        """Return a reset of environment `index` and all actions since; None if they are unknown or too many."""
        begin = self._begins[index]
        if begin is None:
            return None
        step, seed, random = begin
        if self.num_steps == step:
            return Way(seed, random, None)
        if step < self.num_steps - self._num_kept:
            return None
        order = np.arange(step, self.num_steps) % self._num_kept
        return Way(seed, random, tree_map(lambda rows: rows[order, index], self._rows))


def _plain_random(value: object) -> object:
    """Return a bit generator's state without arrays, so that it can be printed."""
    if isinstance(value, Mapping):
        return {key: _plain_random(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


class LeanSyncVectorEnv(SyncVectorEnv):
    """Steps its environments one after the other, exactly as Gymnasium's ``SyncVectorEnv`` does.

    ``reset`` and ``step`` return exactly Gymnasium's results (NEXT_STEP autoreset). Runners use ``reset_sparse`` and
    ``step_sparse``, which return the internal buffers (valid until the next call) and the non-empty infos by
    environment index.

    Attributes:
        recover: Called with (index, "step" or "reset", error) when an environment raises an error. It raises the
            error, or returns the seed for resetting a new environment in its place. None: the error is raised.
        history: The newest actions of each environment, with which an error is reproduced.
        failed: Indices of the environments that were recovered in the last ``step_sparse``: they were reset instead
            of stepped, and their action was not used.
        is_resetting: Whether an environment is being reset in a step right now; for other threads.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env[Any, Any]]], *, copy: bool = True) -> None:
        super().__init__(env_fns, copy=copy, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.recover: Recover | None = None
        self.failed: list[int] = []
        self.is_resetting: bool = False
        num_envs = self.num_envs
        self._buffer: Any = create_empty_array(self.single_observation_space, n=num_envs, fn=np.zeros)
        self._flat_buffer: NDArray[Any] | None = None
        space = self.single_observation_space
        if isinstance(self._buffer, np.ndarray) and space.shape:
            # One concatenate along the first axis is the cheapest way to gather N arrays, and it checks
            # their sizes; axis 0 of the flat view is N times that of one observation.
            self._flat_buffer = self._buffer.reshape(num_envs * space.shape[0], *space.shape[1:])
        self._iterates_as_array = isinstance(
            self.single_action_space,
            spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary,
        )
        self._latest_obs: list[Any] = [None] * num_envs
        self._needs_reset: list[bool] = [False] * num_envs
        self._reward_buffer = np.zeros(num_envs, dtype=np.float64)
        self._terminated_buffer = np.zeros(num_envs, dtype=np.bool_)
        self._truncated_buffer = np.zeros(num_envs, dtype=np.bool_)
        self.history: ActionHistory = ActionHistory(num_envs)

    # -- what runners call ---------------------------------------------------------------------

    def reset_sparse(
        self, seeds: Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, SparseInfos]:
        """Reset every environment.

        Args:
            seeds: One seed (or None) per environment.
            options: Passed to each environment's ``reset``.

        Returns:
            Observations ``[num_envs, ...]`` (the internal buffer) and the non-empty infos.
        """
        if seeds is None:
            seeds = [None] * self.num_envs
        infos: SparseInfos = {}
        self.failed = []
        for index, env in enumerate(self.envs):
            self._begin(index, env, seeds[index], options)
            try:
                self._latest_obs[index], info = env.reset(seed=seeds[index], options=options)
                as_info(info)
            except Exception as error:
                self._latest_obs[index], info = self._recovered(index, "reset", error)
            if info:
                infos[index] = info
        self._needs_reset = [False] * self.num_envs
        self._terminated_buffer[:] = False
        self._truncated_buffer[:] = False
        return self._gather(), infos

    def step_sparse(self, actions: Any) -> SparseStep:
        """Step every environment; reset those that were done.

        Args:
            actions: Batched actions ``[num_envs, ...]``, elements of ``action_space``.

        Returns:
            Observations, rewards, terminated, truncated (internal buffers, ``[num_envs, ...]``) and the
            non-empty infos by environment index.

        Raises:
            EnvError: An environment raised an error, or its reward is not a single number or a flag is not a
                bool, and ``recover`` is None; or an observation does not fit its space.
        """
        items: Iterable[Any] = actions if self._iterates_as_array else iterate(self.action_space, actions)
        if self._iterates_as_array and len(actions) != self.num_envs:
            raise ValueError(f"step: expected {self.num_envs} actions, got {len(actions)}.")
        history = self.history
        history.record(actions)
        number = history.num_steps
        latest = self._latest_obs
        rewards, terminated, truncated = (
            self._reward_buffer,
            self._terminated_buffer,
            self._truncated_buffer,
        )
        needs_reset = self._needs_reset
        infos: SparseInfos = {}
        if self.failed:
            self.failed = []
        index = -1
        steps = zip(self.envs, items, strict=False)  # lengths were compared above
        while True:
            try:
                for env, action in steps:
                    index += 1
                    if needs_reset[index]:
                        if number >= history.due[index]:
                            history.begin(index, env, None)
                        self.is_resetting = True
                        latest[index], info = env.reset()
                        self.is_resetting = False
                        needs_reset[index] = terminated[index] = truncated[index] = False
                        rewards[index] = 0.0
                    else:
                        latest[index], reward, is_terminated, is_truncated, info = env.step(action)
                        rewards[index] = reward if type(reward) in REWARD_TYPES else as_reward(reward)
                        if is_terminated or is_truncated:
                            for flags, flag in ((terminated, is_terminated), (truncated, is_truncated)):
                                flags[index] = flag if type(flag) in FLAG_TYPES else as_flag(flag)
                            needs_reset[index] = True
                    if info:
                        infos[index] = info
                break
            except Exception as error:
                if index < 0:
                    raise
                where = "reset" if needs_reset[index] else "step"
                latest[index], info = self._recovered(index, where, error)
                needs_reset[index] = terminated[index] = truncated[index] = False
                rewards[index] = 0.0
                if info:
                    infos[index] = info
        return self._gather(), rewards, terminated, truncated, infos

    def needs_reset(self, index: int) -> bool:
        """Return whether environment ``index`` is done, so that the next step resets it."""
        return self._needs_reset[index]

    def _begin(
        self, index: int, env: gym.Env[Any, Any], seed: int | None, options: dict[str, Any] | None
    ) -> None:
        """Record a reset. A reset with `options` cannot be repeated."""
        if options:
            self.history.forget(index)
        else:
            self.history.begin(index, env, seed)

    # -- Gymnasium's own interface -------------------------------------------------------------

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset as Gymnasium's vector envs do, including ``options["reset_mask"]``."""
        if isinstance(seed, int):
            seeds: list[int | None] = [seed + index for index in range(self.num_envs)]
        elif seed is None:
            seeds = [None] * self.num_envs
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"reset: expected {self.num_envs} seeds, one per environment, got {len(seeds)}.")
        options = dict(options) if options else options
        mask = options.pop("reset_mask", None) if options else None
        if mask is None:
            observations, infos = self.reset_sparse(seeds, options)
        else:
            observations, infos = self._reset_some(np.asarray(mask), seeds, options)
        return self._public(observations), self._dense_infos(infos)

    def step(
        self, actions: object
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step as Gymnasium's vector envs do."""
        observations, rewards, terminated, truncated, infos = self.step_sparse(actions)
        return (
            self._public(observations),
            rewards.copy(),
            terminated.copy(),
            truncated.copy(),
            self._dense_infos(infos),
        )

    # -- inside --------------------------------------------------------------------------------

    def _gather(self) -> Any:
        try:
            if self._flat_buffer is not None:
                np.concatenate(self._latest_obs, out=self._flat_buffer)
            elif isinstance(self._buffer, np.ndarray):
                for index, observation in enumerate(self._latest_obs):
                    self._buffer[index] = observation
            else:
                self._buffer = concatenate(self.single_observation_space, self._latest_obs, self._buffer)
        except Exception as error:
            for index, observation in enumerate(self._latest_obs):
                problem = misfit(self.single_observation_space, observation, "an observation")
                if problem:
                    raise EnvError(
                        f"Environment {index} of {self.num_envs}: {problem}. Correct the environment's "
                        "observation_space, or what it returns."
                    ) from error
            raise
        return self._buffer

    def _recovered(self, index: int, where: str, error: Exception) -> tuple[Any, dict[str, Any]]:
        """Replace an environment that raised an error, and return the new one's first observation and info."""
        while True:
            if self.recover is None:
                raise EnvError(
                    f"Environment {index} of {self.num_envs} raised {type(error).__name__}: {error}"
                ) from error
            seed = self.recover(index, where, error)
            self.is_resetting = True
            try:
                with contextlib.suppress(Exception):  # it is broken already, and only the new one counts
                    self.envs[index].close()
                self.envs[index] = self.env_fns[index]()
                self.history.restart(index, seed)
                observation, info = self.envs[index].reset(seed=seed)
            except Exception as again:
                error, where = again, "reset"
                continue
            finally:
                self.is_resetting = False
            self.failed.append(index)
            return observation, info

    def _reset_some(
        self, mask: NDArray[np.bool_], seeds: list[int | None], options: dict[str, Any] | None
    ) -> tuple[Any, SparseInfos]:
        if mask.dtype != np.bool_ or mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(
                f"options['reset_mask']: expected {self.num_envs} bools with at least one True, got "
                f"{mask.dtype} of shape {mask.shape}."
            )
        infos: SparseInfos = {}
        for index in np.flatnonzero(mask).tolist():
            self._begin(index, self.envs[index], seeds[index], options)
            self._latest_obs[index], info = self.envs[index].reset(seed=seeds[index], options=options)
            self._needs_reset[index] = False
            self._terminated_buffer[index] = self._truncated_buffer[index] = False
            if info:
                infos[index] = info
        return self._gather(), infos

    def _public(self, observations: object) -> object:
        return deepcopy(observations) if self.copy else observations

    def _dense_infos(self, infos: SparseInfos) -> dict[str, Any]:
        dense: dict[str, Any] = {}
        for index, info in infos.items():
            dense = self._add_info(dense, info, index)
        return dense
