"""Checks of a fragment before it is trained: finite values within their spaces, and a consistent structure.

The columns that a module adds to episodes are known from a trial step (`roles.learner_link`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import optree
from numpy.typing import NDArray

from rlzmq.episodes.bad_values import find_bad_values
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns, ragged_arange
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.fragment_message import decode_fragment

__all__ = ["BatchCheck", "decode_steps"]

# Leaf path → (shape of one step, kind of dtype).
_Form = dict[str, tuple[tuple[int, ...], str]]
_MAX_AGENTS = 10_000
_MAX_OTHERS = 100
# At most this many batches of another form in a row are refused before their form is adopted.
_NUM_PROVEN = 3


class BatchCheck:
    """Check that refuses batches which would spoil an update.

    Observations and actions must match the run's spaces, and the columns that a module adds its own outputs
    (`module_outputs`), whatever batches hold. The *form* of a batch is the name, shape per step and dtype kind of
    every column. Only batches can tell the form of columns that custom connector pieces or callbacks add: the
    expected form is that of the majority, or of the first batch in a tie; once trained, it is replaced only after
    several batches of another form. A form without a module's columns is given up for one with them, never the
    reverse. In multi-agent batches each agent has a form, and columns may be missing.

    Discrete values, also within Dict and Tuple spaces, index tables: a value outside of its Discrete, MultiDiscrete
    or MultiBinary space is refused. The spaces are the run's, not the batch's.

    Args:
        of_agents: Whether episodes have several agents; None: either.

    Attributes:
        num_replaced: How often the expected form was replaced; batches that passed before may not match it
            (`misfit`).
    """

    def __init__(self, *, of_agents: bool | None = None) -> None:
        self._of_agents = of_agents
        self._forms: OrderedDict[Any, _Known] = OrderedDict()
        self.num_replaced: int = 0
        self._actions: dict[Any, list[_Leaf]] = {}
        self._observations: dict[Any, list[_Leaf]] = {}
        self._outputs: dict[str, dict[str, _Form]] = {}

    def expect(
        self,
        action_spaces: Mapping[str, Any],
        observation_space: object = None,
        outputs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Set what columns are checked against.

        Args:
            action_spaces: Action space by module id.
            observation_space: Space of the stored observations (multi-agent: a Dict by agent id); None: unknown.
            outputs: By module id, the columns that the module adds, as trees of arrays ``[rows, ...]``; None:
                unknown.
        """
        self._outputs = {
            module_id: {name: _form_of({name: column}) for name, column in columns.items()}
            for module_id, columns in (outputs or {}).items()
        }
        self._actions = _leaves_by_id(action_spaces)
        by_agent = observation_space.spaces if isinstance(observation_space, gym.spaces.Dict) else {}
        self._observations = _leaves_by_id({**by_agent, None: observation_space})

    def check(self, batch: EpisodeBatch, source: object = None) -> None:
        """Check a batch.

        Args:
            batch: The EpisodeBatch.
            source: Id of its fragment; a repeated fragment is counted once.

        Raises:
            ValueError: It cannot be trained; the text names column, expected and actual.
        """
        if self._of_agents not in (None, batch.groups is not None):
            wanted, got = ("several agents", "one") if self._of_agents else ("one agent", "several")
            raise ValueError(f"expected episodes of {wanted}, got episodes of {got}")
        if (found := find_bad_values(batch)) is not None:
            raise ValueError(f"{found.values[0]}, which no loss can use")
        for part in batch.agent_batches:
            is_alone = part is batch
            module_ids = None if is_alone else part.module_ids
            agent_ids = None if is_alone else part.agent_ids
            _check_column(part, Columns.ACTIONS, self._actions, module_ids or [DEFAULT_MODULE_ID])
            _check_column(part, Columns.OBS, self._observations, agent_ids or [None])
            for module_id in sorted(set(module_ids or [DEFAULT_MODULE_ID])):
                _check_outputs(part, self._outputs.get(module_id, {}))
        for key, part in _parts(batch):
            form = _form_of(part.columns)
            is_whole = self._outputs.get(DEFAULT_MODULE_ID if key is None else key[0], {}).keys() <= {
                *part.columns
            }
            known = self._forms.get(key)
            if known is None:
                self._forms[key] = _Known(form, is_whole, first=source)
                if len(self._forms) > _MAX_AGENTS:
                    self._forms.popitem(last=False)
            elif not (misfit := _misfit(known.form, form, may_lack=key is not None)):
                known.count(source)
            elif known.gives_way_to(form, is_whole):
                self._forms[key] = _Known(form, is_whole, max(1, known.num_others[_key_of(form)]), source)
                self.num_replaced += 1
            else:
                raise ValueError(misfit)

    def misfit(self, batch: EpisodeBatch) -> str:
        """Return how a batch deviates from the expected form, or ""; the batch is not counted."""
        for key, part in _parts(batch):
            known = self._forms.get(key)
            if known is not None and (
                misfit := _misfit(known.form, _form_of(part.columns), may_lack=key is not None)
            ):
                return misfit
        return ""

    def trained(self) -> None:
        """Note that the checked batches were trained, which confirms the expected forms."""
        for known in self._forms.values():
            known.num = max(known.num, _NUM_PROVEN)
            known.num_others.clear()
            known._seen.clear()

    def forget(self) -> None:
        """Discard the expected forms after the modules changed."""
        self._forms.clear()


def decode_steps(
    frames: Sequence[Any],
    check: BatchCheck,
    fragment: FragmentId,
    first: int,
    num_steps: int,
) -> EpisodeBatch:
    """Decode and check some env steps of a fragment from a runner, which is not trusted.

    Args:
        frames: Frames of the fragment's message, or of the message of this range.
        check: The check to apply.
        fragment: Id of the fragment.
        first, num_steps: Range of env steps.

    Returns:
        A batch of these steps, in chunk order.

    Raises:
        ProtocolError: It cannot be decoded.
        ValueError: It does not pass the check, or does not have these steps.
    """
    header, arrays, _ = decode_fragment(frames)
    batch = EpisodeBatch.from_wire(header.batch, arrays)
    check.check(batch, fragment)
    # A message of this range alone, or of the whole fragment.
    begin = 0 if header.num_env_steps == num_steps else first
    last = begin + num_steps
    if last > batch.num_env_steps:
        raise ValueError(f"steps {begin}…{last} are wanted of a fragment of {batch.num_env_steps}")
    if (begin, last) != (0, batch.num_env_steps):
        batch = batch.slice_steps(begin, last)
    return batch


@dataclass(slots=True)
class _Known:
    """The expected form of batches.

    Attributes:
        is_whole: Whether it has all columns that the module adds.
        num: Number of batches of this form.
        first: The first fragment of this form.
        num_others: Number of batches of each other form since the last training.
    """

    form: _Form
    is_whole: bool
    num: int = 1
    first: Any = None
    num_others: Counter[Any] = field(default_factory=Counter)
    _seen: set[Any] = field(default_factory=set)

    def count(self, source: object) -> None:
        """Count a batch of this form."""
        if source is None or (source != self.first and source not in self._seen):
            self.num += 1
            if len(self._seen) < _MAX_OTHERS:
                self._seen.add(source)

    def gives_way_to(self, form: _Form, is_whole: bool) -> bool:
        """Count a batch of another form; return whether it becomes the expected form."""
        if is_whole != self.is_whole:
            return is_whole
        if len(self.num_others) < _MAX_OTHERS or _key_of(form) in self.num_others:
            self.num_others[_key_of(form)] += 1
        return self.num_others[_key_of(form)] > min(self.num, _NUM_PROVEN)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One leaf of a space at `path`; discrete values are within `low` and `high` (arrays of the space's shape)."""

    space: Any
    path: tuple[Any, ...]
    low: Any = None
    high: Any = None


def _leaves(space: gym.Space[Any], path: tuple[Any, ...] = ()) -> Iterator[_Leaf]:
    """Yield the leaves of known types; other spaces (custom ones, graphs, sequences) are skipped."""
    if isinstance(space, gym.spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(space, gym.spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _leaves(part, (*path, index))
    elif isinstance(space, gym.spaces.Discrete):
        yield _Leaf(space, path, int(space.start), int(space.start + space.n - 1))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        yield _Leaf(space, path, np.asarray(space.start), space.start + space.nvec - 1)
    elif isinstance(space, gym.spaces.MultiBinary):
        yield _Leaf(space, path, 0, 1)
    elif isinstance(space, gym.spaces.Box):
        yield _Leaf(space, path)


def _leaves_by_id(spaces: Mapping[Any, Any]) -> dict[Any, list[_Leaf]]:
    """Return the leaves of each space; equal spaces share one list, so that they are checked together."""
    seen: list[tuple[Any, list[_Leaf]]] = []
    by_id = {}
    for id_, space in spaces.items():
        leaves = next((known for other, known in seen if other == space), None)
        if leaves is None:
            leaves = list(_leaves(space))
            seen.append((space, leaves))
        by_id[id_] = leaves
    return by_id


def _check_column(part: EpisodeBatch, name: str, expected: Mapping[Any, list[_Leaf]], ids: list[Any]) -> None:
    """Raise ValueError if a column of an EpisodeBatch, lookback included, has values outside of its space."""
    num_more = int(name == Columns.OBS)  # the observation after the last step
    for leaves in {id(expected[id_]): expected[id_] for id_ in set(ids) if expected.get(id_)}.values():
        mine = [expected.get(id_) is leaves for id_ in ids]
        chosen = slice(None) if all(mine) else np.array(mine)
        start, lookback, length = part.start[chosen], part.lookback[chosen], part.length[chosen]
        slots = ragged_arange(start - lookback, lookback + length + num_more)
        for leaf in leaves if len(slots) else ():
            _check_leaf(_leaf_at(part.columns.get(name), leaf.path), leaf, name, slots)


def _check_leaf(column: NDArray[Any] | None, leaf: _Leaf, name: str, slots: NDArray[np.int64]) -> None:
    where = f"column {name!r}{''.join(f'[{key!r}]' for key in leaf.path)}"
    if column is None or column.dtype.kind not in "biuf":
        got = "none" if column is None else str(column.dtype)
        raise ValueError(f"{where}: expected numbers of {leaf.space}, got {got}")
    shape, expected = column.shape[1:], leaf.space.shape
    if shape != expected and (name == Columns.OBS or math.prod(shape) != math.prod(expected)):
        raise ValueError(f"{where}: expected shape {expected} per step of {leaf.space}, got {shape}")
    if leaf.low is None:
        return
    values = column[slots].reshape(len(slots), *expected)
    is_bad = (values < leaf.low) | (values > leaf.high)
    if is_bad.any():
        raise ValueError(f"{where}: expected values of {leaf.space}, got {values[is_bad][0]}")


def _leaf_at(column: object, path: tuple[Any, ...]) -> Any:
    """Return the array at this path of a column, or None if the column has another structure."""
    for key in path:
        if isinstance(column, dict):
            column = column.get(key)
        elif isinstance(column, tuple) and type(key) is int and key < len(column):
            column = column[key]
        else:
            return None
    return column if isinstance(column, np.ndarray) else None


def _parts(batch: EpisodeBatch) -> Iterator[tuple[Any, Any]]:
    """Yield (key of the form, part); the key of a single-agent batch is None."""
    if batch.groups is None:
        yield None, batch
        return
    for part in batch.agent_batches:
        for key in sorted(set(zip(part.module_ids or (), map(str, part.agent_ids or ()), strict=False))):
            yield key, part


def _check_outputs(part: EpisodeBatch, outputs: Mapping[str, _Form]) -> None:
    """Raise ValueError if a column that the module adds is there in another form; it may be missing."""
    for name, form in outputs.items():
        if name in part.columns and (
            misfit := _misfit(form, _form_of({name: part.columns[name]}), may_lack=False)
        ):
            raise ValueError(f"{misfit}; the module's own outputs define it")


def _form_of(columns: Any) -> _Form:
    paths, leaves, _ = optree.tree_flatten_with_path(columns)
    return {
        "/".join(map(str, path)): (leaf.shape[1:], leaf.dtype.kind)
        for path, leaf in zip(paths, leaves, strict=True)
    }


def _key_of(form: _Form) -> frozenset[Any]:
    return frozenset(form.items())


def _misfit(expected: _Form, actual: _Form, *, may_lack: bool) -> str:
    """Return a description of the first deviation, or ""."""
    if not may_lack and expected.keys() != actual.keys():
        return f"expected the columns {sorted(expected)}, got {sorted(actual)}"
    for name in expected.keys() & actual.keys():
        if expected[name] != actual[name]:
            (shape, kind), (got_shape, got_kind) = expected[name], actual[name]
            return (
                f"column {name!r}: expected shape {shape} per step and dtype kind {kind!r}, "
                f"got {got_shape} and {got_kind!r}"
            )
    return ""
