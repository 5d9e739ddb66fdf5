"""Where environments are in their episodes, and the way back there: a saved state, or their actions replayed.

No environment's state can be saved in general. What can be kept is the state of its random numbers before some
reset, and every action since: a new environment that is reset with the one and stepped with the others arrives
at the same place, and the last observation tells whether it did.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from rlzmq.core.plain import from_plain, to_plain
from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.envs.rng_state import plain_random, random_state, set_random_state

__all__ = [
    "MAX_REPLAYED_STEPS",
    "Begin",
    "Replay",
    "StepHistory",
    "env_position",
    "own_state",
    "position_digest",
]

_log = logging.getLogger("rlzmq.envs")

Convert = Callable[[Any], Any]

# A longer way back is not gone: actions are not kept for ever.
MAX_REPLAYED_STEPS = 10_000
# A replay begins at a reset at least so many steps ago, if there is one: reading the random state at every
# reset would cost short episodes some percent of their speed.
_STEPS_BETWEEN_BEGINS = 256
# All of a runner's replays together; environments whose turn comes later begin new episodes.
_REPLAY_S = 60.0

# Gymnasium's wrappers that keep nothing that `reset` does not put right.
_STATELESS = (gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)


@dataclass(slots=True)
class Begin:
    """A reset from which on an environment's actions are kept.

    Attributes:
        step: Number of the vector step that follows it.
        random: The state of the environment's bit generator before the reset; None: it has none.
        seed: That the reset was given, or None.
        actions: Those before `step`, of an environment that was itself brought back; leaves ``[T, ...]``.
    """

    step: int
    random: dict[str, Any] | None
    seed: int | None
    actions: Any = None


class StepHistory:
    """Some earlier reset of each environment, and the actions since then.

    The vector env notes resets and counts steps; the actions come from the sampler, which has them anyway, a
    fragment at a time.

    Args:
        num_envs: Environments.

    Attributes:
        num_steps: Vector steps so far.
        due: For each environment, the number of steps from which on `begin` is to be called at its resets.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_steps = 0
        self.due = [0] * num_envs
        self._begins: list[Begin | None] = [None] * num_envs
        # (number of the first step, number after the last one, actions ``[N, T, ...]``, what the env was given)
        self._fragments: deque[tuple[int, int, Any, Convert | None]] = deque()

    def begin(self, index: int, env: Any, seed: int | None) -> None:
        """Environment `index` is about to be reset, before step number `num_steps`."""
        generator = getattr(env.unwrapped, "_np_random", None)
        random = None if generator is None else generator.bit_generator.state
        self._begins[index] = Begin(self.num_steps, random, seed)
        self.due[index] = self.num_steps + _STEPS_BETWEEN_BEGINS

    def resume(self, index: int, begin: Begin | None, due_in: int = 0) -> None:
        """Environment `index` was brought back to where this led; None: nobody knows how it came there."""
        if begin is not None:
            begin = Begin(self.num_steps, begin.random, begin.seed, begin.actions)
        self._begins[index] = begin
        self.due[index] = self.num_steps + (due_in if begin is not None else 0)

    def due_in(self, index: int) -> int:
        """In how many steps `begin` is to be called at the resets of environment `index`."""
        return max(0, self.due[index] - self.num_steps)

    def begin_of(self, index: int) -> Begin | None:
        """The reset of environment `index` from which on its actions are kept."""
        return self._begins[index]

    def restart(self, index: int, seed: int | None) -> None:
        """Environment `index` is a new one, that was reset with `seed` in the vector step at hand."""
        self._begins[index] = None if seed is None else Begin(self.num_steps, None, seed)
        self.due[index] = self.num_steps

    def add(self, actions: Any, num_steps: int, convert: Convert | None = None) -> None:
        """The actions of the last `num_steps` vector steps.

        Args:
            actions: Tree of arrays ``[N, T, ...]``; kept, so it must be nobody else's.
            num_steps: T.
            convert: What turns actions ``[T, ...]`` into those that the environment was given; None: they are.
        """
        end = self.num_steps
        self._fragments.append((end - num_steps, end, actions, convert))
        oldest = end - MAX_REPLAYED_STEPS
        needed = min((b.step for b in self._begins if b is not None and b.step >= oldest), default=end)
        while self._fragments and self._fragments[0][1] <= needed:
            self._fragments.popleft()

    def way_back(
        self, index: int, latest: tuple[Any, int, Convert | None] | None = None
    ) -> tuple[Begin, Any] | None:
        """A reset of environment `index`, and the actions since, leaves ``[T, ...]`` (None where T = 0).

        None where they are not known, or too many.

        Args:
            latest: Actions that were not added yet: the arguments of `add`.
        """
        begin = self._begins[index]
        if begin is None:
            return None
        parts = [] if begin.actions is None else [begin.actions]
        step = begin.step
        fragments = list(self._fragments)
        if latest is not None:
            fragments.append((self.num_steps - latest[1], self.num_steps, latest[0], latest[2]))
        for first, end, actions, convert in fragments:
            if end <= step:
                continue
            if first > step:
                return None
            skipped = step - first
            part = _row(actions, index, skipped)
            parts.append(part if convert is None else convert(part))
            step = end
        rows = tree_map(lambda *leaves: np.concatenate(leaves), *parts) if parts else None
        if step != self.num_steps or (rows is not None and len(tree_leaves(rows)[0]) > MAX_REPLAYED_STEPS):
            return None
        return begin, rows


def _row(actions: Any, index: int, skipped: int) -> Any:
    return tree_map(lambda leaf: leaf[index, skipped:], actions)


# -- one environment's position -----------------------------------------------------------------------


def env_position(
    env: Any, observation: Any, needs_reset: bool, history: StepHistory, index: int, *, is_new: bool
) -> dict[str, Any]:
    """Where an environment is, as plain values and arrays.

    Args:
        env: The environment.
        observation: Its last one.
        needs_reset: Whether its episode is over.
        history: Of the vector env that it is number `index` of.
        is_new: It was never reset.
    """
    own = None if is_new else own_state(env)
    position: dict[str, Any] = {"random": random_state(env), **(own or {})}
    if own is not None:
        return {"kind": "reset" if needs_reset else "own", **position}
    known = history.way_back(index)
    if known is None:
        return {"kind": "reset" if needs_reset else "unknown", **position}
    begin, actions = known
    position |= {
        "seed": begin.seed,
        "random_before": plain_random(begin.random),
        "actions": actions,
        "due_in": history.due_in(index),
    }
    if needs_reset:  # of use to later positions
        return {"kind": "reset", **position}
    return {"kind": "replay", **position, "digest": position_digest(observation, position["random"])}


class Replay:
    """Brings environments back to their positions, within a time limit over all of them.

    Attributes:
        lost: Indices of the environments that did not arrive, and begin a new episode.
        why: What was the matter with the last of them.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.why = ""
        self._deadline = time.perf_counter() + _REPLAY_S

    def bring_back(self, index: int, env: Any, position: Mapping[str, Any]) -> tuple[bool, Any, Any]:
        """Takes environment number `index` to its position.

        Returns:
            Whether it arrived (else it must be reset), its last observation (None where it is not known), and
            the way there (see `_way`).
        """
        kind, observation, way = position["kind"], None, None
        why = "its episode is too long, or it is not known how it began" if kind == "unknown" else ""
        try:
            way = self._way(position)
            if "state" in position:
                _set_own_state(env, position)
            elif kind == "replay":
                observation, why = self._replay(env, way, position["digest"])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        try:
            self._set_random(env, position["random"])
        except Exception as error:
            why = why or f"its random state cannot be set ({type(error).__name__}: {error})"
        if not why:
            return kind != "reset", observation, way
        if kind != "reset":
            self.lost.append(index)
        self.why = why
        return False, None, None

    def _replay(self, env: Any, way: Any, digest: str) -> tuple[Any, str]:
        self._set_random(env, way.random)
        observation, is_over = None, False
        for number, step in enumerate(self._steps(env, way)):
            observation, is_over = step
            if number % 64 == 0 and time.perf_counter() > self._deadline:
                return observation, f"the replays took more than {_REPLAY_S:g} s"
        if is_over:
            return observation, "the replay of its actions ended its episode"
        if position_digest(observation, self._random(env)) != digest:
            return observation, "the replay of its actions led to another observation"
        return observation, ""

    # What is another thing for other kinds of environments:

    def _way(self, position: Mapping[str, Any]) -> Any:
        """The reset that the way began with (`random`: the state of random numbers before it), and what followed.

        None where that is not known.
        """
        if "actions" not in position:
            return None
        return Begin(0, position["random_before"], position["seed"], position["actions"])

    def _steps(self, env: Any, way: Any) -> Iterator[tuple[Any, bool]]:
        """Goes the way: (observation, whether the episode is over) of its reset and each step."""
        observation, _ = env.reset(seed=way.seed)
        is_over = False
        yield observation, is_over
        for action in _single_actions(env.action_space, way.actions):
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


def position_digest(observation: Any, random: Any) -> str:
    """Tells apart two last observations, and the random states after them."""
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
    """The environment that has ``get_state()`` and ``set_state(state)``, and the time limits around it.

    None where there is none, or another wrapper around it may keep something.
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


def own_state(env: Any) -> dict[str, Any] | None:
    """What an environment's ``get_state()`` gives, part of its position; None where that does not help."""
    found = _layer_with_state(env)
    if found is None:
        return None
    layer, limits = found
    try:
        state = to_plain(layer.get_state())
    except Exception as error:  # user code: its episode is replayed instead
        _log.warning("%s.get_state() is of no use: %s: %s", type(layer).__name__, type(error).__name__, error)
        return None
    return {"state": state, "elapsed": [int(limit._elapsed_steps or 0) for limit in limits]}


def _set_own_state(env: Any, position: Mapping[str, Any]) -> None:
    found = _layer_with_state(env)
    if found is None or len(found[1]) != len(position["elapsed"]):
        raise ValueError("it has no get_state() and set_state(state) any more, or other wrappers")
    env.reset()
    layer, limits = found
    layer.set_state(from_plain(position["state"]))
    for limit, elapsed in zip(limits, position["elapsed"], strict=True):
        limit._elapsed_steps = elapsed
