"""LeanSyncVectorEnv: a SyncVectorEnv with the same results and a fraction of the cost per step."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from rlzmq.core.errors import EnvError
from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.envs.observation_check import misfit
from rlzmq.episodes.step_values import FLAG_TYPES, REWARD_TYPES, as_flag, as_reward, own_info

__all__ = [
    "ActionHistory",
    "LeanSyncVectorEnv",
    "Recover",
    "Reproduction",
    "SparseStep",
    "plain_action",
    "replaced",
]

Recover = Callable[[int, str, Exception], int | None]

# Steps between two recorded resets, as reading the random state at every reset would slow short episodes by percents.
_STEPS_BETWEEN_BEGINS = 256
_STEPS_KEPT = 4_096
_BYTES_KEPT = 1 << 25
_MAX_SHOWN = 50  # actions in an error's text

SparseInfos = dict[int, dict[str, Any]]
SparseStep = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], SparseInfos]


@dataclass
class Reproduction:
    """The reset and the actions that led an environment to where it is, e.g. to its exception.

    Attributes:
        seed: Seed of the reset; None: the environment continued with its own random numbers.
        random_state: State of the environment's bit generator before that reset, if it has one.
        actions: The actions since the reset, as plain values. An action after the end of an episode denotes a reset.
    """

    seed: int | None
    random_state: dict[str, Any] | None
    actions: list[Any]

    def before(self, num_steps: int) -> Reproduction | None:
        """Return the way to where the environment was `num_steps` steps before; None if it was reset since."""
        num = len(self.actions) - num_steps
        return None if num < 0 else Reproduction(self.seed, self.random_state, self.actions[:num])

    def __str__(self) -> str:
        if self.seed is not None:
            begin = f"reset(seed={self.seed})"
        elif self.random_state is not None:
            begin = "reset() with the random state in the exception's `way_there`"
        else:
            begin = "reset()"
        num = len(self.actions)
        if not num:
            return f"To reproduce: {begin}."
        shown = "in the exception's `way_there`" if num > _MAX_SHOWN else self.actions
        return (
            f"To reproduce: {begin}, then {num} step{'s' if num > 1 else ''} (after an episode's end a step is a "
            f"reset) with the actions {shown}."
        )


def plain_action(action: object) -> Any:
    """Return an action as Python values, which are shorter to read and equivalent for the environment."""
    action = tree_map(np.asarray, action)
    return tree_map(lambda leaf: leaf.item() if leaf.ndim == 0 else leaf.tolist(), action)


class ActionHistory:
    """The newest actions of a vector env, and an earlier reset of each environment.

    Attributes:
        num_steps: Number of vector steps so far.
        due: For each environment, the number of steps after which `begin` must be called at a reset.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_steps: int = 0
        self.due: list[int] = [0] * num_envs
        # Of each environment: step, seed and random state of the reset.
        self._begins: list[tuple[int, int | None, Any] | None] = [None] * num_envs
        self._actions: deque[Any] = deque()

    def record(self, actions: Any) -> None:
        """Record the actions of the vector step that is about to happen, a tree of arrays ``[N, ...]``."""
        if not self.num_steps:
            num_bytes = sum(np.asarray(leaf).nbytes for leaf in tree_leaves(actions))
            self._actions = deque(maxlen=max(1, min(_STEPS_KEPT, _BYTES_KEPT // max(num_bytes, 1))))
        copied = actions.copy() if type(actions) is np.ndarray else tree_map(np.array, actions)
        self._actions.append(copied)
        self.num_steps += 1

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

    def way_of(self, index: int) -> Reproduction | None:
        """Return a reset of environment `index` and all actions since; None if they are unknown or too many."""
        begin = self._begins[index]
        if begin is None:
            return None
        step, seed, random_state = begin
        first = len(self._actions) - (self.num_steps - step)
        if first < 0:
            return None
        rows = itertools.islice(self._actions, first, None)
        actions = [plain_action(tree_map(lambda leaf: leaf[index], row)) for row in rows]
        return Reproduction(seed, random_state, actions)


def _plain_random(value: object) -> object:
    """Return a bit generator's state without arrays, so that it can be printed."""
    if isinstance(value, Mapping):
        return {key: _plain_random(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


class _HasEnvs(Protocol):
    num_envs: int
    envs: Any
    env_fns: Any
    recover: Recover | None
    is_resetting: bool


def replaced(
    vector: _HasEnvs, index: int, where: str, error: Exception, begin: Callable[[int, int | None], None]
) -> Any:
    """Replace an environment that raised an error, until one can be reset, and return what the reset returned.

    Args:
        vector: The vector env.
        index: Index of the environment.
        where: "step" or "reset".
        error: The error.
        begin: Called with the index and the seed before each reset.

    Raises:
        EnvError: Environments are not replaced.
    """
    while True:
        if vector.recover is None:
            raise EnvError(
                f"Environment {index} of {vector.num_envs} raised {type(error).__name__}: {error}"
            ) from error
        seed = vector.recover(index, where, error)
        vector.is_resetting = True
        try:
            with contextlib.suppress(Exception):  # it is broken already, and only the new one counts
                vector.envs[index].close()
            vector.envs[index] = vector.env_fns[index]()
            begin(index, seed)
            return vector.envs[index].reset(seed=seed)
        except Exception as again:
            error, where = again, "reset"
        finally:
            vector.is_resetting = False


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
        needs_reset: Whether each environment is done, so that the next step resets it.
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
        self.needs_reset: list[bool] = [False] * num_envs
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
                info = own_info(info)
            except Exception as error:
                self._latest_obs[index], info = self._recovered(index, "reset", error)
            if info:
                infos[index] = info
        self.needs_reset = [False] * self.num_envs
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
        needs_reset = self.needs_reset
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
                        if info:
                            infos[index] = own_info(info)
                        self.is_resetting = False
                        needs_reset[index] = terminated[index] = truncated[index] = False
                        rewards[index] = 0.0
                    else:
                        latest[index], reward, is_terminated, is_truncated, info = env.step(action)
                        if info:
                            infos[index] = own_info(info)
                        rewards[index] = reward if type(reward) in REWARD_TYPES else as_reward(reward)
                        if is_terminated or is_truncated:
                            for flags, flag in ((terminated, is_terminated), (truncated, is_truncated)):
                                flags[index] = flag if type(flag) in FLAG_TYPES else as_flag(flag)
                            needs_reset[index] = True
                break
            except Exception as error:
                if index < 0:
                    raise
                where = "reset" if needs_reset[index] else "step"
                latest[index], info = self._recovered(index, where, error)
                needs_reset[index] = terminated[index] = truncated[index] = False
                rewards[index] = 0.0
                infos.pop(index, None)
                if info:
                    infos[index] = info
        return self._gather(), rewards, terminated, truncated, infos

    def way_of(self, index: int) -> Reproduction | None:
        """Return what led environment ``index`` to where it is, if that is known."""
        return self.history.way_of(index)

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
        """Reset as Gymnasium's vector envs do; all environments, since they reset themselves.

        Raises:
            ValueError: The number of seeds is wrong, or only some environments are to be reset.
        """
        if options and "reset_mask" in options:
            raise ValueError(
                "reset: expected no options['reset_mask']: an environment resets itself in the step after its episode."
            )
        if isinstance(seed, int):
            seeds: list[int | None] = [seed + index for index in range(self.num_envs)]
        elif seed is None:
            seeds = [None] * self.num_envs
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"reset: expected {self.num_envs} seeds, one per environment, got {len(seeds)}.")
        observations, infos = self.reset_sparse(seeds, options)
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
        except Exception:
            for index, observation in enumerate(self._latest_obs):
                problem = misfit(self.single_observation_space, observation, "an observation")
                if problem:
                    raise EnvError(
                        f"Environment {index} of {self.num_envs}: {problem}. Correct the environment's "
                        "observation_space, or what it returns."
                    ) from None
            raise
        return self._buffer

    def _recovered(self, index: int, where: str, error: Exception) -> tuple[Any, dict[str, Any]]:
        """Replace an environment that raised an error, and return the new one's first observation and info."""
        observation, info = replaced(self, index, where, error, self.history.restart)
        self.failed.append(index)
        return observation, own_info(info or {})

    def _public(self, observations: object) -> object:
        return deepcopy(observations) if self.copy else observations

    def _dense_infos(self, infos: SparseInfos) -> dict[str, Any]:
        dense: dict[str, Any] = {}
        for index, info in infos.items():
            dense = self._add_info(dense, info, index)
        return dense
