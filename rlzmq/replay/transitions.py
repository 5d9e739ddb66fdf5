"""Transitions: transitions drawn from a StepStore, as rows of a train batch or as episodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_rows
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.replay.step_store import STEP_COLUMNS, StepStore

__all__ = ["Transitions", "of_items"]

IntArray = NDArray[np.int64]


class _Drawn(NamedTuple):
    store: StepStore
    starts: IntArray
    last: IntArray
    values: dict[str, NDArray[Any]]
    first_item: int
    part_of: _Whole | None


class _Whole(NamedTuple):
    """The transitions that a part was drawn with, its place among them, and their rows until the last part's turn."""

    drawn: Transitions
    place: slice
    rows: dict[bool, dict[str, Any]]


class Transitions(EpisodeBatch):
    """Transitions, which become an EpisodeBatch of chunks of one step each when its columns or table are first read.

    A learner with default connector pieces reads only `rows`. Until the transitions are an EpisodeBatch, the store must
    not change.

    Args:
        store: The store.
        starts: int64 [K], slots of the observations o_t.
        last: int64 [K], slot of the last step in each sum of rewards.
        values: Columns [K] that the store does not hold: ``rewards`` (the sums), ``weights``, ``replay_key`` and, if
            it was asked for, ``n_step``.
        first_item: Number of the first item among all sampled ones, from which the episodes' ids follow.
    """

    __slots__ = ()

    def __init__(
        self,
        store: StepStore,
        starts: IntArray,
        last: IntArray,
        values: dict[str, NDArray[Any]],
        *,
        first_item: int,
    ) -> None:
        self._source = _Drawn(store, starts, last, values, first_item, None)

    def parts(self, num: int) -> list[Transitions]:
        """Return them in parts of `num` transitions each, whose rows are read from the store at once."""
        store, starts, last, values, first_item, *_ = self._source
        parts: list[Transitions] = []
        rows: dict[bool, dict[str, Any]] = {}
        for first in range(0, len(starts), num):
            place = slice(first, first + num)
            part = Transitions.__new__(Transitions)
            own = {name: value[place] for name, value in values.items()}
            part._source = _Drawn(
                store, starts[place], last[place], own, first_item + first, _Whole(self, place, rows)
            )
            parts.append(part)
        return parts

    def __getattr__(self, name: str) -> Any:
        """Become an EpisodeBatch, since one of its attributes is read."""
        slots = self.slots()
        store, starts, last, values, first_item, *_ = self._source
        columns: dict[str, Any] = {key: of_rows.repeat(2) for key, of_rows in values.items()}
        for key, column in store.columns.items():
            if key in STEP_COLUMNS and key not in columns:
                columns[key] = tree_rows(column, slots)
        self.__class__ = EpisodeBatch  # type: ignore[assignment]
        EpisodeBatch.__init__(
            self,
            columns,
            start=np.arange(0, 2 * len(starts), 2),
            length=np.ones(len(starts), np.int64),
            **of_items(store, starts, last, first_item),
        )
        return getattr(self, name)

    @property
    def num_rows(self) -> int:
        """Number of transitions."""
        return len(self._source.starts)

    def slots(self) -> IntArray:
        """Return the store's slots of each transition's two observations, int64 [2 K]."""
        store, starts, last, *_ = self._source
        slots = np.empty(2 * len(starts), np.int64)
        slots[::2], slots[1::2] = starts, store.next[last]
        return slots

    def rows(self, *, next_observations: bool) -> dict[str, Any]:
        """Return the columns of a train batch, trees of arrays ``[K, ...]``.

        Args:
            next_observations: Whether to include ``new_obs``.
        """
        store, starts, last, values, _, part_of = self._source
        if part_of is not None:
            whole, place, known = part_of
            if next_observations not in known:
                known[next_observations] = whole.rows(next_observations=next_observations)
            shared = known[next_observations]
            if place.stop >= whole.num_rows:
                known.clear()
            return {name: tree_rows(column, place) for name, column in shared.items()}
        obs = store.columns[Columns.OBS]
        rows = {
            **values,
            Columns.OBS: tree_rows(obs, starts),
            Columns.ACTIONS: tree_rows(store.columns[Columns.ACTIONS], starts),
            Columns.TERMINATEDS: store.terminated[last],
            Columns.TRUNCATEDS: store.truncated[last],
        }
        if next_observations:
            rows[Columns.NEXT_OBS] = tree_rows(obs, store.next[last])
        return rows


def of_items(store: StepStore, starts: IntArray, last: IntArray, first_item: int) -> dict[str, Any]:
    """Return the arguments of an EpisodeBatch of drawn items that follow from the store.

    Args:
        store: The store.
        starts: int64 [K], slots of the items' first observations.
        last: int64 [K], slots of their last steps.
        first_item: Number of the first item among all sampled ones, from which the episodes' ids follow.
    """
    return {
        "t_started": store.t[starts],
        "terminated": store.terminated[last],
        "truncated": store.truncated[last],
        "episode_ids": [f"replay-{i}" for i in range(first_item, first_item + len(starts))],
        "observation_space": store.observation_space,
        "action_space": store.action_space,
    }
