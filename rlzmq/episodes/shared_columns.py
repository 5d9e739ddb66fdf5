"""Episodes on a batch's columns. Their parts are created on access, and changes to them are detected."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.episodes.batch_columns import AGENT_LISTS, TABLE, BatchColumns
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_columns import REWARD_SPACE, InfosBuffer
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = [
    "SharedColumns",
    "are_same",
    "is_changed",
    "new_episode",
    "unread_infos",
]

_NO_AGENT = (None,) * len(AGENT_LISTS)
# One chunk's values of `columns.TABLE`.
Row = tuple[int, int, int, int, bool, bool, int]


class SharedColumns:
    """The data that a batch's episodes are views of, without the batch (which refers to its episodes).

    An episode gets its ids, time steps and done flags at once, and each other attribute at its first use
    (`SingleAgentEpisode.__getattr__`).
    """

    __slots__ = (
        "_action_space",
        "_agents",
        "_columns",
        "_custom_data",
        "_duration_s",
        "_extra_names",
        "_infos",
        "_initial_state",
        "_observation_space",
        "episode_ids",
    )

    def __init__(self, batch: BatchColumns) -> None:
        self._columns = dict(batch.columns)
        self._extra_names = batch.extra_names
        self._infos = batch.infos
        self._initial_state = batch.initial_state
        self._custom_data = batch.custom_data
        self._duration_s = batch.duration_s
        self._observation_space = batch.observation_space
        self._action_space = batch.action_space
        lists = [getattr(batch, name) for name in AGENT_LISTS]
        self._agents = None if lists.count(None) == len(lists) else lists
        self.episode_ids: list[str] = batch.episode_ids

    def episode(self, position: int, row: Row) -> SingleAgentEpisode:
        """Return a chunk as an episode."""
        episode = SingleAgentEpisode.__new__(SingleAgentEpisode)
        _, length, _, t_started, episode.is_terminated, episode.is_truncated, _ = row
        episode.id_ = self.episode_ids[position]
        episode.t_started = t_started
        episode.t = t_started + length
        episode._belongs_to(self._ids(position))
        episode._source = (self, position, row)
        episode._created = {}
        return episode

    def _ids(self, position: int) -> tuple[Any, ...]:
        """Return a chunk's values of `AGENT_LISTS`."""
        if self._agents is None:
            return _NO_AGENT
        return tuple([None if ids is None else ids[position] for ids in self._agents])

    def create(self, episode: SingleAgentEpisode, name: str) -> Any:
        """Create the attribute ``name`` of an episode. Buffers are views of the columns.

        Raises:
            AttributeError: Episodes have no such attribute.
        """
        _, position, row = episode._source
        value: Any
        created: Any
        match name:
            case "observations":
                value = created = self._view(Columns.OBS, row, 1, self._observation_space)
            case "actions":
                value = created = self._view(Columns.ACTIONS, row, 0, self._action_space)
            case "rewards":
                value = created = self._view(Columns.REWARDS, row, 0, REWARD_SPACE)
            case "extra_model_outputs":
                created = {extra: self._view(extra, row, 0, None) for extra in self._extra_names}
                value = dict(created)
            case "initial_state":
                state = self._initial_state
                value = None if state is None else tree_map(lambda leaf: leaf[position], state)
                created = [value, *tree_leaves(value)]
            case _:
                value, created = self._fact(name, position, row), None
        if created is not None:
            episode._created[name] = created
        setattr(episode, name, value)
        return value

    def _fact(self, name: str, position: int, row: Row) -> Any:
        match name:
            case "custom_data":
                return dict(self._custom_data.get(position, ()))
            case "infos":
                return InfosBuffer._of_list(self._dense_infos(row), row[2], None)
            case "_observation_space":
                return self._observation_space
            case "_action_space":
                return self._action_space
            case "_duration_s":
                return 0.0 if self._duration_s is None else float(self._duration_s[position])
            case "_last_step_time":
                return None
        raise AttributeError(f"'SingleAgentEpisode' object has no attribute {name!r}")

    def _view(self, name: str, row: Row, further: int, space: Any) -> InfiniteLookbackBuffer:
        start, length, lookback, *_ = row
        first, num, column = start - lookback, lookback + length + further, self._columns[name]
        end = first + num
        if isinstance(column, np.ndarray):
            arrays = column[first:end]
        else:
            arrays = tree_map(lambda leaf: leaf[first:end], column)
        return InfiniteLookbackBuffer._of_view(arrays, num, lookback, space)

    def _dense_infos(self, row: Row) -> list[Any]:
        sparse = self._infos
        slots = range(row[0] - row[2], row[0] + row[1] + 1)
        return [sparse.get(slot, {}) for slot in slots] if sparse else [{} for _ in slots]

    def sparse_infos(self, row: Row) -> dict[int, dict[str, Any]]:
        """Return the non-empty infos of a chunk by position, counted from the first one including the lookback part."""
        begin, end = row[0] - row[2], row[0] + row[1] + 1
        return {slot - begin: self._infos[slot] for slot in self._infos if begin <= slot < end}

    def differs(self, episode: SingleAgentEpisode, position: int, row: Row) -> bool:
        """Return whether an episode created here has changed."""
        _, length, lookback, t_started, terminated, truncated, _ = row
        facts = (self.episode_ids[position], *self._ids(position), t_started, t_started + length)
        if (terminated, truncated) != (episode.is_terminated, episode.is_truncated) or facts != (
            episode.id_,
            *episode._ids(),
            episode.t_started,
            episode.t,
        ):
            return True
        read = _values(episode)
        created = episode._created
        for name in ("observations", "actions", "rewards"):
            if name in read and (
                read[name] is not created.get(name)
                or not _is_view(read[name], lookback, length + (name == "observations"))
            ):
                return True
        if "extra_model_outputs" in read:
            extras, created_extras = read["extra_model_outputs"], created.get("extra_model_outputs", {})
            if extras.keys() != created_extras.keys() or any(
                buffer is not created_extras[name] or not _is_view(buffer, lookback, length)
                for name, buffer in extras.items()
            ):
                return True
        if "initial_state" in read:
            state = read["initial_state"]
            if not are_same([state, *tree_leaves(state)], created.get("initial_state", [None])):
                return True
        if "custom_data" in read:
            before = self._custom_data.get(position, {})
            if not are_same(
                [*read["custom_data"], *read["custom_data"].values()], [*before, *before.values()]
            ):
                return True
        if "infos" not in read:
            return False
        infos, infos_before = read["infos"].data, self._dense_infos(row)
        return len(infos) != len(infos_before) or any(
            info is not old and bool(info or old) for info, old in zip(infos, infos_before, strict=True)
        )


_PARTS = (
    "observations",
    "actions",
    "rewards",
    "extra_model_outputs",
    "initial_state",
    "custom_data",
    "infos",
)
_SLOTS: dict[str, Any] = {name: getattr(SingleAgentEpisode, name) for name in _PARTS}


def _values(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Return the parts of an episode that have been read or set."""
    values = {}
    for name, slot in _SLOTS.items():
        try:
            values[name] = slot.__get__(episode)
        except AttributeError:
            continue
    return values


def is_changed(episode: SingleAgentEpisode) -> bool:
    """Return whether an item of an `EpisodeBatch` differs from the batch's columns and tables."""
    shared, position, row = episode._source
    return shared.differs(episode, position, row)


def unread_infos(episode: SingleAgentEpisode) -> dict[int, dict[str, Any]] | None:
    """Return an episode's non-empty infos by position if they are still the batch's, otherwise None."""
    try:
        _SLOTS["infos"].__get__(episode)
    except AttributeError:
        shared, _, row = episode._source
        return shared.sparse_infos(row)
    return None


def new_episode(batch: BatchColumns, position: int) -> SingleAgentEpisode:
    """Return a chunk of a batch of one agent as an episode."""
    row: Any = tuple(getattr(batch, name).item(position) for name in TABLE)
    return SharedColumns(batch).episode(position, row)


def _is_view(buffer: InfiniteLookbackBuffer, lookback: int, num: int) -> bool:
    """Return whether a buffer is still a view: it owns nothing and has as many items as at its creation."""
    return (
        not buffer._owned
        and buffer._items is None
        and buffer.lookback == lookback
        and buffer._num == lookback + num
    )


def are_same(left: list[Any], right: list[Any]) -> bool:
    """Return whether two lists have the same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))
