"""Batches of episodes as columns: returned by sampling, sent over the wire and trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, overload

import gymnasium as gym
import numpy as np

from rlzmq.core.tree import tree_map
from rlzmq.episodes import episode_gather, episode_wire
from rlzmq.episodes.batch_columns import BatchColumns
from rlzmq.episodes.chunk_table import ID_LISTS, TABLE, chosen_positions, steps_window
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.shared_columns import SharedColumns, is_changed
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["EpisodeBatch"]


class EpisodeBatch(BatchColumns):
    """A list of chunks of episodes on shared columns, which are created on access (`EpisodeList`).

    All columns have one slot numbering. Chunk ``c`` has its first observation (after the lookback part) in
    slot ``start[c]`` and its last in ``start[c] + length[c]``; step ``t`` (its action, reward, …) lies in
    the slot of the observation that it started from. What step columns hold in the slot of a last
    observation means nothing. Slots before ``start[c]``, ``lookback[c]`` of them, are its lookback part.
    Lookback parts may overlap other chunks' slots; slots of no chunk may lie anywhere between.

    Items, ``batch[a:b]``, `split` and `slice_steps` share the columns. As in a list, ``batch[i]`` is the same
    episode every time, and it can be changed (setters, further steps, ``custom_data``): it then copies what
    it changes and leaves the columns alone. So can the list itself (`append`, ``del batch[0]``, …). `updated`,
    and with it everything that makes new batches of this one, sends it, or learns from it, goes by what the
    list and its episodes have become; columns and table stay what they were.

    Example:
        >>> batch = EpisodeBatch.from_episodes(episodes)
        >>> head, tail = batch.split(100)
        >>> head.num_env_steps, batch.get_returns().shape == (len(batch),)
        (100, True)

    Args:
        columns: Trees of arrays by name, every leaf ``[num_slots, ...]``: Columns.OBS, Columns.ACTIONS,
            Columns.REWARDS and any extra model output.
        start, length: int [C]; see above.
        lookback: int [C], zeros when None.
        t_started: int [C], each chunk's first time step within its episode; zeros when None.
        terminated, truncated: bool [C], whether the chunk's last step ended the episode; False when None.
        env_index: int [C], the sub-environment that a chunk comes from; -1 (unknown) when None.
        episode_ids: C strings; new ones when None.
        agent_ids, module_ids, multi_agent_episode_ids: C values each for agents of multi-agent episodes, or
            None.
        initial_state: Tree with leaves ``[C, ...]``, the module's state before each chunk's first step, or
            None (stateless module, or unknown).
        infos: Non-empty info dicts by slot.
        custom_data: Non-empty custom data by chunk.
        duration_s: float [C], seconds that each chunk took, or None.
        observation_space, action_space: Spaces of one item, or None.
        meta: Plain (msgpack-able) facts about the whole batch, e.g. the runner and its weights version.

    Attributes:
        Those of the arguments, arrays as int64, bool and float64.

    Raises:
        ValueError: The table's parts differ in length.
    """

    __slots__ = ()

    # -- episodes -------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: SupportsIndex) -> SingleAgentEpisode: ...

    @overload
    def __getitem__(self, index: slice) -> EpisodeBatch: ...

    def __getitem__(self, index: SupportsIndex | slice) -> SingleAgentEpisode | EpisodeBatch:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        if self._is_ordinary:
            return list.__getitem__(self, index)
        return self._item(range(len(self))[index])

    def _item(self, position: int) -> SingleAgentEpisode:
        episode = self._tracked.get(position)
        if episode is None:
            episode = self._tracked[position] = self.new_item(position)
        return episode

    def _items(self) -> Iterator[SingleAgentEpisode]:
        tracked, create = self._tracked, SharedColumns(self).episode
        rows = zip(*(getattr(self, name).tolist() for name in TABLE), strict=True)
        for position, row in enumerate(rows):
            episode = tracked.get(position)
            if episode is None:
                episode = tracked[position] = create(position, row)
            yield episode

    def new_item(self, position: int) -> SingleAgentEpisode:
        """Return one chunk as a new episode whose changes this batch ignores."""
        row: Any = tuple(getattr(self, name).item(position) for name in TABLE)
        return SharedColumns(self).episode(position, row)

    def updated(self) -> EpisodeBatch:
        """Return this batch, or, where the list or an item of it was changed, a new one with the changes.

        Raises:
            ValueError: The items do not fit together, see `from_episodes`.
        """
        if self._is_ordinary:
            batch = EpisodeBatch.from_episodes(self)
            batch.meta = self.meta
            return batch
        if not any(map(is_changed, self._tracked.values())):
            return self
        tracked = self._tracked
        batch = EpisodeBatch.from_episodes(
            tracked[i] if i in tracked else self.new_item(i) for i in range(len(self))
        )
        batch.env_index, batch.meta = self.env_index, self.meta
        return batch

    def select(self, chunks: Any) -> EpisodeBatch:
        """Return some of the chunks, in the given order, on the same columns.

        Args:
            chunks: int [K], positions of chunks (negative ones count from the end), or a bool mask [C].
        """
        if (updated := self.updated()) is not self:
            return updated.select(chunks)
        chunks = chosen_positions(chunks, len(self))
        listed: list[int] = chunks.tolist()
        lists = {
            name: None if values is None else [values[c] for c in listed]
            for name, values in ((name, getattr(self, name)) for name in ID_LISTS)
        }
        custom_data = {}
        if self.custom_data:
            custom_data = {i: self.custom_data[c] for i, c in enumerate(listed) if c in self.custom_data}
        return EpisodeBatch(
            self.columns,
            **{name: getattr(self, name)[chunks] for name in TABLE},
            **lists,
            initial_state=None
            if self.initial_state is None
            else tree_map(lambda leaf: leaf[chunks], self.initial_state),
            infos=self.infos,
            custom_data=custom_data,
            duration_s=None if self.duration_s is None else self.duration_s[chunks],
            observation_space=self.observation_space,
            action_space=self.action_space,
            meta=self.meta,
        )

    # -- cutting and joining --------------------------------------------------------------------------

    def split(self, num_steps: int) -> tuple[EpisodeBatch, EpisodeBatch]:
        """Return the first ``num_steps`` env steps and the rest, both on the same columns.

        A chunk cut in two: its first part is not done; its second part begins later, with everything before
        as lookback, and its initial state is the ``state_out`` of the step before.

        Raises:
            ValueError: There are fewer steps, or ``num_steps`` is negative.
        """
        if (updated := self.updated()) is not self:
            return updated.split(num_steps)
        total = self.num_env_steps
        if num_steps == total:
            return self[:], self[len(self) :]
        return self.slice_steps(0, num_steps), self.slice_steps(num_steps, total)

    def slice_steps(self, begin: int, end: int) -> EpisodeBatch:
        """Return the env steps ``begin…end-1`` (counted over all chunks in order), on the same columns.

        Raises:
            ValueError: Unless ``0 <= begin <= end <= num_env_steps``.
        """
        if (updated := self.updated()) is not self:
            return updated.slice_steps(begin, end)
        total = self.num_env_steps
        if not 0 <= begin <= end <= total:
            raise ValueError(f"expected steps within 0…{total}, got {begin}…{end}.")
        first, stop, front, back = steps_window(self.length, begin, end)
        part = self.select(np.arange(first, stop))
        if back:
            part.length[-1] -= back
            part.terminated[-1] = part.truncated[-1] = False
        if front:
            part.length[0] -= front
            part.start[0] += front
            part.lookback[0] += front
            part.t_started[0] += front
            if part.initial_state is not None and Columns.STATE_OUT in self.columns:
                self._take_over_state(part)
        if part.duration_s is not None and (front or back):
            whole = self.length[first:stop]
            part.duration_s = part.duration_s * (part.length / np.maximum(whole, 1))
        return part

    def _take_over_state(self, part: EpisodeBatch) -> None:
        slot = int(part.start[0]) - 1

        def take_over(rows: np.ndarray, state_out: np.ndarray) -> None:
            rows[0] = state_out[slot]

        tree_map(take_over, part.initial_state, self.columns[Columns.STATE_OUT])

    @classmethod
    def concat(cls, batches: Iterable[EpisodeBatch]) -> EpisodeBatch:
        """Return all chunks of several batches, in order.

        Batches on the same columns (parts of a `split`) stay on them; else columns are copied into new ones.
        ``meta`` is about single batches and is empty in the result of more than one.

        Raises:
            ValueError: The batches have different columns.
        """
        return episode_gather.concat(cls, [batch.updated() for batch in batches])

    @classmethod
    def from_episodes(cls, episodes: Iterable[SingleAgentEpisode]) -> EpisodeBatch:
        """Return a batch of episodes' chunks, copied into new columns.

        Raises:
            TypeError: For anything but SingleAgentEpisodes.
            ValueError: An episode has no observation, columns that do not fit the others', a reward that
                is not one number, or items that are no numbers, strings or arrays of them.
        """
        return episode_gather.from_episodes(cls, list(episodes))

    def compact(self) -> EpisodeBatch:
        """Return the same chunks on new columns that hold nothing else."""
        return episode_gather.compact(self.updated())

    # -- the wire -------------------------------------------------------------------------------------

    def to_wire(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the batch as a small msgpack-able header and its arrays (see `episode_wire`), copying nothing.

        Only when less than half of the slots is used are the used ones copied out first. Spaces are not
        sent. Infos that are no dicts, and info values and custom data without a plain form, are left out and
        counted in ``meta["num_infos_left_out"]`` of the received batch.
        """
        return episode_wire.to_wire(self.updated())

    @classmethod
    def from_wire(
        cls,
        header: Any,
        frames: Sequence[Any],
        *,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
    ) -> EpisodeBatch:
        """Return the batch that `to_wire` was called on: views on the frames' memory, every bound checked.

        Args:
            header: What `to_wire` returned, after msgpack.
            frames: Buffers (bytes, memoryviews, arrays) in the same order.
            observation_space, action_space: Spaces of one item, which the receiver knows.

        Raises:
            ProtocolError: Header and frames are not valid; the message gives the place, the expected and
                the actual value.
        """
        return episode_wire.from_wire(
            cls, header, frames, observation_space=observation_space, action_space=action_space
        )
