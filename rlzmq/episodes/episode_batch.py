"""Many chunks of episodes as columns: what sampling returns, the wire carries, and learners train on."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, overload

import gymnasium as gym
import numpy as np

from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.episodes import episode_gather, episode_wire
from rlzmq.episodes.chunk_table import ID_LISTS, TABLE, chosen_positions, ragged_arange, steps_window
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.dirty_tracking import HandedOutEpisode
from rlzmq.episodes.episode_columns import REWARD_SPACE
from rlzmq.episodes.episode_list import EpisodeList
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["EpisodeBatch"]


class EpisodeBatch(EpisodeList[SingleAgentEpisode]):
    """Chunks of episodes on shared columns; a list whose episodes are made when someone asks (`EpisodeList`).

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
        ValueError: When the table's parts differ in length.
    """

    __slots__ = (
        "_handed_out",
        "action_space",
        "agent_ids",
        "columns",
        "custom_data",
        "duration_s",
        "env_index",
        "episode_ids",
        "infos",
        "initial_state",
        "length",
        "lookback",
        "meta",
        "module_ids",
        "multi_agent_episode_ids",
        "observation_space",
        "start",
        "t_started",
        "terminated",
        "truncated",
    )

    def __init__(
        self,
        columns: dict[str, Any],
        *,
        start: Any,
        length: Any,
        lookback: Any = None,
        t_started: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        env_index: Any = None,
        episode_ids: list[str] | None = None,
        agent_ids: list[Any] | None = None,
        module_ids: list[Any] | None = None,
        multi_agent_episode_ids: list[Any] | None = None,
        initial_state: Any = None,
        infos: dict[int, dict[str, Any]] | None = None,
        custom_data: dict[int, dict[str, Any]] | None = None,
        duration_s: Any = None,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.columns = columns
        self.start = np.asarray(start, np.int64)
        num_chunks = len(self.start)

        def per_chunk(values: Any, dtype: Any, default: Any) -> np.ndarray:
            if values is None:
                return np.full(num_chunks, default, dtype)
            return np.asarray(values, dtype)

        self.length = per_chunk(length, np.int64, 0)
        self.lookback = per_chunk(lookback, np.int64, 0)
        self.t_started = per_chunk(t_started, np.int64, 0)
        self.terminated = per_chunk(terminated, np.bool_, False)
        self.truncated = per_chunk(truncated, np.bool_, False)
        self.env_index = per_chunk(env_index, np.int64, -1)
        self.duration_s = None if duration_s is None else np.asarray(duration_s, np.float64)
        self.episode_ids = (
            [uuid.uuid4().hex for _ in range(num_chunks)] if episode_ids is None else episode_ids
        )
        self.agent_ids = agent_ids
        self.module_ids = module_ids
        self.multi_agent_episode_ids = multi_agent_episode_ids
        self.initial_state = initial_state
        self.infos = {} if infos is None else infos
        self.custom_data = {} if custom_data is None else custom_data
        self.observation_space = observation_space
        self.action_space = action_space
        self.meta = {} if meta is None else meta
        self._is_ordinary = False
        self._handed_out: dict[int, HandedOutEpisode] = {}
        for name in (*TABLE, "duration_s", *ID_LISTS):
            values = getattr(self, name)
            if values is not None and len(values) != num_chunks:
                raise ValueError(
                    f"EpisodeBatch.{name}: expected {num_chunks} values, one per chunk, got {len(values)}."
                )

    # -- facts ----------------------------------------------------------------------------------------

    def _num_chunks(self) -> int:
        return len(self.start)

    @property
    def num_env_steps(self) -> int:
        """Number of steps in all chunks, lookback parts left out."""
        return sum(map(len, self)) if self._is_ordinary else int(self.length.sum())

    @property
    def num_slots(self) -> int:
        """First dimension of all columns."""
        leaves = tree_leaves(self.columns.get(Columns.OBS, ()))
        return len(leaves[0]) if leaves else 0

    @property
    def num_bytes(self) -> int:
        """Size of all columns in bytes."""
        return sum(leaf.nbytes for leaf in tree_leaves(self.columns))

    @property
    def extra_names(self) -> list[str]:
        """Names of the extra model outputs among the columns."""
        return [name for name in self.columns if name not in _BASE_COLUMNS]

    def step_slots(self) -> np.ndarray:
        """int64 [num_env_steps], the slot of every step, chunk after chunk."""
        return ragged_arange(self.start, self.length)

    def step_chunks(self) -> np.ndarray:
        """int64 [num_env_steps], the chunk of every step, in `step_slots`' order."""
        return np.repeat(np.arange(len(self.start), dtype=np.int64), self.length)

    def get_returns(self) -> np.ndarray:
        """float64 [C], the sum of each chunk's rewards, lookback parts left out."""
        if (updated := self.updated()) is not self:
            return updated.get_returns()
        rewards = self.columns[Columns.REWARDS][self.step_slots()]
        return np.bincount(self.step_chunks(), weights=rewards, minlength=len(self))

    def __repr__(self) -> str:
        return (
            f"EpisodeBatch(chunks={len(self)}, env_steps={self.num_env_steps}, slots={self.num_slots}, "
            f"columns={list(self.columns)})"
        )

    def validate(self) -> None:
        """Check that every chunk lies within the columns and all columns have the same number of slots.

        Raises:
            ValueError: Naming the column or chunk, the expected and the actual bounds.
        """
        num_slots = self.num_slots
        for name in _BASE_COLUMNS:
            if name not in self.columns:
                raise ValueError(f"EpisodeBatch: expected a column {name!r}, got {list(self.columns)}.")
        for name, column in self.columns.items():
            for leaf in tree_leaves(column):
                if np.ndim(leaf) == 0 or len(leaf) != num_slots:
                    raise ValueError(
                        f"EpisodeBatch, column {name!r}: expected {num_slots} slots, got shape "
                        f"{np.shape(leaf)}."
                    )
        if len(self) == 0:
            return
        inside = (
            (self.length >= 0)
            & (self.length < num_slots)
            & (self.lookback >= 0)
            & (self.start < num_slots)
            & (self.start >= self.lookback)
            & (self.start < num_slots - self.length)
        )
        if not inside.all():
            c = int(np.argmin(inside))
            raise ValueError(
                f"EpisodeBatch, chunk {c}: expected slots within 0…{num_slots - 1}, got start "
                f"{self.start[c]}, length {self.length[c]}, lookback {self.lookback[c]}."
            )
        for leaf in tree_leaves(self.initial_state if self.initial_state is not None else ()):
            if len(leaf) != len(self):
                raise ValueError(
                    f"EpisodeBatch.initial_state: expected {len(self)} rows, got shape {np.shape(leaf)}."
                )

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
        known = self._handed_out.get(position)
        return self._hand_out(position, self.new_item(position)) if known is None else known.episode

    def _items(self) -> Iterator[SingleAgentEpisode]:
        extra_names = self.extra_names
        rows = zip(*(getattr(self, name).tolist() for name in TABLE), strict=True)
        for position, row in enumerate(rows):
            known = self._handed_out.get(position)
            if known is None:
                yield self._hand_out(position, self._episode(position, extra_names, *row))
            else:
                yield known.episode

    def new_item(self, position: int) -> SingleAgentEpisode:
        """One chunk as an episode that this batch does not remember, whatever becomes of it."""
        row = (getattr(self, name).item(position) for name in TABLE)
        return self._episode(position, self.extra_names, *row)

    def _hand_out(self, position: int, episode: SingleAgentEpisode) -> SingleAgentEpisode:
        self._handed_out[position] = HandedOutEpisode(episode)
        return episode

    def updated(self) -> EpisodeBatch:
        """This batch, or, where the list or an item of it was changed, a new one with the changes.

        Raises:
            ValueError: When the items do not fit together, see `from_episodes`.
        """
        if self._is_ordinary:
            batch = EpisodeBatch.from_episodes(self)
            batch.meta = self.meta
            return batch
        if not any(item.is_changed() for item in self._handed_out.values()):
            return self
        handed_out = self._handed_out
        batch = EpisodeBatch.from_episodes(
            handed_out[i].episode if i in handed_out else self.new_item(i) for i in range(len(self))
        )
        batch.env_index, batch.meta = self.env_index, self.meta
        return batch

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "_handed_out"}

    def _episode(
        self,
        position: int,
        extra_names: list[str],
        start: int,
        length: int,
        lookback: int,
        t_started: int,
        terminated: bool,
        truncated: bool,
        env_index: int,
    ) -> SingleAgentEpisode:
        """One chunk as an episode whose buffers are views on the columns."""
        episode = SingleAgentEpisode.__new__(SingleAgentEpisode)
        episode.id_ = self.episode_ids[position]
        episode.agent_id = None if self.agent_ids is None else self.agent_ids[position]
        episode.module_id = None if self.module_ids is None else self.module_ids[position]
        multi_ids = self.multi_agent_episode_ids
        episode.multi_agent_episode_id = None if multi_ids is None else multi_ids[position]
        episode.is_terminated = terminated
        episode.is_truncated = truncated
        episode.t_started = t_started
        episode.t = t_started + length
        episode.custom_data = dict(self.custom_data.get(position, ()))
        episode._duration_s = 0.0 if self.duration_s is None else float(self.duration_s[position])
        episode._last_step_time = None
        episode._observation_space = self.observation_space
        episode._action_space = self.action_space
        state = self.initial_state
        episode.initial_state = None if state is None else tree_map(lambda leaf: leaf[position], state)
        first, num, columns = start - lookback, lookback + length, self.columns

        def view(name: str, count: int, space: gym.Space[Any] | None) -> InfiniteLookbackBuffer:
            column, end = columns[name], first + count
            if isinstance(column, np.ndarray):
                arrays = column[first:end]
            else:
                arrays = tree_map(lambda leaf: leaf[first:end], column)
            return InfiniteLookbackBuffer._of_view(arrays, count, lookback, space)

        episode.observations = view(Columns.OBS, num + 1, self.observation_space)
        episode.actions = view(Columns.ACTIONS, num, self.action_space)
        episode.rewards = view(Columns.REWARDS, num, REWARD_SPACE)
        episode.extra_model_outputs = {name: view(name, num, None) for name in extra_names}
        episode._infos = None
        episode._infos_source = functools.partial(
            episode_gather.dense_infos, self.infos, first, first + num + 1
        )
        return episode

    def select(self, chunks: Any) -> EpisodeBatch:
        """Some of the chunks, in the given order, on the same columns.

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
        """The first ``num_steps`` env steps and the rest, both on the same columns.

        A chunk cut in two: its first part is not done; its second part begins later, with everything before
        as lookback, and its initial state is the ``state_out`` of the step before.

        Raises:
            ValueError: When there are fewer steps, or ``num_steps`` is negative.
        """
        if (updated := self.updated()) is not self:
            return updated.split(num_steps)
        total = self.num_env_steps
        if num_steps == total:
            return self[:], self[len(self) :]
        return self.slice_steps(0, num_steps), self.slice_steps(num_steps, total)

    def slice_steps(self, begin: int, end: int) -> EpisodeBatch:
        """The env steps ``begin…end-1`` (counted over all chunks in order), on the same columns.

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
        """All chunks of several batches, in order.

        Batches on the same columns (parts of a `split`) stay on them; else columns are copied into new ones.
        ``meta`` is about single batches and is empty in the result of more than one.

        Raises:
            ValueError: When the batches have different columns.
        """
        return episode_gather.concat([batch.updated() for batch in batches])

    @classmethod
    def from_episodes(cls, episodes: Iterable[SingleAgentEpisode]) -> EpisodeBatch:
        """A batch of episodes' chunks, copied into new columns.

        Raises:
            TypeError: For anything but SingleAgentEpisodes.
            ValueError: When an episode has no observation, columns that do not fit the others', a reward that
                is not one number, or items that are no numbers, strings or arrays of them.
        """
        return episode_gather.from_episodes(list(episodes))

    def compact(self) -> EpisodeBatch:
        """The same chunks on new columns that hold nothing else."""
        return episode_gather.compact(self.updated())

    # -- the wire -------------------------------------------------------------------------------------

    def to_wire(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The batch as a small msgpack-able header and its arrays (see `episode_wire`), copying nothing.

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
        """The batch that `to_wire` was called on: views on the frames' memory, every bound checked.

        Args:
            header: What `to_wire` returned, after msgpack.
            frames: Buffers (bytes, memoryviews, arrays) in the same order.
            observation_space, action_space: Spaces of one item, which the receiver knows.

        Raises:
            ProtocolError: When header and frames are not what `to_wire` makes: says what was expected where,
                and what came.
        """
        return episode_wire.from_wire(
            header, frames, observation_space=observation_space, action_space=action_space
        )


_BASE_COLUMNS = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)
