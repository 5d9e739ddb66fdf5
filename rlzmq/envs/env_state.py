"""Saving and restoring environments within episodes, by their own saved state or by replaying actions.

Most environments cannot save their state. Instead, their random state before a reset and all actions since then are
recorded (`History`). A new environment that replays them reaches the same state, which is checked by comparing the
last observation.
"""

from __future__ import annotations

import abc
import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import gymnasium as gym
import numpy as np

from rlzmq.core.plain import NotPlainError, from_plain, to_plain

__all__ = ["MAX_REPLAYED_STEPS", "History", "Replay", "env_state"]

_log = logging.getLogger("rlzmq.envs")

# Longer histories are not replayed, so actions are not kept forever.
MAX_REPLAYED_STEPS = 10_000
# Time limit of all replays of a runner; the remaining environments start new episodes.
_REPLAY_S = 60.0

# Gymnasium's wrappers without state that outlives `reset`.
_STATELESS = (gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)


class History(abc.ABC):
    """The history of an environment: a reset, and the actions and resets since then.

    Attributes:
        seed: Seed passed to the reset, or None.
        random: The environment's random state before the reset, or None if it has none.
    """

    seed: int | None
    random: Any

    @staticmethod
    @abc.abstractmethod
    def get_random(env: Any) -> Any:
        """Return an environment's random state, as plain values."""

    @staticmethod
    @abc.abstractmethod
    def set_random(env: Any, state: Any) -> None:
        """Set a random state that `get_random` returned, or that before a reset."""

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Return the history as plain values and arrays.

        Raises:
            NotPlainError: The actions have other types.
            ValueError: An agent's actions differ in structure.
        """

    @classmethod
    @abc.abstractmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the history for a state from `get_state`."""

    @abc.abstractmethod
    def replay(self, env: Any) -> Iterator[tuple[Any, bool]]:
        """Replay the history: yield (observation, whether the episode is over) of the reset and of each step."""


def env_state(
    kind: type[History],
    env: Any,
    observation: Any,
    needs_reset: bool,
    history: Callable[[], History | None],
    *,
    is_new: bool,
) -> dict[str, Any]:
    """Return an environment's state within its episode, as plain values and arrays.

    Args:
        kind: The class of its history.
        env: The environment.
        observation: Its last observation (multi-agent: a dict by agent id).
        needs_reset: Whether its episode is over.
        history: Returns its history; None if it is unknown or too long to be replayed.
        is_new: Whether the environment was never reset.
    """
    own = None if is_new else saved_state(env)
    saved: dict[str, Any] = {"random": kind.get_random(env), **(own or {})}
    if own is not None:
        return {"kind": "reset" if needs_reset else "own", **saved}
    try:
        known = history()
        saved_history = None if known is None else known.get_state()
    except (NotPlainError, ValueError):
        saved_history = None
    if saved_history is None:
        return {"kind": "reset" if needs_reset else "unknown", **saved}
    saved["history"] = saved_history
    if needs_reset:  # its random state is needed by later states
        return {"kind": "reset", **saved}
    return {"kind": "replay", **saved, "digest": state_digest(observation, saved["random"])}


class Replay:
    """Restores the states of environments, within a common time limit.

    Attributes:
        lost: Indices of the environments that were not restored and start a new episode.
        why: Why the last of them was not restored.
    """

    def __init__(self, kind: type[History]) -> None:
        self.lost: list[int] = []
        self.why: str = ""
        self._kind = kind
        self._deadline = time.perf_counter() + _REPLAY_S

    def restore(self, index: int, env: Any, saved: Mapping[str, Any]) -> tuple[bool, Any, Any]:
        """Restore the state of environment `index`.

        Returns:
            Whether the state was restored (if not, reset the environment), its last observation (None if unknown),
            and its history (None if unknown).
        """
        kind, observation, history = saved["kind"], None, None
        why = "its episode is too long, or it is not known how it began" if kind == "unknown" else ""
        try:
            history = self._kind.from_state(saved["history"]) if "history" in saved else None
            if "state" in saved:
                _set_saved_state(env, saved)
            elif kind == "replay":
                observation, why = self._replay(env, history, saved["digest"])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        try:
            self._kind.set_random(env, saved["random"])
        except Exception as error:
            why = why or f"its random state cannot be set ({type(error).__name__}: {error})"
        if not why:
            return kind != "reset", observation, history
        if kind != "reset":
            self.lost.append(index)
        self.why = why
        return False, None, None

    def _replay(self, env: Any, history: Any, digest: str) -> tuple[Any, str]:
        self._kind.set_random(env, history.random)
        observation, is_over = None, False
        for number, step in enumerate(history.replay(env)):
            observation, is_over = step
            if number % 64 == 0 and time.perf_counter() > self._deadline:
                return observation, f"the replays took more than {_REPLAY_S:g} s"
        if is_over:
            return observation, "the replay of its actions ended its episode"
        if state_digest(observation, self._kind.get_random(env)) != digest:
            return observation, "the replay of its actions led to another observation"
        return observation, ""


def state_digest(observation: Any, random: Any) -> str:
    """Return a digest of a last observation and the random state after it."""
    digest = hashlib.sha256(json.dumps(random, sort_keys=True).encode())
    for leaf in _leaves(observation):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(repr(leaf).encode() if array.dtype.kind == "O" else array.tobytes())
    return digest.hexdigest()


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key)
            yield from _leaves(value[key])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


# -- environments that can save their state -----------------------------------------------------------


def _layer_with_state(env: Any) -> tuple[Any, list[gym.wrappers.TimeLimit]] | None:
    """Return the layer with ``get_state()`` and ``set_state(state)``, and the time limits that wrap it.

    None if there is no such layer, or if another wrapper around it may have state.
    """
    limits: list[gym.wrappers.TimeLimit] = []
    layer = env
    while True:
        if _takes(layer, "get_state", 0) and _takes(layer, "set_state", 1):
            return layer, limits
        if type(layer) is gym.wrappers.TimeLimit:
            limits.append(layer)
        elif type(layer) not in _STATELESS:
            return None
        layer = layer.env


def _takes(env: Any, name: str, num_arguments: int) -> bool:
    method = getattr(type(env), name, None)
    if method is None:
        return False
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == num_arguments + 1  # plus `self`


def saved_state(env: Any) -> dict[str, Any] | None:
    """Return the result of the environment's ``get_state()``; None if it cannot be used."""
    found = _layer_with_state(env)
    if found is None:
        return None
    layer, limits = found
    try:
        state = to_plain(layer.get_state())
    except Exception as error:  # user code failed; the episode is replayed instead
        _log.warning(
            "%s.get_state() cannot be used: %s: %s", type(layer).__name__, type(error).__name__, error
        )
        return None
    return {"state": state, "elapsed": [int(limit._elapsed_steps or 0) for limit in limits]}


def _set_saved_state(env: Any, saved: Mapping[str, Any]) -> None:
    found = _layer_with_state(env)
    if found is None or len(found[1]) != len(saved["elapsed"]):
        raise ValueError("it no longer has get_state() and set_state(state), or has other wrappers")
    env.reset()
    layer, limits = found
    layer.set_state(from_plain(saved["state"]))
    for limit, elapsed in zip(limits, saved["elapsed"], strict=True):
        limit._elapsed_steps = elapsed
