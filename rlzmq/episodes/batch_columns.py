"""BatchColumns: the columns and the chunk table of an `EpisodeBatch`; choosing, cutting and joining chunks of them."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

import gymnasium as gym
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlzmq.core.tree import tree_flatten, tree_leaves, tree_map, tree_rows, value_kind
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_columns import REWARD_SPACE, InfosBuffer
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = [
    "AGENT_LISTS",
    "ID_LISTS",
    "TABLE",
    "BatchColumns",
    "IntArray",
    "Row",
    "chosen_positions",
    "common_space",
    "concatenated",
    "ragged_arange",
    "steps_window",
]

IntArray = NDArray[np.int64]
# One chunk's values of `TABLE`.
Row = tuple[int, int, int, int, bool, bool, int]

# The parts of the chunk table: arrays [C], and lists of C ids (or None). Without its last letter, a name
# of AGENT_LISTS is the attribute of an episode.
TABLE = ("start", "length", "lookback", "t_started", "terminated", "truncated", "env_index")
AGENT_LISTS = ("agent_ids", "module_ids")
ID_LISTS = ("episode_ids", *AGENT_LISTS)
# All that there is per chunk: arrays (or None), lists (or None), and dicts of what most chunks lack.
_ARRAYS = (*TABLE, "duration_s", "episode", "order")
_OF_CHUNKS = (*_ARRAYS, *ID_LISTS, "custom_data", "leftovers")

_BASE_COLUMNS = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)


class BatchColumns(list[Any]):
    """Data of an `EpisodeBatch`, whose docstring documents the arguments."""

    __slots__ = (
        "_made",
        "action_space",
        "agent_ids",
        "agent_to_module_mapping_fn",
        "columns",
        "custom_data",
        "duration_s",
        "env_index",
        "env_ts",
        "episode",
        "episode_ids",
        "groups",
        "infos",
        "initial_state",
        "leftovers",
        "length",
        "lookback",
        "meta",
        "module_ids",
        "observation_space",
        "order",
        "start",
        "t_started",
        "terminated",
        "truncated",
    )

    _made: list[Any] | None  # the chunks as episodes, once one was asked for

    def __init__(
        self,
        columns: dict[str, Any],
        *,
        length: ArrayLike,
        start: ArrayLike | None = None,
        lookback: ArrayLike | None = None,
        t_started: ArrayLike | None = None,
        terminated: ArrayLike | None = None,
        truncated: ArrayLike | None = None,
        env_index: ArrayLike | None = None,
        episode_ids: list[str] | None = None,
        agent_ids: list[Any] | None = None,
        module_ids: list[Any] | None = None,
        initial_state: object = None,
        infos: dict[int, dict[str, Any]] | None = None,
        custom_data: dict[int, dict[str, Any]] | None = None,
        duration_s: ArrayLike | None = None,
        observation_space: object = None,
        action_space: object = None,
        meta: dict[str, Any] | None = None,
        groups: list[Any] | None = None,
        episode: ArrayLike | None = None,
        order: ArrayLike | None = None,
        env_ts: ArrayLike | None = None,
        leftovers: dict[int, dict[str, Any]] | None = None,
        agent_to_module_mapping_fn: Callable[..., str] | None = None,
    ) -> None:
        self.columns: dict[str, Any] = columns
        self.length: IntArray = np.asarray(length, np.int64)
        num_chunks = len(self.length)
        # No loop or function, since a replay algorithm makes a batch for every env step.
        num, ints, bools = num_chunks, np.int64, np.bool_
        self.start: IntArray = np.zeros(num, ints) if start is None else np.asarray(start, ints)
        self.lookback: IntArray = np.zeros(num, ints) if lookback is None else np.asarray(lookback, ints)
        self.t_started: IntArray = np.zeros(num, ints) if t_started is None else np.asarray(t_started, ints)
        self.terminated: NDArray[np.bool_] = (
            np.zeros(num, bools) if terminated is None else np.asarray(terminated, bools)
        )
        self.truncated: NDArray[np.bool_] = (
            np.zeros(num, bools) if truncated is None else np.asarray(truncated, bools)
        )
        self.env_index: IntArray = np.full(num, -1) if env_index is None else np.asarray(env_index, ints)
        self.duration_s: NDArray[np.float64] | None = (
            None if duration_s is None else np.asarray(duration_s, np.float64)
        )
        self.episode_ids: list[str] = (
            [uuid.uuid4().hex for _ in range(num_chunks)] if episode_ids is None else episode_ids
        )
        self.agent_ids: list[Any] | None = agent_ids
        self.module_ids: list[Any] | None = module_ids
        self.initial_state: Any = initial_state
        self.infos: dict[int, dict[str, Any]] = {} if infos is None else infos
        self.custom_data: dict[int, dict[str, Any]] = {} if custom_data is None else custom_data
        self.observation_space: Any = observation_space
        self.action_space: Any = action_space
        self.meta: dict[str, Any] = {} if meta is None else meta
        self.groups: list[Any] | None = groups
        self.episode: IntArray | None = None if episode is None else np.asarray(episode, np.int64)
        self.order: IntArray | None = None if order is None else np.asarray(order, np.int64)
        self.env_ts: IntArray | None = None if env_ts is None else np.asarray(env_ts, np.int64)
        self.leftovers: dict[int, dict[str, Any]] = {} if leftovers is None else leftovers
        self.agent_to_module_mapping_fn: Callable[..., Any] | None = agent_to_module_mapping_fn
        self._made = None
        for name in (*_ARRAYS, *ID_LISTS):
            values = getattr(self, name)
            if values is not None and len(values) != num_chunks:
                raise ValueError(
                    f"EpisodeBatch.{name}: expected {num_chunks} values, one per chunk, got {len(values)}."
                )

    # -- facts ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.start) if self._made is None else list.__len__(self)

    @property
    def agent_batches(self) -> list[Any]:
        """The batches with columns: this one or, of several agents, its groups."""
        return [self] if self.groups is None else self.groups

    @property
    def links(self) -> tuple[IntArray, IntArray, IntArray]:
        """A group's `episode`, `order` and `env_ts`."""
        if self.episode is None or self.order is None or self.env_ts is None:
            raise ValueError("expected a group of agents' chunks, got a batch of whole episodes.")
        return self.episode, self.order, self.env_ts

    @property
    def num_slots(self) -> int:
        """First dimension of all columns."""
        leaves = tree_leaves(self.columns.get(Columns.OBS, ()))
        return len(leaves[0]) if leaves else 0

    @property
    def num_bytes(self) -> int:
        """Size of all columns in bytes."""
        return sum(leaf.nbytes for batch in self.agent_batches for leaf in tree_leaves(batch.columns))

    @property
    def extra_names(self) -> list[str]:
        """Names of the extra model outputs among the columns."""
        return [name for name in self.columns if name not in _BASE_COLUMNS]

    def get_module_ids(self) -> list[str]:
        """Return the ids of the modules with steps in this batch, sorted."""
        return sorted(self.agent_steps_by("module_ids"))

    def is_of(self, module_id: str) -> NDArray[np.bool_]:
        """Return which chunks belong to a module's agents, bool [C]; without module ids, to the default module's."""
        ids = self.module_ids
        if ids is None:
            return np.full(len(self), module_id == DEFAULT_MODULE_ID)
        return np.array([own == module_id for own in ids], np.bool_)

    def agent_steps_by(self, which: str) -> dict[Any, int]:
        """Return completed steps by agent id (``which="agent_ids"``) or module id (``"module_ids"``)."""
        counts: dict[Any, int] = {}
        for batch in self.agent_batches:
            keys = getattr(batch, which)
            if keys is None:
                keys = [DEFAULT_MODULE_ID if which == "module_ids" else None] * len(batch)
            for key, num in zip(keys, batch.length.tolist(), strict=True):
                if num:
                    counts[key] = counts.get(key, 0) + num
        return counts

    def agent_counts(self) -> dict[str, Any]:
        """Return several agents' completed steps by agent and by module; {} of one agent's episodes."""
        if self.groups is None:
            return {}
        return {
            "agent_steps": self.agent_steps_by("agent_ids"),
            "module_steps": self.agent_steps_by("module_ids"),
        }

    def owners(self) -> tuple[list[Any], list[Any]]:
        """Return module id and agent id of each chunk; of one agent's episodes, the default module's id and None."""
        num = len(self)
        if self.episode is None:
            return [DEFAULT_MODULE_ID] * num, [None] * num
        return self.module_ids or [DEFAULT_MODULE_ID] * num, self.agent_ids or [None] * num

    def step_slots(self) -> np.ndarray:
        """Return the slot of every step, one chunk after the other, int64 [num_env_steps]."""
        return ragged_arange(self.start, self.length)

    def step_chunks(self) -> np.ndarray:
        """Return the chunk of every step in the order of `step_slots`, int64 [num_env_steps]."""
        return np.arange(len(self.start), dtype=np.int64).repeat(self.length)

    def part_of(self, position: int, row: Row, name: str) -> Any:
        """Return the attribute ``name`` of a chunk's SingleAgentEpisode. Buffers are views of the columns.

        Raises:
            AttributeError: Episodes have no such attribute.
        """
        match name:
            case "observations":
                return self._view(Columns.OBS, row, 1, self.observation_space)
            case "actions":
                return self._view(Columns.ACTIONS, row, 0, self.action_space)
            case "rewards":
                return self._view(Columns.REWARDS, row, 0, REWARD_SPACE)
            case "extra_model_outputs":
                return {extra: self._view(extra, row, 0, None) for extra in self.extra_names}
            case "initial_state":
                return None if self.initial_state is None else tree_rows(self.initial_state, position)
            case "custom_data":
                return dict(self.custom_data.get(position, ()))
            case "infos":
                slots, infos = range(row[0] - row[2], row[0] + row[1] + 1), self.infos
                dense = [infos.get(slot, {}) for slot in slots] if infos else [{} for _ in slots]
                return InfosBuffer._of_list(dense, row[2], None)
            case "_observation_space":
                return self.observation_space
            case "_action_space":
                return self.action_space
            case "_duration_s":
                return 0.0 if self.duration_s is None else float(self.duration_s[position])
            case "_last_step_time":
                return None
        raise AttributeError(f"'SingleAgentEpisode' object has no attribute {name!r}")

    def _view(self, name: str, row: Row, further: int, space: Any) -> InfiniteLookbackBuffer:
        start, length, lookback, *_ = row
        arrays = tree_rows(self.columns[name], slice(start - lookback, start + length + further))
        return InfiniteLookbackBuffer._of_view(arrays, lookback + length + further, lookback, space)

    # -- some of the chunks -----------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return dict(zip(_FIELDS, _fields_of(self), strict=True))

    def take(self, chunks: IntArray, groups: list[Self] | None = None) -> Self:
        """Return the chunks at these positions, on the same columns; `groups` are their agents' chunks."""
        listed, fields = chunks.tolist(), self._fields()
        for name in _OF_CHUNKS:
            values = fields[name]
            if isinstance(values, np.ndarray):
                fields[name] = values[chunks]
            elif isinstance(values, list):
                fields[name] = list(map(values.__getitem__, listed))
            elif values is not None:
                fields[name] = {i: values[c] for i, c in enumerate(listed) if c in values} if values else {}
        if self.initial_state is not None:
            fields["initial_state"] = tree_rows(self.initial_state, chunks)
        return type(self)(**{**fields, "groups": groups})

    def take_episodes(self, chunks: IntArray) -> Self:
        """Return the chunks at these positions, with their agents' chunks."""
        if self.groups is None:
            return self.take(chunks)
        groups = [group._of_episodes(chunks, len(self)) for group in self.groups]
        return self.take(chunks, [group for group in groups if len(group)])

    def _of_episodes(self, episodes: IntArray, num_episodes: int) -> Self:
        """Return a group's chunks of some of the episodes, whose positions in `episodes` are their new indices."""
        episode = self.links[0]
        counts = np.bincount(episode, minlength=num_episodes)
        offsets = np.cumsum(counts) - counts
        by_episode = np.argsort(episode, kind="stable")
        chunks = by_episode[ragged_arange(offsets[episodes], counts[episodes])]
        order = np.argsort(chunks, kind="stable")
        part = self.take(chunks[order])
        part.episode = np.repeat(np.arange(len(episodes)), counts[episodes])[order]
        return part

    def take_steps(self, begin: int, end: int) -> Self:
        """Return the env steps ``begin…end-1``; see `EpisodeBatch.slice_steps`."""
        if self.groups is not None:
            return self._slice_env_steps(begin, end)
        first, stop, front, back = steps_window(self.length, begin, end)
        part = self.take(np.arange(first, stop))
        if front or back:
            num_before = np.zeros(len(part), np.int64)
            num_before[:1] = front
            num_within = part.length - num_before
            num_within[-1:] -= back
            part._trim(num_before, num_within)
        return part

    def _trim(self, num_before: IntArray, num_within: IntArray) -> None:
        """Make steps at each chunk's start lookback, keep the next ones, and drop the rest."""
        is_cut: NDArray[np.bool_] = num_before + num_within < self.length
        starts_later = num_before > 0
        if self.duration_s is not None:
            self.duration_s = self.duration_s * (num_within / np.maximum(self.length, 1))
        self.start = self.start + num_before
        self.lookback = self.lookback + num_before
        self.t_started = self.t_started + num_before
        self.length = num_within.astype(np.int64)
        self.terminated = self.terminated & ~is_cut
        self.truncated = self.truncated & ~is_cut
        if self.initial_state is not None and starts_later.any() and Columns.STATE_OUT in self.columns:
            slots = self.start[starts_later] - 1

            def take_over(states: NDArray[Any], state_out: NDArray[Any]) -> None:
                states[starts_later] = state_out[slots]

            tree_map(take_over, self.initial_state, self.columns[Columns.STATE_OUT])
        for c, left in list(self.leftovers.items()) if self.episode is not None else ():
            gone = {"reward_before_start"} if starts_later[c] else set()
            if is_cut[c]:
                gone = left.keys() - {"output_keys"}
            self.leftovers[c] = {name: value for name, value in left.items() if name not in gone}

    def _slice_env_steps(self, begin: int, end: int) -> Self:
        """Return a slice of episodes of several agents; see `slice_steps`."""
        if begin == end:
            return self.take(np.empty(0, np.int64), [])
        length, ends = self.length, np.cumsum(self.length)
        first_t = self.t_started + np.clip(begin - (ends - length), 0, length)
        last_t = self.t_started + np.clip(end - (ends - length), 0, length)
        kept = np.flatnonzero((last_t > first_t) | ((length == 0) & (ends >= begin) & (ends < end)))
        new_index = np.full(len(self), -1, np.int64)
        new_index[kept] = np.arange(len(kept))
        is_whole = (first_t == self.t_started) & (last_t == self.t_started + length)
        parts = [group._between(first_t, last_t, is_whole, new_index) for group in self.groups or ()]
        part = self.take(kept, [group for group, _ in parts if len(group)])
        for e, left in list(part.leftovers.items()):
            if "departed" in left:  # omit agents that joined and left after the part's end
                end_t = last_t[kept[e]]
                known = {agent_id: gone for agent_id, gone in left["departed"].items() if gone[2] <= end_t}
                part.leftovers[e] = {**left, "departed": known}
        for e, agent_id, gone in (gone for _, departed in parts for gone in departed):
            left = part.leftovers.get(e, {})
            part.leftovers[e] = {**left, "departed": {**left.get("departed", {}), agent_id: gone}}
        part._trim(first_t[kept] - part.t_started, last_t[kept] - first_t[kept])
        part.start = np.zeros(len(part), np.int64)
        return part

    def _between(
        self, first_t: IntArray, last_t: IntArray, is_whole: NDArray[np.bool_], new_index: IntArray
    ) -> tuple[Self, list[tuple[int, Any, tuple[bool, bool, int]]]]:
        """Return a group's steps that are completed in env steps ``(first_t, last_t]`` of their episodes.

        Args:
            first_t, last_t: int64[E], bounds by episode.
            is_whole: bool[E], whether the bounds are the episode's own; agents without a step are then kept, too.
            new_index: int64[E], the new index of each episode; -1: left out.

        Returns:
            The chunks, and (new episode, agent id, (terminated, truncated, env step)) for the agents that are done by
            the part's end, which a part without the agent's chunk needs.
        """
        episode, _, env_ts = self.links
        counts = self.length + 1
        chunk_of = np.repeat(np.arange(len(counts)), counts)
        slots = ragged_arange(self.start, counts)
        times, episode_of = env_ts[slots], episode[chunk_of]
        own = slots > self.start[chunk_of]  # the observations after the chunks' own steps
        before = own & (times <= first_t[episode_of])
        within = own & ~before & (times <= last_t[episode_of])
        num_before = np.bincount(chunk_of[before], minlength=len(counts))
        num_within = np.bincount(chunk_of[within], minlength=len(counts))
        is_there = new_index[episode] >= 0
        is_kept = is_there & ((num_within > 0) | is_whole[episode])
        departed = self._departed(np.flatnonzero(is_there & ~is_kept), last_t, new_index)
        chunks = np.flatnonzero(is_kept)
        part = self.take(chunks)
        part.episode = new_index[episode[chunks]]
        part._trim(num_before[chunks], num_within[chunks])
        return part, departed

    def _departed(
        self, chunks: IntArray, last_t: IntArray, new_index: IntArray
    ) -> list[tuple[int, Any, tuple[bool, bool, int]]]:
        """Return those of the chunks' agents that are done by ``last_t`` of their episode; see `_between`."""
        episode, _, env_ts = self.links
        departed = []
        last_seen = env_ts[self.start + self.length]
        for c in chunks[self.terminated[chunks] | self.truncated[chunks]].tolist():
            e = int(episode[c])
            done_env_t = int(self.leftovers.get(c, {}).get("done_env_t", last_seen[c]))
            if done_env_t <= last_t[e]:
                agent_id = None if self.agent_ids is None else self.agent_ids[c]
                gone = bool(self.terminated[c]), bool(self.truncated[c]), done_env_t
                departed.append((int(new_index[e]), agent_id, gone))
        return departed

    # -- new columns ------------------------------------------------------------------------------------

    @classmethod
    def concatenated(cls, batches: list[Self]) -> Self:
        """Return all chunks of at least one batch; see `EpisodeBatch.concat`."""
        first = batches[0]
        columns, names, is_shared = first.columns, first.columns.keys(), True
        for i, batch in enumerate(batches):
            if (batch.groups is None) != (first.groups is None):
                raise ValueError("expected batches of one agent or batches of several agents, got both.")
            if batch.columns.keys() != names:
                raise ValueError(
                    f"batch {i}: expected the columns {sorted(names)}, got {sorted(batch.columns)}."
                )
            is_shared = is_shared and batch.columns is columns
        fields: dict[str, Any] = {"infos": {}, "custom_data": {}, "leftovers": {}}
        for name in (*_ARRAYS, *ID_LISTS, "initial_state", "observation_space", "action_space"):
            values = [getattr(batch, name) for batch in batches]
            known = [value for value in values if value is not None]
            if name in ("observation_space", "action_space"):
                fields[name] = common_space(known) if first.groups is None else values[0]
            elif known and name in ID_LISTS:
                lists = [ids or [None] * len(batch) for ids, batch in zip(values, batches, strict=True)]
                fields[name] = list(chain.from_iterable(lists))
            else:
                fields[name] = concatenated(known) if len(known) == len(batches) else None
        num_slots = num_chunks = 0
        groups: list[Self] = []
        for batch in batches:
            fields["start"][num_chunks : num_chunks + len(batch)] += num_slots
            for name, offset in (
                ("infos", num_slots),
                ("custom_data", num_chunks),
                ("leftovers", num_chunks),
            ):
                for place, of in getattr(batch, name).items():
                    fields[name][place + offset] = of
            for group in batch.groups or ():
                groups.append(cls(**{**group._fields(), "episode": group.links[0] + num_chunks}))
            num_chunks += len(batch)
            num_slots += 0 if is_shared else batch.num_slots
        if first.env_ts is not None:
            parts = [batch.links[2] for batch in batches]
            fields["env_ts"] = first.env_ts if is_shared else concatenated(parts)
        try:
            for name in () if is_shared else names:
                columns = {**columns, name: concatenated([batch.columns[name] for batch in batches])}
        except (ValueError, TypeError) as error:
            raise ValueError(f"column {name!r} of the batches does not fit together: {error}") from error
        return cls(
            columns,
            **fields,
            groups=None if first.groups is None else groups,
            agent_to_module_mapping_fn=first.agent_to_module_mapping_fn,
        )

    def joined(self, chosen: IntArray, firsts: IntArray, groups: list[Self] | None = None) -> Self:
        """Return a batch on new columns with one chunk for each run of chunks.

        Args:
            chosen: int64 [K], the chunks of all runs, each behind the one that it continues.
            firsts: int64 [R], where in `chosen` the runs begin.
            groups: The agents' chunks.
        """
        lasts = np.append(firsts, len(chosen))[1:] - 1
        batch = self.take(chosen[firsts], groups)
        for name in ("terminated", "truncated", "env_index"):
            setattr(batch, name, getattr(self, name)[chosen[lasts]])
        if not len(firsts):
            return batch
        begins, counts = self.start[chosen], self.length[chosen]
        batch.length = np.add.reduceat(counts, firsts)
        if self.duration_s is not None:
            batch.duration_s = np.add.reduceat(self.duration_s[chosen], firsts)
        if self.custom_data or self.leftovers:
            batch._belongings(self, chosen, firsts)
        if self.groups is not None:
            return batch
        begins[firsts] -= batch.lookback
        counts[firsts] += batch.lookback
        counts[lasts] += 1  # the final observation
        slots = ragged_arange(begins, counts)
        whole = batch.lookback + batch.length + 1
        batch.start = np.cumsum(whole) - whole + batch.lookback
        batch.columns = {
            name: column.take(slots, axis=0) if isinstance(column, np.ndarray) else tree_rows(column, slots)
            for name, column in self.columns.items()
        }
        if self.env_ts is not None:
            batch.env_ts = self.env_ts[slots]
        if self.infos:
            batch.infos = {i: self.infos[slot] for i, slot in enumerate(slots.tolist()) if slot in self.infos}
        return batch

    def compacted(self) -> Self:
        """Return the same chunks on new columns without unused slots."""
        each = np.arange(len(self))
        return self.joined(each, each)

    def _belongings(self, batch: Self, chosen: IntArray, firsts: IntArray) -> None:
        """Set the custom data and leftovers of joined chunks of a batch; see `joined`."""
        self.custom_data, self.leftovers = {}, {}
        is_first = np.isin(np.arange(len(chosen) + 1), firsts)
        is_first[-1] = True
        run = -1
        for place, chunk in enumerate(chosen.tolist()):
            run += bool(is_first[place])
            if chunk in batch.custom_data:
                self.custom_data.setdefault(run, {}).update(batch.custom_data[chunk])
            for name, value in batch.leftovers.get(chunk, {}).items():
                # A step that hung is completed in the next chunk.
                if is_first[place if name == "reward_before_start" else place + 1]:
                    self.leftovers.setdefault(run, {})[name] = value

    def runs(self, whose: Sequence[Any], key: IntArray) -> tuple[IntArray, IntArray]:
        """Return the chunks with steps, each behind the one it continues, and where runs of chunks of one key begin.

        Args:
            whose: What the chunks belong to: an episode, or an agent's.
            key: int64 [C].
        """
        steps = np.flatnonzero(self.length)
        places: dict[Any, int] = {}
        owner = np.array([places.setdefault(whose[c], len(places)) for c in steps.tolist()], np.int64)
        order = np.lexsort((self.t_started[steps], owner))
        chosen, owner = steps[order], owner[order]
        ends = self.t_started + self.length
        continues = np.zeros(len(chosen), np.bool_)
        continues[1:] = (
            (owner[1:] == owner[:-1])
            & (key[chosen[1:]] == key[chosen[:-1]])
            & (self.t_started[chosen[1:]] == ends[chosen[:-1]])
            & ~(self.terminated | self.truncated)[chosen[:-1]]
        )
        return chosen, np.flatnonzero(~continues)

    def joined_groups(self, new_episode: IntArray) -> list[Self]:
        """Return the agents' chunks, those that continue each other as one. Groups of equal columns become one.

        Args:
            new_episode: int64 [C], the new index of each episode; -1: left out.
        """
        by_columns: dict[Any, list[Self]] = {}
        for group in self.groups or ():
            leaves, treespec = tree_flatten((group.columns, group.initial_state or ()))
            kinds = tuple((leaf.dtype, leaf.shape[1:]) for leaf in leaves)
            by_columns.setdefault((treespec, kinds), []).append(group)
        result = []
        for alike in by_columns.values():
            group = self.concatenated(alike)
            group.episode = new_episode[group.links[0]]
            agent_ids = group.agent_ids or [None] * len(group)
            whose = list(zip(group.episode.tolist(), agent_ids, strict=True))
            chosen, firsts = group.runs(whose, group.episode)
            if len(chosen):
                result.append(group.joined(chosen, firsts))
        return result


_FIELDS = tuple(name for name in BatchColumns.__slots__ if not name.startswith("_"))
_fields_of = operator.attrgetter(*_FIELDS)


def common_space(spaces: Sequence[gym.Space[Any]]) -> gym.Space[Any] | None:
    """Return the space that all these are; None if they differ, or there is none."""
    for space in spaces:
        if space is not spaces[0] and space != spaces[0]:
            return None
    return spaces[0] if spaces else None


def concatenated(parts: list[Any]) -> Any:
    """Concatenate trees of arrays along the first axis.

    Raises:
        ValueError: Arrays have different shapes, are of objects, or mix numbers and strings.
    """
    if not isinstance(parts[0], np.ndarray):
        leaves, spec = tree_flatten(parts[0])
        columns = [leaves, *(spec.flatten_up_to(part) for part in parts[1:])]
        return spec.unflatten([concatenated(list(leaf)) for leaf in zip(*columns, strict=True)])
    joined = np.concatenate(parts)
    if joined.dtype.hasobject:
        raise ValueError(
            f"expected numbers, strings or arrays of them, got {type(joined[0]).__name__} {joined[0]!r:.80}."
        )
    if joined.dtype.kind in "SUT" and len({value_kind(part.dtype) for part in parts}) > 1:
        # numpy would convert the numbers to strings
        raise ValueError(f"expected items of one kind, got {sorted({str(part.dtype) for part in parts})}.")
    return joined


# -- positions in columns ------------------------------------------------------------------------------


def chosen_positions(chosen: object, num: int) -> IntArray:
    """Convert positions (negative ones count from the end) or a bool mask to int64 positions in ``0 … num-1``.

    Raises:
        IndexError: A position does not exist or a mask has the wrong length.
    """
    chosen = np.asarray(chosen)
    if chosen.dtype != np.bool_:
        chosen = chosen.astype(np.int64, copy=False)
    positions: IntArray = np.arange(num, dtype=np.int64)[chosen]
    return positions


def ragged_arange(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``[starts[0], starts[0]+1, …, starts[1], starts[1]+1, …]``, with ``counts[i]`` numbers from each start.

    Args:
        starts: int64 [C].
        counts: int64 [C], from 0.

    Returns:
        int64 [counts.sum()].
    """
    if len(starts) == 1:
        start = int(starts[0])
        return np.arange(start, start + int(counts[0]), dtype=np.int64)
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    if total == len(ends) and counts.all():
        return starts.astype(np.int64)
    numbers: np.ndarray = np.arange(total, dtype=np.int64)
    numbers += (starts - (ends - counts)).repeat(counts)
    return numbers


def steps_window(length: IntArray, begin: int, end: int) -> tuple[int, int, int, int]:
    """Return the chunks that contain the steps ``begin…end-1`` of all chunks in order, and the steps to cut off.

    Chunks without steps belong to the window that ends at (or begins before) their position. With ``begin == 0``,
    leading ones are included, too.

    Args:
        length: int64 [C], steps per chunk.
        begin, end: ``0 <= begin <= end <= length.sum()``.

    Returns:
        (first chunk, one past the last chunk, steps cut off the first one's front, steps cut off the last
        one's end).
    """
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    first = int(np.searchsorted(ends, begin, "right")) if begin else 0
    if end == total:
        stop = len(ends)
    elif end == 0:
        stop = 0
    else:
        # The chunk of step `end` is the first one that is not completely included; it may be included in part.
        stop = int(np.searchsorted(ends, end, "right"))
        if int(ends[stop] - length[stop]) < end:
            stop += 1
    stop = max(stop, first)
    if begin == end and begin not in (0, total):
        return first, first, 0, 0
    if first == stop:
        return first, stop, 0, 0
    front = max(0, begin - int(ends[first] - length[first]))
    back = max(0, int(ends[stop - 1]) - end)
    return first, stop, front, back
