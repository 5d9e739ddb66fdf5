"""EpisodeBatch: episodes as columns, as returned by sampling, sent over the wire and trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.core.tree import tree_map
from rlzmq.episodes import episode_gather, episode_wire
from rlzmq.episodes.batch_columns import ID_LISTS, TABLE, BatchColumns, chosen_positions, steps_window
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.shared_columns import SharedColumns, is_changed
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["EpisodeBatch"]


class EpisodeBatch(BatchColumns):
    """A list of chunks of episodes on shared columns. The chunks are created on access (`EpisodeList`).

    All columns have the same slot numbers. Chunk ``c`` has its first observation (after the lookback part) in slot
    ``start[c]`` and its last one in ``start[c] + length[c]``. Step ``t`` (its action, reward, …) is in the slot of the
    observation before it. The contents of step columns in the slot of a last observation are undefined. The
    ``lookback[c]`` slots before ``start[c]`` are the chunk's lookback part. Lookback parts may overlap other chunks'
    slots, and there may be slots that belong to no chunk.

    Items, ``batch[a:b]``, `split` and `slice_steps` share the columns. As in a list, ``batch[i]`` always returns the
    same episode. It can be changed (setters, further steps, ``custom_data``); it then copies the changed data and
    leaves the columns alone. The list itself can be changed, too (`append`, ``del batch[0]``, …). `updated`, and so
    every operation that makes new batches of this one, sends it or learns from it, uses the current list and
    episodes. Columns and table never change.

    Example:
        >>> batch = EpisodeBatch.from_episodes(episodes)
        >>> head, tail = batch.split(100)
        >>> head.num_env_steps, batch.get_returns().shape == (len(batch),)
        (100, True)

    Args:
        columns: Trees of arrays by name, every leaf ``[num_slots, ...]``: Columns.OBS, Columns.ACTIONS,
            Columns.REWARDS and any extra model output.
        start, length: int [C], see above.
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
        observation_space, action_space: Spaces of one item, or None.
        meta: Plain (msgpack-able) facts about the whole batch, e.g. the runner and its weights version.

    Attributes:
        The arguments, with arrays as int64, bool and float64.

    Raises:
        ValueError: The lengths of the table's parts differ.
    """

    __slots__ = ("_source",)  # used by a subclass whose instances become an EpisodeBatch

    _source: Any

    # -- episodes -------------------------------------------------------------------------------------

    def _items(self) -> Iterator[SingleAgentEpisode]:
        tracked, create = self._tracked, SharedColumns(self).episode
        rows = zip(*(getattr(self, name).tolist() for name in TABLE), strict=True)
        for position, row in enumerate(rows):
            episode = tracked.get(position)
            if episode is None:
                episode = tracked[position] = create(position, row)
            yield episode

    def new_item(self, position: int) -> SingleAgentEpisode:
        """Return one chunk as a new episode, whose changes this batch ignores."""
        row: Any = tuple(getattr(self, name).item(position) for name in TABLE)
        return SharedColumns(self).episode(position, row)

    _is_changed = staticmethod(is_changed)

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

    def slice_steps(self, begin: int, end: int) -> EpisodeBatch:
        """Return the env steps ``begin…end-1`` (counted over all chunks in order), on the same columns.

        If a chunk is cut in two, its first part is not done. Its second part begins later, has everything before as
        lookback, and the ``state_out`` of the step before as its initial state.

        Raises:
            ValueError: ``0 <= begin <= end <= num_env_steps`` is violated.
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

        Batches on the same columns (parts of a `split`) stay on them; otherwise columns are copied into new ones.
        ``meta`` describes a single batch, so it is empty in the result of several.

        Raises:
            ValueError: The batches have different columns.
        """
        return episode_gather.concat(cls, [batch.updated() for batch in batches])

    @classmethod
    def from_episodes(cls, episodes: Iterable[SingleAgentEpisode]) -> EpisodeBatch:
        """Return a batch of episodes' chunks, copied into new columns.

        Raises:
            TypeError: An item is not a SingleAgentEpisode.
            ValueError: An episode has no observation, columns that do not fit the others', a reward that is not a
                single number, or items that are not numbers, strings or arrays of them.
        """
        return episode_gather.from_episodes(cls, list(episodes))

    def compact(self) -> EpisodeBatch:
        """Return the same chunks on new columns without unused slots."""
        return episode_gather.compact(self.updated())

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
        header: Any,
        frames: Sequence[Any],
        *,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
    ) -> EpisodeBatch:
        """Return the batch of a `to_wire` call: views of the frames' memory, with every bound checked.

        Args:
            header: The header from `to_wire`, after msgpack.
            frames: Buffers (bytes, memoryviews, arrays) in the same order.
            observation_space, action_space: Spaces of one item, known to the receiver.

        Raises:
            ProtocolError: Header or frames are invalid; the message names the position, the expected and the actual
                value.
        """
        return episode_wire.from_wire(
            cls, header, frames, observation_space=observation_space, action_space=action_space
        )
