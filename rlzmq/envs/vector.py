"""Vector environments from ``config.env``: sync, async or native, all with NEXT_STEP autoreset."""

from __future__ import annotations

import contextlib
import errno
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import SemLock
from multiprocessing.util import _finalizer_registry  # type: ignore[attr-defined]
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from rlzmq.core.addresses import ensure_multiprocessing_directory
from rlzmq.core.by_value import SentByValue
from rlzmq.core.errors import ConfigurationError, EnvError, RlzmqError, UnsupportedSpaceError
from rlzmq.core.patience import ANSWER_S
from rlzmq.core.process import QUIET_TRACKER, blocked, default_in_forks, ignore_ending_signals, unblocked
from rlzmq.core.spaces import leaf_paths
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tracebacks import run_error
from rlzmq.envs.registry import EnvContext, EnvEntry, MakingEnvs, call_creator, make_env, resolve_env
from rlzmq.envs.sync_vector import LeanSyncVectorEnv, SparseInfos
from rlzmq.episodes.step_values import own

__all__ = ["VECTORIZE_MODES", "check_env_spaces", "check_space", "make_vec", "sparse_infos"]

VECTORIZE_MODES = ("sync", "async", "vector_entry_point")

_MAIN_LOCK = threading.Lock()


def make_vec(
    env: object,
    *,
    num_envs: int = 1,
    mode: object = "sync",
    context: EnvContext | None = None,
) -> VectorEnv[Any, Any, Any]:
    """Make a vector environment with NEXT_STEP autoreset.

    Args:
        env: Anything that ``resolve_env`` accepts.
        num_envs: Number of environments, at least 1.
        mode: ``"sync"`` (one after the other in this process), ``"async"`` (one process each),
            ``"vector_entry_point"`` (the environment's own vectorized class), or Gymnasium's enum of these.
        context: ``env_config`` and indices; environment i gets a copy with ``vector_index=i``.

    Returns:
        A ``gymnasium.vector.VectorEnv``, not yet reset.

    Raises:
        ConfigurationError: The id or mode is unknown, there is no native vector class, its autoreset mode is not
            NEXT_STEP, sub-environments whose spaces differ.
        UnsupportedSpaceError: A space has no fixed shape and dtype.
    """
    entry = resolve_env(env)
    context = EnvContext() if context is None else context
    if not isinstance(num_envs, int) or num_envs < 1:
        raise ConfigurationError(f"num_envs_per_env_runner: expected an int >= 1, got {num_envs!r}.")
    mode_name = getattr(mode, "value", mode)
    if mode_name not in VECTORIZE_MODES:
        raise ConfigurationError(
            f"gym_env_vectorize_mode={mode!r}: expected one of {', '.join(VECTORIZE_MODES)}."
            f"{did_you_mean(mode_name, VECTORIZE_MODES)}"
        )
    if mode_name == "vector_entry_point" or entry.is_vector_class:
        vector_env = _make_native(entry, num_envs, context)
        check_space(vector_env.single_observation_space, "observation_space", where=entry.label)
        check_space(vector_env.single_action_space, "action_space", where=entry.label)
        return vector_env
    make = _make_in_worker if mode_name == "async" else _make_checked
    creators = [
        partial(make, entry, context.copy_with_overrides(vector_index=index, remote=mode_name == "async"))
        for index in range(num_envs)
    ]
    making = MakingEnvs(num_envs, context)
    if mode_name == "sync":
        try:
            return LeanSyncVectorEnv([making.counting(creator) for creator in creators])
        except RuntimeError as error:  # Gymnasium's text when the spaces differ
            if "space" not in str(error):
                raise
            raise ConfigurationError(
                f"The {num_envs} environments made from {entry.label} differ in their spaces, but a vector "
                f"env needs them equal: {error}"
            ) from error
    return _make_async(creators, making)


def sparse_infos(infos: Mapping[str, Any], num_envs: int) -> SparseInfos:
    """Return the non-empty infos of a Gymnasium vector env by environment index.

    Args:
        infos: From ``VectorEnv.step``: key -> array ``[num_envs, ...]``, with the mask
            ``_key``; a value without a mask counts for every environment.
        num_envs: Number of environments.

    Returns:
        Environment index -> info dict, with copies of the values.
    """
    sparse: SparseInfos = {}
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue  # a mask
        mask = infos.get(f"_{key}")
        indices = range(num_envs) if mask is None else np.flatnonzero(mask).tolist()
        if isinstance(value, Mapping):
            nested = sparse_infos(value, num_envs)
            for index in indices:
                sparse.setdefault(index, {})[key] = nested.get(index, {})
            continue
        per_env = isinstance(value, np.ndarray | Sequence) and not isinstance(value, str | bytes)
        per_env = per_env and len(value) == num_envs
        for index in indices:
            sparse.setdefault(index, {})[key] = own(value[index] if per_env else value)
    return sparse


def _make_checked(entry: EnvEntry, context: EnvContext) -> gym.Env[Any, Any]:
    """Create one environment for a vector env, with the checks that Gymnasium defers to the first step."""
    env = make_env(entry, context)
    if not isinstance(env, gym.Env):
        hint = ""
        if isinstance(env, VectorEnv):
            hint = " Set gym_env_vectorize_mode='vector_entry_point' for a native vector env."
        elif hasattr(env, "possible_agents") or hasattr(env, "observation_spaces"):
            hint = " A multi-agent environment needs config.multi_agent(policies=..., policy_mapping_fn=...)."
        raise ConfigurationError(
            f"{entry.label} made a {type(env).__name__}; expected a gymnasium.Env.{hint}"
        )
    check_env_spaces(env, where=entry.label)
    return env


def _make_in_worker(entry: EnvEntry, context: EnvContext) -> gym.Env[Any, Any]:
    if multiprocessing.parent_process() is not None:
        return _RaisesErrors(_make_checked(entry, context))
    with unblocked():  # Gymnasium makes one in this process, too
        return _RaisesErrors(_make_checked(entry, context))


class _RaisesErrors(gym.Wrapper[Any, Any, Any, Any]):
    """Turns what an environment raises in its own process into an error: Gymnasium reports nothing else."""

    def reset(self, **kwargs: object) -> Any:
        return _called(self.env.reset, **kwargs)

    def step(self, action: object) -> Any:
        return _called(self.env.step, action)


def _called(method: Callable[..., Any], *args: object, **kwargs: object) -> object:
    try:
        return method(*args, **kwargs)
    except BaseException as error:
        if (explained := run_error(error)) is error:
            raise
        raise explained from error


def _make_native(entry: EnvEntry, num_envs: int, context: EnvContext) -> VectorEnv[Any, Any, Any]:
    if entry.wrappers or (entry.is_atari and entry.gym_id is None):
        raise ConfigurationError(
            f"config.wrappers, clip_rewards and is_atari wrap single environments, but {entry.label} is a native "
            "vector env. Leave them out, use gym_env_vectorize_mode='sync', or register a function that makes the "
            "wrapped vector env."
        )
    if entry.gym_id is not None:
        vector_env = _make_entry_point(entry, entry.gym_id, num_envs, context)
    else:
        vector_env = call_creator(entry, context, num_envs=num_envs)
    if not isinstance(vector_env, VectorEnv):
        raise ConfigurationError(
            f"gym_env_vectorize_mode='vector_entry_point': {entry.label} made a {type(vector_env).__name__}; "
            "expected a gymnasium.vector.VectorEnv. Use mode 'sync' or 'async' for a single environment."
        )
    if vector_env.num_envs != num_envs:
        raise ConfigurationError(
            f"{entry.label} made a vector env of {vector_env.num_envs} environments, expected "
            f"num_envs_per_env_runner={num_envs}: take the parameter num_envs in its constructor."
        )
    _check_autoreset(entry, vector_env)
    return vector_env


def _make_entry_point(
    entry: EnvEntry, gym_id: str, num_envs: int, context: EnvContext
) -> VectorEnv[Any, Any, Any]:
    entry_point = gym.spec(gym_id).vector_entry_point
    if entry_point is None:
        raise ConfigurationError(
            f"gym_env_vectorize_mode='vector_entry_point': {gym_id!r} has no native vector env. Use 'sync' "
            "or 'async'."
        )
    # Not only the rewards would differ from those of a single env, but also the reported returns.
    settings: dict[str, Any] = {**({"reward_clipping": False} if entry.is_atari else {}), **context}
    if "autoreset_mode" not in settings and _takes_autoreset_mode(entry_point):
        settings["autoreset_mode"] = AutoresetMode.NEXT_STEP
    try:
        return gym.make_vec(gym_id, num_envs=num_envs, vectorization_mode="vector_entry_point", **settings)
    except (gym.error.Error, TypeError) as error:
        raise ConfigurationError(
            f"The native vector env of {entry.label!r} could not be made with config.env_config="
            f"{dict(context)}: {error}"
        ) from error


def _takes_autoreset_mode(entry_point: object) -> bool:
    try:
        if isinstance(entry_point, str):
            entry_point = gym.envs.registration.load_env_creator(entry_point)
        return "autoreset_mode" in inspect.signature(entry_point).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError, ImportError, AttributeError):
        return False


def _check_autoreset(entry: EnvEntry, vector_env: VectorEnv[Any, Any, Any]) -> None:
    mode = vector_env.metadata.get("autoreset_mode")
    if getattr(mode, "value", mode) == AutoresetMode.NEXT_STEP.value:
        return
    vector_env.close()
    said = "does not say which" if mode is None else f"is {getattr(mode, 'name', mode)}"
    raise ConfigurationError(
        f"The native vector env of {entry.label!r} must autoreset in NEXT_STEP mode, its "
        f"metadata['autoreset_mode'] {said}. With SAME_STEP an episode's last observation would be lost. "
        "Give its constructor a parameter autoreset_mode (it is then called with "
        "gymnasium.vector.AutoresetMode.NEXT_STEP), or use gym_env_vectorize_mode='sync'."
    )


class _Answer:
    """A pipe to an environment's process until its first answer, which says that the environment is made."""

    def __init__(self, pipes: list[Any], index: int, making: MakingEnvs) -> None:
        self._pipe, self._pipes, self._index, self._making = pipes[index], pipes, index, making

    def recv(self) -> Any:
        answer = self._pipe.recv()
        self._pipes[self._index] = self._pipe
        self._making.add()
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


def _work(*args: object) -> None:
    """Run an environment in a process of its own, which ends without a word after the one that made it."""
    ignore_ending_signals()
    default_in_forks()
    made_by = multiprocessing.parent_process()
    assert made_by is not None
    threading.Thread(target=_end_after, args=(made_by,), daemon=True).start()
    try:
        _async_worker(*args)  # type: ignore[arg-type]
    except BrokenPipeError:
        if made_by.is_alive():
            raise


def _end_after(made_by: BaseProcess) -> None:
    """End this process if its environment does not return once the process that made it has ended."""
    made_by.join()
    time.sleep(ANSWER_S)
    os._exit(1)


class _AsyncVectorEnv(AsyncVectorEnv):
    def __init__(
        self, creators: Sequence[Callable[[], gym.Env[Any, Any]]], context: str, making: MakingEnvs
    ) -> None:
        self._making = making
        try:
            super().__init__(creators, context=context, worker=_work)
        except BaseException:
            for process in vars(self).get("processes", ()):
                if process.pid is not None:
                    process.kill()
            raise
        # All processes have answered, so they have opened the queue's semaphores. Without names nothing remains in
        # /dev/shm, even if multiprocessing's resource tracker is killed together with all of them.
        locks: list[Any] = [lock for lock in vars(self.error_queue).values() if isinstance(lock, SemLock)]
        names = {lock._semlock.name for lock in locks}
        for finalizer in list(_finalizer_registry.values()):
            if finalizer._callback is locks[0]._cleanup and finalizer._args[0] in names:
                finalizer()

    def _check_spaces(self) -> None:
        pipes: list[Any] = self.parent_pipes
        pipes[:] = [_Answer(pipes, index, self._making) for index in range(len(pipes))]
        with unblocked():  # all processes are started: what is waited for is the user's code
            super()._check_spaces()  # type: ignore[no-untyped-call]

    def reset(self, **kwargs: Any) -> Any:
        with self._explained_death():
            return super().reset(**kwargs)

    def step(self, actions: Any) -> Any:
        with self._explained_death():
            return super().step(actions)

    @contextlib.contextmanager
    def _explained_death(self) -> Iterator[None]:
        """Raise an EnvError if the process of an environment has ended, which Gymnasium sees as a closed pipe."""
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            if not wait([process.sentinel for process in self.processes], ANSWER_S):
                raise
            ended = {i: p.exitcode for i, p in enumerate(self.processes) if p.exitcode is not None}
            index, code = next(iter(ended.items()))
            how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
            raise EnvError(
                f"the process of environment {index} of {self.num_envs} {how}: its code, or a library that it calls, "
                "ended it. gym_env_vectorize_mode='sync' shows where"
            ) from None

    def close_extras(self, timeout: int | float | None = None, terminate: bool = False) -> None:
        if any(process.exitcode is not None for process in self.processes):
            self._state, terminate = AsyncState.DEFAULT, True  # one that has ended answers no more
        super().close_extras(timeout, terminate)
        del self.error_queue  # otherwise the resource tracker warns about its semaphores


def _make_async(
    creators: Sequence[Callable[[], gym.Env[Any, Any]]], making: MakingEnvs
) -> VectorEnv[Any, Any, Any]:
    # forkserver, because a fork of this process would inherit its threads' locks and open sockets.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if forkserver._forkserver._preload_modules == ["__main__"]:  # type: ignore[attr-defined]
        # What every environment's process needs is imported once. A list of the user's own is kept.
        multiprocessing.set_forkserver_preload([__name__])
    ensure_multiprocessing_directory()
    try:
        with blocked(), _main_module_hidden():
            sys.warnoptions.append(QUIET_TRACKER)
            resource_tracker.ensure_running()  # which unblocks some of the signals
            sys.warnoptions.remove(QUIET_TRACKER)
            with blocked():
                if method == "forkserver":
                    # A signal that comes while the server imports finds no environment half started.
                    first = multiprocessing.get_context(method).Process(target=int)  # type: ignore[attr-defined]
                    first.start()
                    first.join()
                made = [SentByValue(make, "an environment") for make in creators]
                return _AsyncVectorEnv(made, method, making)
    except RlzmqError:
        raise
    except (RuntimeError, EOFError, BrokenPipeError) as error:
        raise ConfigurationError(
            f"gym_env_vectorize_mode='async': the environment processes did not start: {error}. Environments "
            "and their settings must be picklable by cloudpickle; try mode 'sync' to see the cause."
        ) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigurationError(
            "gym_env_vectorize_mode='async': /dev/shm has no room for the observations that the environment processes "
            "share. Make it larger (docker run --shm-size), or use mode 'sync'."
        ) from error


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep child processes started in the block from running the user's script again."""
    # ``multiprocessing`` imports ``__main__`` again in each child, which would restart a script without an
    # ``if __name__`` guard. The children do not need it: cloudpickle sends its definitions by value.
    with _MAIN_LOCK:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_space(space: object, name: str, *, where: str = "") -> None:
    """Raise an error if a space's elements have no fixed shape and dtype.

    Args:
        space: The space of one environment (not of a vector env).
        name: Its name, e.g. ``"observation_space"``; the text names the sub-space within it.
        where: The environment's name, for the text.

    Raises:
        ConfigurationError: It is not a Gymnasium space.
        UnsupportedSpaceError: It is, or contains, a space other than Box, Discrete, MultiDiscrete, MultiBinary, Dict
            and Tuple. The message suggests a solution.
    """
    place = f" of {where}" if where else ""
    if not isinstance(space, gym.Space):
        raise ConfigurationError(
            f"{name}{place}: expected a gymnasium.spaces.Space, got {space!r} ({type(space).__name__}). "
            f"Set self.{name} in the environment's __init__."
        )
    for keys, part in leaf_paths(space):
        path = name + "".join(f"[{key!r}]" for key in keys)
        if isinstance(part, spaces.Box) and part.dtype.hasobject:
            _refuse(path, part, place, "its dtype is object")
        if not isinstance(part, _LEAVES):
            _refuse(path, part, place, "its elements have no fixed shape and dtype")


def check_env_spaces(env: object, *, where: str = "") -> None:
    """Check the observation and action space of a single environment (see ``check_space``)."""
    check_space(getattr(env, "observation_space", None), "observation_space", where=where)
    check_space(getattr(env, "action_space", None), "action_space", where=where)


def _refuse(path: str, space: gym.Space[object], place: str, reason: str) -> None:
    if path.startswith("action"):
        way_out = "wrap the environment with gymnasium.wrappers.TransformAction"
    else:
        way_out = "wrap the environment with gymnasium.wrappers.TransformObservation"
    raise UnsupportedSpaceError(
        f"{path}{place} is {type(space).__name__} ({space}), which is not supported: {reason}. Supported: "
        f"Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these. Way out: {way_out} (or "
        "change the environment) to give it one of them, e.g. a Box padded to the longest size plus a mask."
    )
