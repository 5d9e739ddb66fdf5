"""EpisodeBatch: chunks of episodes on columns, as returned by sampling, sent over the wire and trained on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_flatten, tree_map
from rlzmq.episodes import episode_gather, episode_wire
from rlzmq.episodes.agent_groups import from_episodes, is_changed_of_agents, new_episode_of_agents
from rlzmq.episodes.batch_columns import ID_LISTS, TABLE, BatchColumns, IntArray
from rlzmq.episodes.columns import (
    Columns,
    chosen_positions,
    ragged_arange,
    steps_window,
)
from rlzmq.episodes.shared_columns import SharedColumns, is_changed, new_episode

__all__ = ["EpisodeBatch", "concat_joined", "join_chunks"]


class EpisodeBatch(BatchColumns):
    """A list of chunks of episodes on shared columns. The chunks are created on access.

    All columns have the same slot numbers. Chunk ``c`` has its first observation (after the lookback part) in slot
    ``start[c]`` and its last one in ``start[c] + length[c]``. Step ``t`` (its action, reward, …) is in the slot of the
    observation before it. The contents of step columns in the slot of a last observation are undefined. The
    ``lookback[c]`` slots before ``start[c]`` are the chunk's lookback part. Lookback parts may overlap other chunks'
    slots, and there may be slots that belong to no chunk.

    Episodes of several agents have no columns of their own: their table counts env steps, and their agents' chunks are
    in `groups`, EpisodeBatches of equal columns (usually one for each module). There, ``episode[c]`` is the episode of
    chunk ``c`` and ``env_ts[slot]`` the env step at which the slot's observation was made. `agent_batches` has the
    batches with columns in both cases.

    Items, ``batch[a:b]``, `split` and `slice_steps` share the columns. As in a list, ``batch[i]`` always returns the
    same episode (a SingleAgentEpisode or MultiAgentEpisode). It can be changed (setters, further steps,
    ``custom_data``); it then copies the changed data and leaves the columns alone. The list itself can be changed, too
    (`append`, ``del batch[0]``, …). `updated`, and so every operation that makes new batches of this one, sends it or
    learns from it, uses the current list and episodes. Columns and table never change.

    A change of the list itself turns the batch into an ordinary list of its episodes. The underlying list is empty
    until then, or until the batch is the right operand of ``+``. C code that accesses a list's memory directly
    therefore sees no items: in the standard library only `operator.concat` and `heapq`. Pass ``list(batch)`` to them.

    Example:
        >>> batch = EpisodeBatch.from_episodes(episodes)
        >>> head, tail = batch.split(100)
        >>> head.num_env_steps, batch.get_returns().shape == (len(batch),)
        (100, True)

    Args:
        columns: Trees of arrays by name, every leaf ``[num_slots, ...]``: Columns.OBS, Columns.ACTIONS,
            Columns.REWARDS and any extra model output.
        start, length: int [C], see above; start None: zeros (of several agents).
        lookback: int [C]; None: zeros.
        t_started: int [C], each chunk's first time step within its episode; None: zeros.
        terminated, truncated: bool [C], whether the chunk's last step ended the episode; None: False.
        env_index: int [C], the sub-environment of each chunk; -1: unknown; None: all unknown.
        episode_ids: C strings; None: new ids.
        agent_ids, module_ids, multi_agent_episode_ids: C values each, for agents of multi-agent episodes; None in
            single-agent use.
        initial_state: Tree with leaves ``[C, ...]``, the module's state before each chunk's first step; None:
            stateless module, or unknown.
        infos: Non-empty info dicts by slot.
        custom_data: Non-empty custom data by chunk.
        duration_s: float [C], duration of each chunk in seconds, or None.
        observation_space, action_space: Spaces of one item (of several agents: dicts of spaces by agent id), or None.
        meta: Plain (msgpack-able) facts about the whole batch, e.g. the runner and its weights version.
        groups: The agents' chunks; None: the episodes have one agent.
        episode, order: int [C], of a group: each chunk's episode, and its place among the episode's agents.
        env_ts: int [num_slots], of a group: the env step of each slot's observation.
        leftovers: Data that most chunks lack, by chunk: of an episode of several agents e.g. departed agents, of an
            agent's chunk e.g. a hanging action (`AgentTrack.leftovers`).
        agent_to_module_mapping_fn: The mapping function of episodes of several agents; not sent over the wire.

    Attributes:
        The arguments, with arrays as int64, bool and float64.

    Raises:
        ValueError: The lengths of the table's parts differ.
    """

    __slots__ = ()

    groups: list[EpisodeBatch] | None

    # -- facts ----------------------------------------------------------------------------------------

    @property
    def num_env_steps(self) -> int:
        """Number of env steps in all chunks, without lookback parts."""
        if self._is_ordinary:
            return sum(map(len, self))
        length = self.length
        return int(length.item() if len(length) == 1 else length.sum())

    @property
    def num_agent_steps(self) -> int:
        """Number of the agents' completed steps, without lookback parts."""
        return sum(batch.num_env_steps for batch in self.updated().agent_batches)

    def batches_of(self, module_id: str) -> list[Self]:
        """Return the chunks (with at least one step) of a module's agents."""
        found = []
        for batch in self.agent_batches:
            mask = batch.is_of(module_id) & (batch.length > 0)
            if mask.all() and len(mask):
                found.append(batch)
            elif mask.any():
                found.append(batch.select(mask))
        return found

    def get_returns(self) -> np.ndarray:
        """Return the sum of each chunk's rewards (of all agents), without lookback parts, float64 [C]."""
        if (updated := self.updated()) is not self:
            return updated.get_returns()
        if self.groups is not None:
            returns = np.zeros(len(self), np.float64)
            for group in self.groups:
                np.add.at(returns, group.links[0], group.get_returns())
            return returns
        rewards = self.columns[Columns.REWARDS][self.step_slots()]
        return np.bincount(self.step_chunks(), weights=rewards, minlength=len(self))

    def __repr__(self) -> str:
        what = f"chunks={len(self)}, env_steps={self.num_env_steps}"
        if self.groups is not None:
            return (
                f"EpisodeBatch({what}, agent_steps={self.num_agent_steps}, modules={self.get_module_ids()})"
            )
        return f"EpisodeBatch({what}, slots={self.num_slots}, columns={list(self.columns)})"

    # -- episodes -------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    @overload
    def __getitem__(self, index: str) -> Any: ...

    def __getitem__(self, index: SupportsIndex | slice | str) -> Any:
        """Return an episode, a slice of them, or a column by its name: a row ``[num_env_steps, …]`` per step."""
        if isinstance(index, str):
            batch = self.updated()
            slots = batch.step_slots()
            return tree_map(lambda leaf: leaf[slots], batch.columns[index])
        if isinstance(index, slice):
            return self.select(np.arange(len(self), dtype=np.int64)[index])
        return list.__getitem__(self, index) if self._is_ordinary else self._item(range(len(self))[index])

    def _item(self, position: int) -> Any:
        """Return the chunk at an index from 0; always the same episode for the same index."""
        episode = self._tracked.get(position)
        if episode is None:
            episode = self._tracked[position] = self.new_item(position)
        return episode

    def updated(self) -> EpisodeBatch:
        """Return this batch or, if the list or an item was changed, a new one with the changes.

        Raises:
            ValueError: The items do not fit together; see `from_episodes`.
        """
        if self._is_ordinary:
            batch = EpisodeBatch.from_episodes(self)
        else:
            tracked = self._tracked
            if not any(map(self._is_changed, tracked.values())):
                return self
            batch = EpisodeBatch.from_episodes(
                tracked[i] if i in tracked else self.new_item(i) for i in range(len(self))
            )
            batch.env_index = self.env_index
        batch.meta = self.meta
        return batch

    def split(self, num_steps: int) -> tuple[EpisodeBatch, EpisodeBatch]:
        """Return the first `num_steps` env steps and the rest, both on the same columns.

        Raises:
            ValueError: There are fewer steps, or `num_steps` is negative.
        """
        batch = self.updated()
        total = batch.num_env_steps
        if num_steps == total:
            return batch[:], batch[len(batch) :]
        return batch.slice_steps(0, num_steps), batch.slice_steps(num_steps, total)

    def _items(self) -> Iterator[Any]:
        if self.groups is not None:
            yield from map(self._item, range(len(self)))
            return
        tracked, create = self._tracked, SharedColumns(self).episode
        rows = zip(*(getattr(self, name).tolist() for name in TABLE), strict=True)
        for position, row in enumerate(rows):
            episode = tracked.get(position)
            if episode is None:
                episode = tracked[position] = create(position, row)
            yield episode

    def new_item(self, position: int) -> Any:
        """Return one chunk as a new episode, whose changes this batch ignores."""
        if self.groups is not None:
            return new_episode_of_agents(self, position)
        return new_episode(self, position)

    def _is_changed(self, episode: Any) -> bool:
        return is_changed(episode) if self.groups is None else is_changed_of_agents(episode)

    def select(self, chunks: object) -> EpisodeBatch:
        """Return some of the chunks, in the given order, on the same columns.

        Args:
            chunks: int [K], positions of chunks (negative ones count from the end), or a bool mask [C].
        """
        if (updated := self.updated()) is not self:
            return updated.select(chunks)
        chunks = chosen_positions(chunks, len(self))
        groups = self.groups
        if groups is not None:
            own = [group._of_episodes(chunks, len(self)) for group in groups]
            groups = [group for group in own if len(group)]
        return self._chosen(chunks, groups)

    def _chosen(self, chunks: IntArray, groups: list[EpisodeBatch] | None) -> EpisodeBatch:
        """Return the chunks at these positions; `groups` are their agents' chunks."""
        listed: list[int] = chunks.tolist()
        lists = {
            name: None if values is None else [values[c] for c in listed]
            for name, values in ((name, getattr(self, name)) for name in ID_LISTS)
        }

        def chosen(sparse: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
            return {i: sparse[c] for i, c in enumerate(listed) if c in sparse} if sparse else {}

        return EpisodeBatch(
            self.columns,
            **{name: getattr(self, name)[chunks] for name in TABLE},
            **lists,
            initial_state=None
            if self.initial_state is None
            else tree_map(lambda leaf: leaf[chunks], self.initial_state),
            infos=self.infos,
            custom_data=chosen(self.custom_data),
            duration_s=None if self.duration_s is None else self.duration_s[chunks],
            observation_space=self.observation_space,
            action_space=self.action_space,
            meta=self.meta,
            groups=groups,
            episode=None if self.episode is None else self.episode[chunks],
            order=None if self.order is None else self.order[chunks],
            env_ts=self.env_ts,
            leftovers=chosen(self.leftovers),
            agent_to_module_mapping_fn=self.agent_to_module_mapping_fn,
        )

    def _of_episodes(self, episodes: IntArray, num_episodes: int) -> EpisodeBatch:
        """Return a group's chunks of some of the episodes ``0 … num_episodes-1``, in their current order.

        An episode's position in `episodes` (each any number of times) is its new index.
        """
        episode = self.links[0]
        counts = np.bincount(episode, minlength=num_episodes)
        offsets = np.cumsum(counts) - counts
        by_episode = np.argsort(episode, kind="stable")
        chunks = by_episode[ragged_arange(offsets[episodes], counts[episodes])]
        order = np.argsort(chunks, kind="stable")
        part = self.select(chunks[order])
        part.episode = np.repeat(np.arange(len(episodes)), counts[episodes])[order]
        return part

    # -- cutting and joining --------------------------------------------------------------------------

    def slice_steps(self, begin: int, end: int) -> EpisodeBatch:
        """Return the env steps ``begin…end-1`` (counted over all chunks in order), on the same columns.

        If a chunk is cut in two, its first part is not done. Its second part begins later, has everything before as
        lookback, and the ``state_out`` of the step before as its initial state. An agent's step belongs to the part in
        which it is completed, so every step is in exactly one part.

        Raises:
            ValueError: ``0 <= begin <= end <= num_env_steps`` is violated.
        """
        if (updated := self.updated()) is not self:
            return updated.slice_steps(begin, end)
        total = self.num_env_steps
        if not 0 <= begin <= end <= total:
            raise ValueError(f"expected steps within 0…{total}, got {begin}…{end}.")
        if self.groups is not None:
            return self._slice_env_steps(begin, end)
        first, stop, front, back = steps_window(self.length, begin, end)
        part = self.select(np.arange(first, stop))
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

    def _slice_env_steps(self, begin: int, end: int) -> EpisodeBatch:
        """Return a slice of episodes of several agents; see `slice_steps`."""
        if begin == end:
            return self[len(self) :]
        length, ends = self.length, np.cumsum(self.length)
        first_t = self.t_started + np.clip(begin - (ends - length), 0, length)
        last_t = self.t_started + np.clip(end - (ends - length), 0, length)
        kept = np.flatnonzero((last_t > first_t) | ((length == 0) & (ends >= begin) & (ends < end)))
        new_index = np.full(len(self), -1, np.int64)
        new_index[kept] = np.arange(len(kept))
        is_whole = (first_t == self.t_started) & (last_t == self.t_started + length)
        parts = [group._between(first_t, last_t, is_whole, new_index) for group in self.groups or ()]
        part = self._chosen(kept, [group for group, _ in parts if len(group)])
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
    ) -> tuple[EpisodeBatch, list[tuple[int, Any, tuple[bool, bool, int]]]]:
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
        part = self.select(chunks)
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

    @classmethod
    def concat(cls, batches: Iterable[EpisodeBatch]) -> EpisodeBatch:
        """Return all chunks of several batches, in order.

        Batches on the same columns (parts of a `split`) stay on them; otherwise columns are copied into new ones. The
        groups of several agents stay on their own columns. ``meta`` describes a single batch, so it is empty in the
        result of several.

        Raises:
            ValueError: The batches have different columns.
        """
        return episode_gather.concat(cls, [batch.updated() for batch in batches])

    @classmethod
    def from_episodes(cls, episodes: Iterable[Any]) -> EpisodeBatch:
        """Return a batch of episodes' chunks, copied into new columns.

        Args:
            episodes: SingleAgentEpisodes, or MultiAgentEpisodes.

        Raises:
            TypeError: An item is neither, or they are of both kinds.
            ValueError: An episode has no observation, columns that do not fit the others', a reward that is not a
                single number, or items that are not numbers, strings or arrays of them.
        """
        return from_episodes(cls, list(episodes))

    def compact(self) -> EpisodeBatch:
        """Return the same chunks on new columns without unused slots. Batches of several agents are unchanged."""
        batch = self.updated()
        return episode_gather.compact(EpisodeBatch, batch) if batch.groups is None else batch

    # -- the list -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return list.__iter__(self) if self._is_ordinary else self._items()

    def __radd__(self, other: Any) -> Any:
        """Fill the underlying list, so that a list on the left of ``+`` or ``+=`` can read it."""
        if not self._is_ordinary:
            list.__setitem__(self, slice(None), list(self))
        return NotImplemented

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        """Return the episodes of both as a list."""
        return [*self, *other]

    def __iadd__(self, other: Iterable[Any]) -> Self:
        self.extend(other)
        return self

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list) and list(self) == list(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        batch = self.updated()
        return _restored, (batch._fields(),)

    # -- the wire -------------------------------------------------------------------------------------

    def to_wire(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the batch as a small msgpack-able header and its arrays (see `episode_wire`), without copies.

        If less than half of the slots are used, these are copied out first. Spaces are not sent. Infos that are not
        dicts, and info values and custom data without a plain form, are left out and counted in
        ``meta["num_infos_left_out"]`` of the received batch.
        """
        return episode_wire.to_wire(self.updated())

    @classmethod
    def from_wire(
        cls,
        header: object,
        frames: Sequence[Any],
        *,
        observation_space: Any = None,
        action_space: Any = None,
    ) -> EpisodeBatch:
        """Return the batch of a `to_wire` call: views of the frames' memory, with every bound checked.

        Args:
            header: The header from `to_wire`, after msgpack.
            frames: Buffers (bytes, memoryviews, arrays) in the same order.
            observation_space, action_space: Spaces of one item (of several agents: by agent id), known to the receiver.

        Raises:
            ProtocolError: Header or frames are invalid; the message names the position, the expected and the actual
                value.
        """
        return episode_wire.from_wire(
            cls, header, frames, observation_space=observation_space, action_space=action_space
        )


def _as_lists(values: Iterable[Any]) -> list[Any]:
    """Return the arguments of a list's method in C, which sees no items of a batch that is not an ordinary list."""
    return [list(value) if isinstance(value, EpisodeBatch) else value for value in values]


def _reading(method: Any) -> Any:
    """Return a method of `list` for batches: it reads a list of their episodes."""

    @functools.wraps(method)
    def read(self: EpisodeBatch, *args: Any) -> Any:
        return method(list(self), *_as_lists(args))

    return read


def _changing(method: Any) -> Any:
    """Return a method of `list` for batches: it first makes them ordinary lists of their episodes."""

    @functools.wraps(method)
    def change(self: EpisodeBatch, *args: Any, **kwargs: Any) -> Any:
        if not self._is_ordinary:
            episodes = list(self)
            self._is_ordinary = True
            list.__setitem__(self, slice(None), episodes)
        return method(self, *_as_lists(args), **kwargs)

    return change


_READING = ("__reversed__", "__contains__", "index", "count", "copy", "__mul__", "__rmul__")
_COMPARING = ("__lt__", "__le__", "__gt__", "__ge__")
_CHANGING = ("append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort")
for _name in (*_READING, *_COMPARING):
    setattr(EpisodeBatch, _name, _reading(getattr(list, _name)))
for _name in (*_CHANGING, "__setitem__", "__delitem__", "__imul__"):
    setattr(EpisodeBatch, _name, _changing(getattr(list, _name)))


def _restored(fields: dict[str, Any]) -> EpisodeBatch:
    """Return a pickled or copied batch."""
    return EpisodeBatch(**fields)


# -- joined chunks -------------------------------------------------------------------------------------


def concat_joined(batches: list[EpisodeBatch]) -> EpisodeBatch:
    """Return all chunks of several batches, those that continue each other under the same weights as one.

    Args:
        batches: At least one batch, in the order in which each runner sampled them. The version of the weights is read
            from their column ``weights_seq_no``; without it, all are of one version.
    """
    batch = EpisodeBatch.concat(batches)
    version = np.concatenate([_weights_versions(part.updated()) for part in batches])
    chosen, firsts = _runs(batch, batch.episode_ids, version)
    if len(firsts) == len(chosen):
        return batch
    batch = batch.select(chosen)
    joined = _merged(batch, firsts, keeps_all=True)
    if batch.groups is not None:
        joined.groups = _joined_groups(batch.groups, _run_of_each(firsts, len(batch)))
        joined.agent_to_module_mapping_fn = batch.agent_to_module_mapping_fn
    return joined


def _weights_versions(batch: EpisodeBatch) -> NDArray[np.int64]:
    """Return the weights version of each chunk; the newest of all where no agent completed a step."""
    found = np.full(len(batch), -1, np.int64)
    for columns in batch.agent_batches:
        versions, steps = columns.columns.get(Columns.WEIGHTS_VERSION), np.flatnonzero(columns.length)
        if versions is not None:
            episode = steps if columns.episode is None else columns.episode[steps]
            np.maximum.at(found, episode, versions[columns.start[steps]])
    found[found < 0] = found.max(initial=-1)
    return found


def join_chunks(batch: EpisodeBatch) -> EpisodeBatch:
    """Return a batch on new columns in which consecutive chunks of an episode are joined into one chunk.

    Episodes are in the order of their first chunks. A chunk that continues no other chunk is kept alone. Lookback
    parts, infos, custom data, durations and chunks without steps are left out.
    """
    batch = batch.updated()
    chosen, firsts = _runs(batch, batch.episode_ids, np.zeros(len(batch), np.int64))
    return _merged(batch.select(chosen), firsts, keeps_all=False)


def _joined_groups(groups: list[EpisodeBatch], new_episode: NDArray[np.int64]) -> list[EpisodeBatch]:
    """Join each agent's chunks, whose episodes get new numbers. Groups of equal columns become one."""
    by_columns: dict[Any, list[EpisodeBatch]] = {}
    for group in groups:
        leaves, treespec = tree_flatten((group.columns, group.initial_state or ()))
        kinds = tuple((leaf.dtype, leaf.shape[1:]) for leaf in leaves)
        by_columns.setdefault((treespec, kinds), []).append(group)
    result = []
    for alike in by_columns.values():
        group, links = EpisodeBatch.concat(alike), [part.links for part in alike]
        group.episode = new_episode[np.concatenate([episode for episode, _, _ in links])]
        group.order = np.concatenate([order for _, order, _ in links])
        on_same_columns = group.num_slots == len(links[0][2])
        group.env_ts = links[0][2] if on_same_columns else np.concatenate([env_ts for _, _, env_ts in links])
        num_before = itertools.accumulate(map(len, alike), initial=0)
        group.leftovers = {
            n + c: left
            for n, part in zip(num_before, alike, strict=False)
            for c, left in part.leftovers.items()
        }
        agent_ids = group.agent_ids or [None] * len(group)
        whose = list(zip(group.episode.tolist(), agent_ids, strict=True))
        chosen, firsts = _runs(group, whose, group.episode)
        if len(chosen):
            result.append(_merged(group.select(chosen), firsts, keeps_all=True))
    return result


def _runs(
    batch: EpisodeBatch, whose: Sequence[Any], key: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the chunks with steps, each behind the one it continues, and where runs of such chunks of one key begin.

    Args:
        batch: The chunks.
        whose: What the chunks belong to: an episode, or an agent's.
        key: int64 [C].
    """
    steps = np.flatnonzero(batch.length)
    places: dict[Any, int] = {}
    owner = np.array([places.setdefault(whose[c], len(places)) for c in steps.tolist()], np.int64)
    order = np.lexsort((batch.t_started[steps], owner))
    chosen, owner = steps[order], owner[order]
    ends = batch.t_started + batch.length
    continues = np.zeros(len(chosen), np.bool_)
    continues[1:] = (
        (owner[1:] == owner[:-1])
        & (key[chosen[1:]] == key[chosen[:-1]])
        & (batch.t_started[chosen[1:]] == ends[chosen[:-1]])
        & ~(batch.terminated | batch.truncated)[chosen[:-1]]
    )
    return chosen, np.flatnonzero(~continues)


def _run_of_each(firsts: NDArray[np.int64], num_chunks: int) -> NDArray[np.int64]:
    """Return the number of each chunk's run."""
    return np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, num_chunks)))


def _merged(batch: EpisodeBatch, firsts: NDArray[np.int64], *, keeps_all: bool) -> EpisodeBatch:
    """Return a batch with one chunk for each run of chunks, on new columns."""
    lasts = np.append(firsts[1:] - 1, len(batch) - 1)[: len(firsts)]
    length = np.add.reduceat(batch.length, firsts) if len(firsts) else batch.length
    lookback = batch.lookback[firsts] if keeps_all else np.zeros(len(firsts), np.int64)
    begins, counts = batch.start.copy(), batch.length.copy()
    begins[firsts] -= lookback
    counts[firsts] += lookback
    counts[lasts] += 1  # the final observation
    slots = ragged_arange(begins, counts)
    whole = lookback + length + 1
    infos: dict[int, dict[str, Any]] = {}
    if keeps_all and batch.infos:
        infos = {place: batch.infos[slot] for place, slot in enumerate(slots.tolist()) if slot in batch.infos}
    return EpisodeBatch(
        {
            name: tree_map(lambda leaf: leaf.take(slots, axis=0), column)
            for name, column in batch.columns.items()
        },
        start=None if batch.groups is not None else np.cumsum(whole) - whole + lookback,
        length=length,
        lookback=lookback,
        t_started=batch.t_started[firsts],
        terminated=batch.terminated[lasts],
        truncated=batch.truncated[lasts],
        env_index=batch.env_index[lasts],
        episode_ids=[batch.episode_ids[first] for first in firsts.tolist()],
        initial_state=None
        if batch.initial_state is None
        else tree_map(lambda leaf: leaf[firsts], batch.initial_state),
        infos=infos,
        observation_space=batch.observation_space,
        action_space=batch.action_space,
        episode=None if batch.episode is None else batch.episode[firsts],
        order=None if batch.order is None else batch.order[firsts],
        env_ts=None if batch.env_ts is None else batch.env_ts[slots],
        **(_belongings(batch, firsts, lasts) if keeps_all else {}),
    )


def _belongings(batch: EpisodeBatch, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> dict[str, Any]:
    """Return the custom data, durations, ids and leftovers of joined chunks, which begin at `firsts`."""
    whose = _run_of_each(firsts, len(batch))
    custom_data: dict[int, dict[str, Any]] = {}
    for chunk, data in batch.custom_data.items():
        custom_data.setdefault(int(whose[chunk]), {}).update(data)
    leftovers: dict[int, dict[str, Any]] = {}
    for chunk, left in batch.leftovers.items():  # a step that hung is completed in the next chunk
        is_last, is_first = chunk in lasts, chunk in firsts
        kept = {
            name: value
            for name, value in left.items()
            if (is_first if name == "reward_before_start" else is_last)
        }
        leftovers.setdefault(int(whose[chunk]), {}).update(kept)
    ids = {name: getattr(batch, name) for name in ID_LISTS if name != "episode_ids"}
    return {
        "custom_data": custom_data,
        "leftovers": leftovers,
        "duration_s": None if batch.duration_s is None else np.add.reduceat(batch.duration_s, firsts),
        **{
            name: None if values is None else [values[first] for first in firsts.tolist()]
            for name, values in ids.items()
        },
    }
