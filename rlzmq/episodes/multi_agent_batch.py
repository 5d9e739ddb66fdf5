"""Many chunks of multi-agent episodes as columns: the agents' chunks, and who observed when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from rlzmq.episodes.agent_rows import AgentRows
from rlzmq.episodes.agent_timelines import AgentTrack, Pending, Timeline
from rlzmq.episodes.chunk_table import chosen_positions
from rlzmq.episodes.dirty_tracking import HandedOutMultiAgentEpisode
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_list import EpisodeList
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode

__all__ = ["EPISODE_TABLE", "MultiAgentEpisodeBatch"]

IntArray = NDArray[np.int64]

EPISODE_TABLE = ("env_t_started", "env_t", "lookback", "terminated", "truncated", "env_index")


class MultiAgentEpisodeBatch(EpisodeList[MultiAgentEpisode]):
    """Chunks of multi-agent episodes; a list whose episodes are made when someone asks (`EpisodeList`).

    The agents' chunks lie on columns: one `EpisodeBatch` per module and kind of data (agents of one
    module normally share theirs), which is what a Learner trains on. Items are remembered, and they and the
    list may be changed, as those of an `EpisodeBatch`.

    Example:
        >>> batch = MultiAgentEpisodeBatch.from_episodes(episodes)
        >>> [b.num_env_steps for b in batch.batches_of("default_policy")]  # its agents' steps
        [...]
        >>> head, tail = batch.split(100)  # env steps

    Args:
        rows: The agents' chunks, in groups of equal structure.
        episode_ids: E strings.
        env_t_started, env_t: int64[E], env steps at which the chunks start and end.
        lookback: int64[E], stored env steps from before the start.
        terminated, truncated: bool[E].
        env_index: int64[E], the sub-environment; -1: unknown.
        leftovers: Per episode, what most have not: departed agents, early rewards, custom data, …
        observation_space, action_space: ``gym.spaces.Dict`` (or dict) by agent id, or None.
        agent_to_module_mapping_fn: Of the episodes; not sent over the wire.
        meta: Plain facts about the whole batch, e.g. the runner and its weights version.

    Attributes:
        As the arguments.
    """

    def __init__(
        self,
        rows: Sequence[AgentRows],
        *,
        episode_ids: list[str],
        env_t_started: Any,
        env_t: Any,
        lookback: Any,
        terminated: Any,
        truncated: Any,
        env_index: Any = None,
        leftovers: dict[int, dict[str, Any]] | None = None,
        observation_space: Any = None,
        action_space: Any = None,
        agent_to_module_mapping_fn: Callable[..., str] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.rows = list(rows)
        self.episode_ids = episode_ids
        num = len(episode_ids)
        self.env_t_started: IntArray = np.asarray(env_t_started, np.int64)
        self.env_t: IntArray = np.asarray(env_t, np.int64)
        self.lookback: IntArray = np.asarray(lookback, np.int64)
        self.terminated: NDArray[np.bool_] = np.asarray(terminated, np.bool_)
        self.truncated: NDArray[np.bool_] = np.asarray(truncated, np.bool_)
        self.env_index: IntArray = np.asarray([-1] * num if env_index is None else env_index, np.int64)
        self.leftovers = {} if leftovers is None else leftovers
        self.observation_space = observation_space
        self.action_space = action_space
        self.agent_to_module_mapping_fn = agent_to_module_mapping_fn
        self.meta = {} if meta is None else meta
        self._is_ordinary = False
        self._handed_out: dict[int, HandedOutMultiAgentEpisode] = {}
        for name in EPISODE_TABLE:
            if len(getattr(self, name)) != num:
                raise ValueError(
                    f"MultiAgentEpisodeBatch.{name}: expected {num} values, one per episode, got "
                    f"{len(getattr(self, name))}."
                )

    # -- facts --------------------------------------------------------------------------------------

    def _num_chunks(self) -> int:
        return len(self.episode_ids)

    @property
    def num_env_steps(self) -> int:
        """Number of env steps in all chunks, lookback left out."""
        if self._is_ordinary:
            return sum(map(len, self))
        return int((self.env_t - self.env_t_started).sum())

    @property
    def num_agent_steps(self) -> int:
        """Number of the agents' completed steps, lookback left out."""
        if self._is_ordinary:
            return sum(episode.agent_steps() for episode in self)
        return sum(rows.batch.num_env_steps for rows in self.rows)

    @property
    def agent_batches(self) -> list[EpisodeBatch]:
        """The agents' chunks, one batch per group of equal structure."""
        return [rows.batch for rows in self.rows]

    @property
    def module_ids(self) -> list[str]:
        """Ids of the modules that have steps here, sorted."""
        ids: set[str] = set()
        for batch in self.agent_batches:
            if batch.module_ids is not None:
                ids.update(
                    mid for mid, num in zip(batch.module_ids, batch.length.tolist(), strict=True) if num
                )
        return sorted(ids)

    def batches_of(self, module_id: str) -> list[EpisodeBatch]:
        """The chunks (with at least one step) of the agents that a module acts for."""
        found = []
        for batch in self.agent_batches:
            mask = np.array([mid == module_id for mid in batch.module_ids or ()], np.bool_) & (
                batch.length > 0
            )
            if mask.all() and len(mask):
                found.append(batch)
            elif mask.any():
                found.append(batch.select(mask))
        return found

    def agent_steps_by(self, which: str) -> dict[Any, int]:
        """Completed steps by agent id (``which="agent_ids"``) or module id (``"module_ids"``)."""
        counts: dict[Any, int] = {}
        for batch in self.agent_batches:
            for key, num in zip(getattr(batch, which) or (), batch.length.tolist(), strict=True):
                if num:
                    counts[key] = counts.get(key, 0) + num
        return counts

    def get_returns(self) -> NDArray[np.float64]:
        """float64[E], sum of all agents' rewards of completed steps, lookback left out."""
        if (updated := self.updated()) is not self:
            return updated.get_returns()
        returns = np.zeros(len(self), np.float64)
        for rows in self.rows:
            np.add.at(returns, rows.episode, rows.batch.get_returns())
        return returns

    def __repr__(self) -> str:
        return (
            f"MultiAgentEpisodeBatch(chunks={len(self)}, env_steps={self.num_env_steps}, "
            f"agent_steps={self.num_agent_steps}, modules={self.module_ids})"
        )

    # -- episodes -----------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: SupportsIndex) -> MultiAgentEpisode: ...

    @overload
    def __getitem__(self, index: slice) -> MultiAgentEpisodeBatch: ...

    def __getitem__(self, index: SupportsIndex | slice) -> MultiAgentEpisode | MultiAgentEpisodeBatch:
        if isinstance(index, slice):
            return self.select(np.arange(len(self), dtype=np.int64)[index])
        if self._is_ordinary:
            return list.__getitem__(self, index)
        return self._item(range(len(self))[index])

    def _item(self, e: int) -> MultiAgentEpisode:
        known = self._handed_out.get(e)
        if known is None:
            known = self._handed_out[e] = HandedOutMultiAgentEpisode(self._episode(e))
        return known.episode

    def _items(self) -> Iterator[MultiAgentEpisode]:
        return (self._item(e) for e in range(len(self)))

    def updated(self) -> MultiAgentEpisodeBatch:
        """This batch, or, where the list or an item of it was changed, a new one with the changes.

        Raises:
            ValueError: See `from_episodes`.
        """
        if self._is_ordinary:
            batch = MultiAgentEpisodeBatch.from_episodes(self)
            batch.meta = self.meta
            return batch
        handed_out = self._handed_out
        if not any(item.is_changed() for item in handed_out.values()):
            return self
        batch = MultiAgentEpisodeBatch.from_episodes(
            handed_out[e].episode if e in handed_out else self._episode(e) for e in range(len(self))
        )
        batch.env_index, batch.meta = self.env_index, self.meta
        return batch

    def _fields(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_handed_out"}

    def _episode(self, e: int) -> MultiAgentEpisode:
        left = self.leftovers.get(e, {})
        episode = MultiAgentEpisode(
            self.episode_ids[e],
            left.get("agent_module_ids"),
            self.agent_to_module_mapping_fn,
            observation_space=self.observation_space,
            action_space=self.action_space,
        )
        timeline = Timeline(int(self.env_t_started[e]), int(self.lookback[e]))
        timeline.env_t = int(self.env_t[e])
        timeline.is_terminated, timeline.is_truncated = bool(self.terminated[e]), bool(self.truncated[e])
        timeline.departed = dict(left.get("departed", ()))
        timeline.early_rewards = dict(left.get("early_rewards", ()))
        found = []
        for rows in self.rows:
            offsets, counts = rows.offsets, rows.counts
            for c in np.flatnonzero(rows.episode == e).tolist():
                sae = rows.batch.new_item(c)
                begin = int(offsets[c])
                times = rows.obs_env_ts[begin : begin + int(counts[c])].tolist()
                track = AgentTrack(times, terminated=sae.is_terminated, truncated=sae.is_truncated)
                if track.is_done:
                    track.done_env_t = times[-1]
                if len(times) > 1:
                    track.output_keys = frozenset(sae.extra_model_outputs)
                for name, value in rows.tracks.get(c, {}).items():
                    setattr(track, name, value.copy() if isinstance(value, Pending) else value)
                if self.observation_space:
                    sae.observation_space = self.observation_space.get(sae.agent_id)
                if self.action_space:
                    sae.action_space = self.action_space.get(sae.agent_id)
                found.append((int(rows.order[c]), sae, track))
        for _, sae, track in sorted(found, key=lambda item: item[0]):
            timeline.tracks[sae.agent_id] = track
            episode.agent_episodes[sae.agent_id] = sae
            episode._agent_module_ids.setdefault(
                sae.agent_id, sae.module_id or episode.module_for(sae.agent_id)
            )
        episode._timeline = timeline
        episode.custom_data = dict(left.get("custom_data", ()))
        episode._duration_s = float(left.get("duration_s", 0.0))
        return episode

    @classmethod
    def from_episodes(cls, episodes: Iterable[MultiAgentEpisode]) -> MultiAgentEpisodeBatch:
        """A batch of episodes' chunks, copied into columns; nothing of them is lost.

        Raises:
            ValueError: An agent's data do not make columns (items of different shapes).
        """
        from rlzmq.episodes.multi_agent_gather import from_episodes

        return from_episodes(list(episodes))

    # -- cutting and joining ------------------------------------------------------------------------

    def select(self, episodes: Any) -> MultiAgentEpisodeBatch:
        """Some of the episodes, in the given order, on the same columns.

        Args:
            episodes: int [K], positions (negative ones count from the end), or a bool mask [E].
        """
        if (updated := self.updated()) is not self:
            return updated.select(episodes)
        wanted = chosen_positions(episodes, len(self))
        rows = [group.of_episodes(wanted, len(self)) for group in self.rows]
        return self._like([group for group in rows if len(group.batch)], wanted)

    def _like(self, rows: Sequence[AgentRows], episodes: IntArray) -> MultiAgentEpisodeBatch:
        listed: list[int] = episodes.tolist()
        return MultiAgentEpisodeBatch(
            rows,
            episode_ids=[self.episode_ids[e] for e in listed],
            **{name: getattr(self, name)[episodes] for name in EPISODE_TABLE},
            leftovers={i: self.leftovers[e] for i, e in enumerate(listed) if e in self.leftovers},
            observation_space=self.observation_space,
            action_space=self.action_space,
            agent_to_module_mapping_fn=self.agent_to_module_mapping_fn,
            meta=self.meta,
        )

    def split(self, num_steps: int) -> tuple[MultiAgentEpisodeBatch, MultiAgentEpisodeBatch]:
        """The first `num_steps` env steps and the rest, on the same columns.

        An episode cut in two: an agent's step belongs to the part in which it is completed, so every step
        is in exactly one part; its first part is not done.

        Raises:
            ValueError: There are fewer env steps, or `num_steps` is negative.
        """
        if (updated := self.updated()) is not self:
            return updated.split(num_steps)
        total = self.num_env_steps
        if num_steps == total:
            return self[:], self[len(self) :]
        return self.slice_steps(0, num_steps), self.slice_steps(num_steps, total)

    def slice_steps(self, begin: int, end: int) -> MultiAgentEpisodeBatch:
        """The env steps ``begin … end-1``, counted over all chunks in order, on the same columns.

        Raises:
            ValueError: Unless ``0 <= begin <= end <= num_env_steps``.
        """
        if (updated := self.updated()) is not self:
            return updated.slice_steps(begin, end)
        length = self.env_t - self.env_t_started
        total = int(length.sum())
        if not 0 <= begin <= end <= total:
            raise ValueError(f"expected env steps within 0…{total}, got {begin}…{end}.")
        if begin == end:
            return self[len(self) :]
        ends = np.cumsum(length)
        first_t = self.env_t_started + np.clip(begin - (ends - length), 0, length)
        last_t = self.env_t_started + np.clip(end - (ends - length), 0, length)
        kept = np.flatnonzero((last_t > first_t) | ((length == 0) & (ends >= begin) & (ends < end)))
        new_index = np.full(len(self), -1, np.int64)
        new_index[kept] = np.arange(len(kept))
        is_whole = (first_t == self.env_t_started) & (last_t == self.env_t)
        parts = [group.between(first_t, last_t, is_whole, new_index) for group in self.rows]
        part = self._like([rows for rows, _ in parts if len(rows.batch)], kept)
        for e, left in list(part.leftovers.items()):
            if "departed" in left:  # not those who came and left behind the part's end
                end_t = last_t[kept[e]]
                known = {agent_id: gone for agent_id, gone in left["departed"].items() if gone[2] <= end_t}
                part.leftovers[e] = {**left, "departed": known}
        for e, agent_id, gone in (gone for _, departed in parts for gone in departed):
            left = part.leftovers.get(e, {})
            part.leftovers[e] = {**left, "departed": {**left.get("departed", {}), agent_id: gone}}
        cut_at_end = last_t[kept] < part.env_t
        part.lookback = part.lookback + first_t[kept] - part.env_t_started
        part.env_t_started, part.env_t = first_t[kept], last_t[kept]
        part.terminated, part.truncated = part.terminated & ~cut_at_end, part.truncated & ~cut_at_end
        return part

    @classmethod
    def concat(cls, batches: Iterable[MultiAgentEpisodeBatch]) -> MultiAgentEpisodeBatch:
        """All episodes of several batches, in order; the agents' groups stay on their own columns."""
        listed = [batch.updated() for batch in batches]
        if not listed:
            return cls.from_episodes([])
        if len(listed) == 1:
            return listed[0]
        rows: list[AgentRows] = []
        leftovers: dict[int, dict[str, Any]] = {}
        num = 0
        for batch in listed:
            rows += [
                AgentRows(group.batch, group.episode + num, group.order, group.obs_env_ts, group.tracks)
                for group in batch.rows
            ]
            leftovers.update((e + num, left) for e, left in batch.leftovers.items())
            num += len(batch)
        table: dict[str, Any] = {
            name: np.concatenate([getattr(batch, name) for batch in listed]) for name in EPISODE_TABLE
        }
        return MultiAgentEpisodeBatch(
            rows,
            episode_ids=[id_ for batch in listed for id_ in batch.episode_ids],
            **table,
            leftovers=leftovers,
            observation_space=listed[0].observation_space,
            action_space=listed[0].action_space,
            agent_to_module_mapping_fn=listed[0].agent_to_module_mapping_fn,
        )

    # -- the wire -----------------------------------------------------------------------------------

    def to_wire(self) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """A small msgpack-able header and the arrays, columns not copied (see `multi_agent_wire`)."""
        from rlzmq.episodes.multi_agent_wire import to_wire

        return to_wire(self.updated())

    @classmethod
    def from_wire(
        cls, header: Any, frames: Sequence[Any], *, observation_space: Any = None, action_space: Any = None
    ) -> MultiAgentEpisodeBatch:
        """The batch that `to_wire` was called on: views on the frames' memory, every bound checked.

        Args:
            header: What `to_wire` returned, after msgpack.
            frames: Buffers (bytes, memoryviews, arrays) in the same order.
            observation_space, action_space: Dicts of spaces by agent id, which the receiver knows.

        Raises:
            ProtocolError: Header and frames are not what `to_wire` makes: says what was expected where.
        """
        from rlzmq.episodes.multi_agent_wire import from_wire

        return from_wire(header, frames, observation_space=observation_space, action_space=action_space)
