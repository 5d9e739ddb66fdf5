"""EpisodeBatch: chunks of episodes on columns, as returned by sampling, sent over the wire and trained on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Self, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_rows
from rlzmq.episodes import episode_wire
from rlzmq.episodes.batch_columns import AGENT_LISTS, BatchColumns, chosen_positions
from rlzmq.episodes.batch_items import from_episodes, new_items
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns

__all__ = ["EpisodeBatch", "concat_joined", "join_chunks"]


class EpisodeBatch(BatchColumns):
    """A list of chunks of episodes on shared columns. The episodes are created when the first one is asked for.

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
    (`append`, ``del batch[0]``, …). Columns and table never change: once an episode was asked for, `updated`, and so
    every operation that makes new batches of this one, sends it or learns from it, reads the current list and episodes.

    The underlying list is empty until an episode is asked for, or the batch is the right operand of ``+``. C code that
    accesses a list's memory directly therefore sees no items before: in the standard library only `operator.concat`
    and `heapq`. Pass ``list(batch)`` to them.

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
        agent_ids, module_ids: C values each, of the agents' chunks; None in single-agent use.
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
        if self._made is not None:
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

    def by_module(self, *, are_mapped: bool) -> dict[str, EpisodeBatch | None] | None:
        """Return the chunks of each module, episode by episode; None for a module whose agents' columns differ.

        Args:
            are_mapped: Whether agents are mapped to modules; otherwise all chunks are the default module's. None is
                returned if the batch is not of that kind.
        """
        if are_mapped != (self.groups is not None):
            return None
        if self.groups is None:
            return {DEFAULT_MODULE_ID: None if self.agent_ids is not None else self}
        return {module_id: self._joined_of(module_id) for module_id in self.get_module_ids()}

    def _joined_of(self, module_id: str) -> EpisodeBatch | None:
        parts, keys = [], []
        for group in self.agent_batches:
            mine = group.select(group.is_of(module_id))
            if len(mine):
                parts.append(mine)
                keys.append((mine.order, mine.episode))
        if any(part.columns.keys() != parts[0].columns.keys() for part in parts):
            return None
        batch = parts[0] if len(parts) == 1 else EpisodeBatch.concat(parts)
        return batch.select(np.lexsort([np.concatenate(part) for part in zip(*keys, strict=True)]))

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
            return tree_rows(batch.columns[index], batch.step_slots())
        if isinstance(index, slice):
            return self.select(np.arange(len(self), dtype=np.int64)[index])
        return list.__getitem__(self._filled(), index)

    def _filled(self) -> Self:
        """Make the episodes, if that was not done yet: from now on, this is a list of them."""
        if self._made is None:
            self._made = self.new_items()
            list.extend(self, self._made)
        return self

    def updated(self) -> EpisodeBatch:
        """Return this batch or, if its episodes were looked at, a new one of what the list now has.

        Raises:
            ValueError: The items do not fit together; see `from_episodes`.
        """
        if self._made is None:
            return self
        batch = EpisodeBatch.from_episodes(self)
        places = {id(episode): env for episode, env in zip(self._made, self.env_index, strict=True)}
        batch.env_index = np.array([places.get(id(episode), -1) for episode in self], np.int64)
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

    def new_items(self) -> list[Any]:
        """Return the chunks as new episodes, whose changes this batch ignores."""
        return new_items(self)

    def select(self, chunks: object) -> EpisodeBatch:
        """Return some of the chunks, in the given order, on the same columns.

        Args:
            chunks: int [K], positions of chunks (negative ones count from the end), or a bool mask [C].
        """
        if (updated := self.updated()) is not self:
            return updated.select(chunks)
        return self.take_episodes(chosen_positions(chunks, len(self)))

    def sorted_by_env(self, num_envs: int) -> tuple[EpisodeBatch, tuple[int, ...]]:
        """Return the chunks ordered by environment, and the env steps of each of `num_envs` environments.

        Chunks whose environments are unknown keep their order; the steps are then ().
        """
        batch = self.updated()
        if not len(batch):
            return batch, ()
        envs = batch.env_index
        if envs.min() < 0 or envs.max() >= num_envs:
            return batch, ()
        steps = np.bincount(envs, weights=batch.length, minlength=num_envs).astype(np.int64)
        return batch.select(np.argsort(envs, kind="stable")), tuple(steps.tolist())

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
        return self.take_steps(begin, end)

    @classmethod
    def concat(cls, batches: Iterable[EpisodeBatch]) -> EpisodeBatch:
        """Return all chunks of several batches, in order.

        Batches on the same columns (parts of a `split`) stay on them; otherwise columns are copied into new ones. The
        groups of several agents stay on their own columns. ``meta`` describes a single batch, so it is empty in the
        result of several.

        Raises:
            ValueError: The batches have different columns.
        """
        updated = list(map(EpisodeBatch.updated, batches))
        parts = list(filter(len, updated)) or updated[:1]
        if len(parts) > 1:
            return cls.concatenated(parts)
        return parts[0] if parts else cls.from_episodes([])

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
        return batch.compacted() if batch.groups is None else batch

    # -- the list -------------------------------------------------------------------------------------

    def __radd__(self, other: object) -> Any:
        """Fill the list, so that one on the left of ``+`` or ``+=`` can read it."""
        self._filled()
        return NotImplemented

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
        observation_space: object = None,
        action_space: object = None,
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


def _filling(method: Any) -> Any:
    """Return a method of `list` that fills batches first: in C, it sees the items that there are."""

    @functools.wraps(method)
    def call(self: EpisodeBatch, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, EpisodeBatch):
                value._filled()
        return method(self._filled(), *args, **kwargs)

    return call


_READING = ("__iter__", "__reversed__", "__contains__", "index", "count", "copy")
_OPERATORS = ("__add__", "__mul__", "__rmul__", "__iadd__", "__imul__")
_COMPARING = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_CHANGING = ("append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort")
_ITEMS = ("__setitem__", "__delitem__")
for _name in (*_READING, *_OPERATORS, *_COMPARING, *_CHANGING, *_ITEMS):
    setattr(EpisodeBatch, _name, _filling(getattr(list, _name)))


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
    parts = [*map(EpisodeBatch.updated, batches)]
    batch = EpisodeBatch.concat(parts)
    version = np.concatenate([*map(_weights_versions, parts)])
    chosen, firsts = batch.runs(batch.episode_ids, version)
    if len(firsts) == len(chosen):
        return batch
    if batch.groups is None:
        return batch.joined(chosen, firsts)
    new_episode = np.full(len(batch), -1, np.int64)
    new_episode[chosen] = np.cumsum(np.isin(np.arange(len(chosen)), firsts)) - 1
    return batch.joined(chosen, firsts, batch.joined_groups(new_episode))


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
    without: dict[str, Any] = {
        "infos": {},
        "custom_data": {},
        "leftovers": {},
        "lookback": None,
        "duration_s": None,
    }
    batch = EpisodeBatch(**{**batch._fields(), **without, **dict.fromkeys(AGENT_LISTS), "meta": None})
    return batch.joined(*batch.runs(batch.episode_ids, np.zeros(len(batch), np.int64)))


def num_env_steps_of(episodes: Any) -> int:
    """Return the number of env steps of an EpisodeBatch, of a list of them, or of a list of episodes."""
    if hasattr(episodes, "num_env_steps"):
        return int(episodes.num_env_steps)
    num = 0
    for item in episodes:
        of_batch = getattr(item, "num_env_steps", None)
        num += int(item.env_steps() if of_batch is None else of_batch)
    return num
