"""What an episode is, told the slow way: one dict entry per time step and one loop iteration per index.

Nothing here is shared with the implementation: items lie in dicts by absolute time, an index is turned into
times by counting, and every answer is a list of items.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np

FILLER = object()


@dataclass(frozen=True)
class Token:
    """An item that is neither number nor string nor array."""

    number: int


@dataclass(frozen=True)
class Kind:
    """How the items of one column look: drawn at random, one-hot encoded, filled."""

    name: str
    space: gym.Space[Any] | None
    scalar: bool = False

    def draw(self, rng: np.random.Generator) -> Any:
        if self.name == "discrete":
            return int(rng.integers(2, 5))
        if self.name == "box":
            return rng.integers(-9, 9, 2).astype(np.float32)
        if self.name == "float":
            return float(rng.integers(-9, 9)) / 4
        if self.name == "dict":
            return {
                "b": rng.integers(-9, 9, 2).astype(np.float32),
                "a": (int(rng.integers(0, 3)), rng.integers(0, (2, 3)).astype(np.int64)),
            }
        if self.name == "text":
            return "x" * int(rng.integers(0, 5)) + str(rng.integers(9))
        if self.name == "object":
            return None if rng.integers(4) == 0 else Token(int(rng.integers(9)))
        raise AssertionError(self.name)

    def hot(self, item: Any) -> Any:
        if self.name == "discrete":
            return _hot(item - 2, 3)
        if self.name == "dict":
            flag, pair = item["a"]
            pair_hot = np.concatenate([_hot(int(pair[0]), 2), _hot(int(pair[1]), 3)])
            return {"b": item["b"], "a": (_hot(flag, 3), pair_hot)}
        return item

    def filler(self, fill: Any, hot: bool) -> Any:
        if self.name == "discrete":
            return np.full(3, fill, np.float32) if hot else np.full((), fill, np.int64)
        if self.name == "box":
            return np.full(2, fill, np.float32)
        if self.name == "float":
            return np.full((), fill, np.float64)
        if self.name == "dict":
            flag = np.full(3, fill, np.float32) if hot else np.full((), fill, np.int64)
            pair = np.full(5, fill, np.float32) if hot else np.full(2, fill, np.int64)
            return {"b": np.full(2, fill, np.float32), "a": (flag, pair)}
        raise AssertionError(self.name)


def _hot(value: int, n: int) -> np.ndarray:
    encoded = np.zeros(n, np.float32)
    encoded[value] = 1.0
    return encoded


DISCRETE = Kind("discrete", gym.spaces.Discrete(3, start=2))
BOX = Kind("box", gym.spaces.Box(-9, 9, (2,), np.float32))
DICT = Kind(
    "dict",
    gym.spaces.Dict(
        {
            "b": gym.spaces.Box(-9, 9, (2,), np.float32),
            "a": gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([2, 3])]),
        }
    ),
)
FLOAT = Kind("float", None)
VECTOR = Kind("box", None)
TEXT = Kind("text", None)
OBJECT = Kind("object", None)


@dataclass
class Column:
    """Items by absolute time, from ``first`` on, without gaps."""

    kind: Kind
    items: dict[int, Any] = field(default_factory=dict)

    def times(self) -> list[int]:
        return sorted(self.items)


@dataclass
class ReferenceEpisode:
    """The model: columns by absolute time, this chunk's first time, and how it ended."""

    observation_kind: Kind
    action_kind: Kind
    extra_kinds: dict[str, Kind]
    reward_kind: Kind = FLOAT
    t_started: int = 0
    t: int = 0
    first: int = 0
    terminated: bool = False
    truncated: bool = False
    is_reset: bool = False
    columns: dict[str, Column] = field(default_factory=dict)
    custom_data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.columns:
            self.columns = {
                "observations": Column(self.observation_kind),
                "infos": Column(Kind("info", None)),
                "actions": Column(self.action_kind),
                "rewards": Column(self.reward_kind),
                **{name: Column(kind) for name, kind in self.extra_kinds.items()},
            }

    # -- growing --

    def reset(self, observation: Any, info: dict[str, Any]) -> None:
        self.is_reset = True
        self.columns["observations"].items[self.t] = observation
        self.columns["infos"].items[self.t] = info

    def step(
        self, observation: Any, action: Any, reward: float, info: Any, extras: dict[str, Any], end: str
    ) -> None:
        self.columns["actions"].items[self.t] = action
        self.columns["rewards"].items[self.t] = reward
        for name, value in extras.items():
            self.columns[name].items[self.t] = value
        self.t += 1
        self.columns["observations"].items[self.t] = observation
        self.columns["infos"].items[self.t] = info
        self.terminated = end == "terminated"
        self.truncated = end == "truncated"

    # -- indices --

    def end(self, name: str) -> int:
        """One past the last time that the column has an item for (if it was ever reset)."""
        return self.t + 1 if name in ("observations", "infos") and self.is_reset else self.t

    def time_of(self, name: str, index: int, neg: bool) -> int:
        if index >= 0 or neg:
            return self.t_started + index
        return self.end(name) + index

    def wanted(self, name: str, indices: Any, neg: bool, fill: bool) -> list[int]:
        """The times that indices mean, existing or not."""
        if indices is None:
            return list(range(self.t_started, self.end(name)))
        if isinstance(indices, slice):
            return self._slice_times(name, indices, neg, fill)
        return [self.time_of(name, int(index), neg) for index in indices]

    def _slice_times(self, name: str, slice_: slice, neg: bool, fill: bool) -> list[int]:
        first, end = self.first, self.end(name)
        start = self.t_started if slice_.start is None else self.time_of(name, slice_.start, neg)
        stop = end if slice_.stop is None else self.time_of(name, slice_.stop, neg)
        step = 1 if slice_.step is None else slice_.step
        if not fill:
            # As in a list of all items: bounds outside of it are clipped to it first.
            start, stop = start - first, stop - first
            if step > 0:
                start, stop = max(start, 0), max(stop, 0)
            else:
                start, stop = min(start, end - first - 1), min(stop, end - first - 1)
            start, stop = start + first, stop + first
        if fill and ((start < first and stop < first) or (start >= end and stop >= end)):
            # Wholly outside: as many fillers as the bounds are apart, in either direction.
            count, covered = 0, 0
            while covered < abs(start - stop):
                count += 1
                covered += abs(step)
            return [first - 1] * count
        times = []
        time = start
        while (step > 0 and time < stop) or (step < 0 and time > stop):
            if fill or first <= time < end:
                times.append(time)
            time += step
        return times

    def exists(self, name: str, time: int) -> bool:
        return time in self.columns[name].items

    def get(self, name: str, indices: Any, neg: bool = False, fill: Any = None, hot: bool = False) -> Any:
        """A list of items (`FILLER` for what is not there), or one item for an int.

        Raises:
            IndexError: An int or an element of a list has no item and there is no fill.
        """
        column = self.columns[name]
        single = isinstance(indices, (int, np.integer))
        times = self.wanted(name, [indices] if single else indices, neg, fill is not None)
        found = []
        for time in times:
            if time in column.items:
                item = column.items[time]
                found.append(column.kind.hot(item) if hot else item)
            elif fill is None:
                raise IndexError(f"{name} has no item at time {time}")
            else:
                found.append(FILLER)
        return found[0] if single else found

    def set(self, name: str, new: list[Any], indices: Any, neg: bool) -> None:
        """Overwrite items; ``new`` has one item per wanted time.

        Raises:
            IndexError: A time without item, or another number of items.
        """
        single = isinstance(indices, (int, np.integer))
        times = self.wanted(name, [indices] if single else indices, neg, False)
        if len(times) != len(new) or any(not self.exists(name, time) for time in times):
            raise IndexError(f"{len(new)} items for {times}")
        for time, item in zip(times, new, strict=True):
            self.columns[name].items[time] = item

    # -- chunks --

    def chunk(self, begin: int, end: int, lookback: int) -> ReferenceEpisode:
        """Steps ``begin…end-1`` (absolute times) with ``lookback`` steps before them."""
        first = max(self.first, begin - lookback)
        columns = {}
        for name, column in self.columns.items():
            last = end if name in ("observations", "infos") and self.is_reset else end - 1
            columns[name] = Column(
                column.kind, {time: item for time, item in column.items.items() if first <= time <= last}
            )
        return ReferenceEpisode(
            self.observation_kind,
            self.action_kind,
            self.extra_kinds,
            self.reward_kind,
            begin,
            end,
            first,
            self.terminated and end == self.t,
            self.truncated and end == self.t,
            self.is_reset,
            columns,
            copy.deepcopy(self.custom_data),
        )

    def cut(self, lookback: int) -> ReferenceEpisode:
        return self.chunk(self.t, self.t, lookback)

    def slice(self, start: int | None, stop: int | None, lookback: int | None) -> ReferenceEpisode:
        steps = list(range(self.t_started, self.t))
        begin, end = _clip(start, 0, len(steps)), _clip(stop, len(steps), len(steps))
        if lookback is None:
            lookback = self.t_started - self.first
        part = self.chunk(self.t_started + begin, self.t_started + max(begin, end), lookback)
        if stop is not None and stop > len(steps):  # as in RLlib: only a stop at the very end keeps the flags
            part.terminated = part.truncated = False
        return part

    def concat(self, other: ReferenceEpisode) -> None:
        for name, column in other.columns.items():
            for time, item in column.items.items():
                if time >= other.t_started:
                    self.columns[name].items[time] = item
        self.t = other.t
        self.terminated, self.truncated = other.terminated, other.truncated
        self.custom_data.update(other.custom_data)

    def copy(self) -> ReferenceEpisode:
        columns = {
            name: Column(column.kind, {time: _copied(item) for time, item in column.items.items()})
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, custom_data=copy.deepcopy(self.custom_data))


def _copied(item: Any) -> Any:
    """Its own arrays, dicts and tuples (copy.deepcopy takes a third of all programs' time)."""
    if isinstance(item, dict):
        return {key: _copied(value) for key, value in item.items()}
    if isinstance(item, tuple):
        return tuple(map(_copied, item))
    return item.copy() if isinstance(item, np.ndarray) else copy.deepcopy(item)


def _clip(bound: int | None, default: int, size: int) -> int:
    if bound is None:
        return default
    if bound < 0:
        bound += size
    return min(max(bound, 0), size)
