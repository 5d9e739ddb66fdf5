"""Saving and restoring environments within episodes, by their own saved state or by replaying actions.

Environments in general cannot save their state. So the state of their random numbers before a reset and all
actions since are recorded: a new environment that replays them reaches the same state, which is checked by
comparing the last observation.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from rlzmq.core.plain import from_plain, to_plain
from rlzmq.core.tree import tree_leaves, tree_map, tree_stack
from rlzmq.envs.rng_state import plain_random, random_state, set_random_state

__all__ = [
    "MAX_REPLAYED_STEPS",
    "Begin",
    "Replay",
    "StepHistory",
    "env_state",
    "saved_state",
    "state_digest",
]

_log = logging.getLogger("rlzmq.envs")

# Longer histories are not replayed, so that actions are not kept forever.
MAX_REPLAYED_STEPS = 10_000
# Minimum number of steps between recorded resets: reading the random state at every reset would slow
# short episodes by some percent.
_STEPS_BETWEEN_BEGINS = 256
# Actions are kept per step, and as one array for so many steps once there are so many.
_STEPS_PER_BLOCK = 256
# Time limit of all replays of a runner; the remaining environments start new episodes.
_REPLAY_S = 60.0

# Gymnasium's wrappers without state that outlives `reset`.
_STATELESS = (gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)


@dataclass(slots=True)
class Begin:
    """A recorded reset, from which an environment's actions are kept.

    Attributes:
        step: Number of the vector step after it.
        random: The state of the environment's bit generator before the reset, or None if it has none.
        seed: Seed passed to the reset, or None.
        actions: Actions before `step`, if the environment was itself restored; leaves ``[T, ...]``.
    """

    step: int
    random: dict[str, Any] | None
    seed: int | None
    actions: Any = None


class StepHistory:
    """An earlier reset of each environment of a vector env, and the actions since then.

    Args:
        num_envs: Number of environments.

    Attributes:
        num_steps: Vector steps so far.
        due: For each environment, the number of steps after which `begin` must be called at its resets.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_steps = 0
        self.due = [0] * num_envs
        self._begins: list[Begin | None] = [None] * num_envs
        # (number of the first step, actions ``[T, N, ...]``), then the actions ``[N, ...]`` of the steps after them
        self._blocks: deque[tuple[int, Any]] = deque()
        self._latest: list[Any] = []

    def record(self, actions: Any) -> None:
        """Record the actions of the vector step that is about to happen, a tree of arrays ``[N, ...]``."""
        self.num_steps += 1
        self._latest.append(actions.copy() if type(actions) is np.ndarray else tree_map(np.array, actions))
        if len(self._latest) == _STEPS_PER_BLOCK:
            self._blocks.append((self.num_steps - _STEPS_PER_BLOCK, tree_stack(self._latest)))
            self._latest = []
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop the actions before all resets that can be replayed."""
        oldest = self.num_steps - MAX_REPLAYED_STEPS
        needed = [b.step for b in self._begins if b is not None and b.step >= oldest]
        while self._blocks and self._blocks[0][0] + _STEPS_PER_BLOCK <= min(needed, default=self.num_steps):
            self._blocks.popleft()

    def begin(self, index: int, env: Any, seed: int | None) -> None:
        """Record that environment `index` is about to be reset before step `num_steps`."""
        generator = getattr(env.unwrapped, "_np_random", None)
        random = None if generator is None else generator.bit_generator.state
        self._begins[index] = Begin(self.num_steps, random, seed)
        self.due[index] = self.num_steps + _STEPS_BETWEEN_BEGINS

    def resume(self, index: int, begin: Begin | None, due_in: int = 0) -> None:
        """Continue the history of restored environment `index`; None if its history is unknown."""
        if begin is not None:
            begin = Begin(self.num_steps, begin.random, begin.seed, begin.actions)
        self._begins[index] = begin
        self.due[index] = self.num_steps + (due_in if begin is not None else 0)

    def due_in(self, index: int) -> int:
        """Return in how many steps `begin` must be called at the resets of environment `index`."""
        return max(0, self.due[index] - self.num_steps)

    def begin_of(self, index: int) -> Begin | None:
        """Return the recorded reset of environment `index`."""
        return self._begins[index]

    def restart(self, index: int, seed: int | None) -> None:
        """Record that environment `index` was replaced and reset with `seed` in the current vector step."""
        self._begins[index] = None if seed is None else Begin(self.num_steps, None, seed)
        self.due[index] = self.num_steps

    def actions_since(self, index: int) -> tuple[Begin, Any] | None:
        """Return a reset of environment `index`, and the actions since, leaves ``[T, ...]`` (None where T = 0).

        None if they are unknown or too many.
        """
        begin = self._begins[index]
        first_latest = self.num_steps - len(self._latest)
        first = self._blocks[0][0] if self._blocks else first_latest
        if begin is None or begin.step < first:
            return None
        parts = [] if begin.actions is None else [begin.actions]
        for number, block in self._blocks:
            skipped = max(0, begin.step - number)
            if skipped < _STEPS_PER_BLOCK:
                parts.append(tree_map(lambda leaf, skipped=skipped: leaf[skipped:, index], block))
        latest = self._latest[max(0, begin.step - first_latest) :]
        if latest:
            parts.append(tree_map(lambda leaf: leaf[:, index], tree_stack(latest)))
        rows = tree_map(lambda *leaves: np.concatenate(leaves), *parts) if parts else None
        if rows is not None and len(tree_leaves(rows)[0]) > MAX_REPLAYED_STEPS:
            return None
        return begin, rows


# -- one environment's state --------------------------------------------------------------------------


def env_state(
    env: Any, observation: Any, needs_reset: bool, history: StepHistory, index: int, *, is_new: bool
) -> dict[str, Any]:
    """Return an environment's state within its episode, as plain values and arrays.

    Args:
        env: The environment.
        observation: Its last observation.
        needs_reset: Whether its episode is over.
        history: History of its vector env, in which it has number `index`.
        is_new: Whether it was never reset.
    """
    own = None if is_new else saved_state(env)
    saved: dict[str, Any] = {"random": random_state(env), **(own or {})}
    if own is not None:
        return {"kind": "reset" if needs_reset else "own", **saved}
    known = history.actions_since(index)
    if known is None:
        return {"kind": "reset" if needs_reset else "unknown", **saved}
    begin, actions = known
    saved |= {
        "seed": begin.seed,
        "random_before": plain_random(begin.random),
        "actions": actions,
        "due_in": history.due_in(index),
    }
    if needs_reset:  # needed by later states
        return {"kind": "reset", **saved}
    return {"kind": "replay", **saved, "digest": state_digest(observation, saved["random"])}


class Replay:
    """Restores environments' states, within a common time limit.

    Attributes:
        lost: Indices of the environments that were not restored and start a new episode.
        why: Why the last of them was not restored.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.why = ""
        self._deadline = time.perf_counter() + _REPLAY_S

    def restore(self, index: int, env: Any, saved: Mapping[str, Any]) -> tuple[bool, Any, Any]:
        """Restore the state of environment `index`.

        Returns:
            Whether it was restored (else it must be reset), its last observation (None if unknown), and
            its history (see `_history`).
        """
        kind, observation, history = saved["kind"], None, None
        why = "its episode is too long, or it is not known how it began" if kind == "unknown" else ""
        try:
            history = self._history(saved)
            if "state" in saved:
                _set_saved_state(env, saved)
            elif kind == "replay":
                observation, why = self._replay(env, history, saved["digest"])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        try:
            self._set_random(env, saved["random"])
        except Exception as error:
            why = why or f"its random state cannot be set ({type(error).__name__}: {error})"
        if not why:
            return kind != "reset", observation, history
        if kind != "reset":
            self.lost.append(index)
        self.why = why
        return False, None, None

    def _replay(self, env: Any, history: Any, digest: str) -> tuple[Any, str]:
        self._set_random(env, history.random)
        observation, is_over = None, False
        for number, step in enumerate(self._steps(env, history)):
            observation, is_over = step
            if number % 64 == 0 and time.perf_counter() > self._deadline:
                return observation, f"the replays took more than {_REPLAY_S:g} s"
        if is_over:
            return observation, "the replay of its actions ended its episode"
        if state_digest(observation, self._random(env)) != digest:
            return observation, "the replay of its actions led to another observation"
        return observation, ""

    # Overridden for multi-agent environments:

    def _history(self, saved: Mapping[str, Any]) -> Any:
        """Return the recorded reset (`random`: the random state before it) and the actions since.

        None if unknown.
        """
        if "actions" not in saved:
            return None
        return Begin(0, saved["random_before"], saved["seed"], saved["actions"])

    def _steps(self, env: Any, history: Any) -> Iterator[tuple[Any, bool]]:
        """Replay a history: yield (observation, whether the episode is over) of its reset and each step."""
        observation, _ = env.reset(seed=history.seed)
        is_over = False
        yield observation, is_over
        for action in _single_actions(env.action_space, history.actions):
            if is_over:
                observation, _ = env.reset()
                is_over = False
            else:
                observation, _, terminated, truncated, _ = env.step(action)
                is_over = bool(terminated or truncated)
            yield observation, is_over

    def _random(self, env: Any) -> Any:
        return random_state(env)

    def _set_random(self, env: Any, state: Any) -> None:
        set_random_state(env, state)


def _single_actions(space: Any, actions: Any) -> Iterable[Any]:
    if actions is None:
        return ()
    if isinstance(actions, np.ndarray):
        return actions
    return iterate(batch_space(space, len(tree_leaves(actions)[0])), actions)


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
    """Return the layer with ``get_state()`` and ``set_state(state)``, and the time limits around it.

    None if there is none, or another wrapper around it may have state.
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
    return len(needed) == num_arguments + 1  # and self


def saved_state(env: Any) -> dict[str, Any] | None:
    """Return what an environment's ``get_state()`` returns, or None if it cannot be used."""
    found = _layer_with_state(env)
    if found is None:
        return None
    layer, limits = found
    try:
        state = to_plain(layer.get_state())
    except Exception as error:  # user code: its episode is replayed instead
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
