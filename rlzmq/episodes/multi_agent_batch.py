"""MultiAgentEpisodeBatch: batches of multi-agent episodes, stored as columns, and their construction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_leaves
from rlzmq.episodes import multi_agent_wire
from rlzmq.episodes.agent_rows import AgentRows, track_leftovers
from rlzmq.episodes.agent_timelines import AgentTrack, Pending, Timeline
from rlzmq.episodes.batch_columns import chosen_positions
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_columns import located
from rlzmq.episodes.multi_agent_columns import EPISODE_TABLE, IntArray, MultiAgentBatchColumns
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.shared_columns import is_changed_multi_agent, multi_agent_facts
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["EPISODE_TABLE", "MultiAgentEpisodeBatch", "from_episodes"]

B = TypeVar("B", bound=MultiAgentBatchColumns)


class MultiAgentEpisodeBatch(MultiAgentBatchColumns):
    """A list of chunks of multi-agent episodes. The chunks are created on access (`EpisodeList`).

    The agents' chunks are stored in columns: one `EpisodeBatch` per module and kind of data (usually one per module),
    which a Learner trains on. Items are kept after their creation. They and the list may be changed, as in an
    `EpisodeBatch`.

    Example:
        >>> batch = MultiAgentEpisodeBatch.from_episodes(episodes)
        >>> [b.num_env_steps for b in batch.batches_of("default_policy")]  # its agents' steps
        [...]
        >>> head, tail = batch.split(100)  # env steps

    Args:
        rows: The agents' chunks, in groups of equal structure.
        episode_ids: E strings.
        env_t_started, env_t: int64[E], env steps at which the chunks start and end.
        lookback: int64[E], number of stored env steps before the start.
        terminated, truncated: bool[E].
        env_index: int64[E], the sub-environment; -1: unknown.
        leftovers: Data that most episodes lack, by episode: departed agents, early rewards, custom data, …
        observation_space, action_space: ``gym.spaces.Dict`` (or dict) by agent id, or None.
        agent_to_module_mapping_fn: The episodes' mapping function; not sent over the wire.
        meta: Plain facts about the whole batch, e.g. the runner and its weights version.

    Attributes:
        The arguments.
    """

    # -- episodes -----------------------------------------------------------------------------------

    def _items(self) -> Iterator[MultiAgentEpisode]:
        return (self._item(e) for e in range(len(self)))

    _is_changed = staticmethod(is_changed_multi_agent)

    def new_item(self, e: int) -> MultiAgentEpisode:
        """Return one chunk as a new episode, whose changes this batch ignores."""
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
                track = AgentTrack(times)
                track.end(sae.is_terminated, sae.is_truncated, times[-1])
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
        episode._source = multi_agent_facts(episode)
        return episode

    @classmethod
    def from_episodes(cls, episodes: Iterable[MultiAgentEpisode]) -> MultiAgentEpisodeBatch:
        """Return a batch of episodes' chunks, copied into columns without loss.

        Raises:
            ValueError: An agent's data do not fit into columns (items of different shapes).
        """
        return from_episodes(cls, list(episodes))

    # -- cutting and joining ------------------------------------------------------------------------

    def select(self, episodes: Any) -> MultiAgentEpisodeBatch:
        """Return some of the episodes, in the given order, on the same columns.

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

    def slice_steps(self, begin: int, end: int) -> MultiAgentEpisodeBatch:
        """Return the env steps ``begin … end-1``, counted over all chunks in order, on the same columns.

        If an episode is cut in two, an agent's step belongs to the part in which it is completed, so every step is in
        exactly one part. The first part is not done.

        Raises:
            ValueError: ``0 <= begin <= end <= num_env_steps`` is violated.
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
            if "departed" in left:  # omit agents that joined and left after the part's end
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
        """Return all episodes of several batches, in order. The agents' groups stay on their own columns."""
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
        """Return a small msgpack-able header and the arrays, without copying columns (see `multi_agent_wire`)."""
        return multi_agent_wire.to_wire(self.updated())

    @classmethod
    def from_wire(
        cls, header: Any, frames: Sequence[Any], *, observation_space: Any = None, action_space: Any = None
    ) -> MultiAgentEpisodeBatch:
        """Return the batch of a `to_wire` call: views of the frames' memory, with every bound checked.

        Args:
            header: The header from `to_wire`, after msgpack.
            frames: Buffers (bytes, memoryviews, arrays) in the same order.
            observation_space, action_space: Dicts of spaces by agent id, known to the receiver.

        Raises:
            ProtocolError: Header or frames are invalid; the message names the position and the expected value.
        """
        return multi_agent_wire.from_wire(
            cls, header, frames, observation_space=observation_space, action_space=action_space
        )


class _Group:
    """Chunks that share columns."""

    def __init__(self) -> None:
        self.saes: list[SingleAgentEpisode] = []
        self.episode: list[int] = []
        self.order: list[int] = []
        self.obs_env_ts: list[int] = []
        self.tracks: dict[int, dict[str, Any]] = {}

    def add(self, e: int, order: int, sae: SingleAgentEpisode, track: AgentTrack) -> None:
        num_steps = sae.rewards.len_incl_lookback()
        try:
            left = track_leftovers(track, num_steps)
        except ValueError as error:
            raise located(error, f"Episode {sae.id_!r}", "rewards") from None
        if left:
            self.tracks[len(self.saes)] = left
        self.saes.append(sae)
        self.episode.append(e)
        self.order.append(order)
        self.obs_env_ts += track.obs_env_ts


def from_episodes(cls: type[B], episodes: list[MultiAgentEpisode]) -> B:
    """See `MultiAgentEpisodeBatch.from_episodes`."""
    groups: dict[Any, _Group] = {}
    empty: list[tuple[Any, int, int, SingleAgentEpisode, AgentTrack]] = []
    for e, episode in enumerate(episodes):
        for order, (agent_id, sae) in enumerate(episode.agent_episodes.items()):
            track = episode._timeline.tracks[agent_id]
            kind = (sae.module_id, str(_structure(sae.observations)))
            if sae.rewards.len_incl_lookback() == 0:
                empty.append((kind, e, order, sae, track))
                continue
            outputs = sorted(
                (name, str(_structure(column))) for name, column in sae.extra_model_outputs.items()
            )
            key = (kind, str(_structure(sae.actions)), str(outputs))
            groups.setdefault(key, _Group()).add(e, order, sae, track)
    by_kind = {key[0]: group for key, group in groups.items()}
    for kind, e, order, sae, track in empty:  # without steps, it fits any columns of its module
        group = by_kind.get(kind)
        if group is None:
            group = by_kind[kind] = groups[kind] = _Group()
        group.add(e, order, sae, track)
    left = {e: _episode_leftovers(episode) for e, episode in enumerate(episodes)}
    first = episodes[0] if episodes else None
    return cls(
        [
            AgentRows(EpisodeBatch.from_episodes(g.saes), g.episode, g.order, g.obs_env_ts, g.tracks)
            for g in groups.values()
        ],
        episode_ids=[episode.id_ for episode in episodes],
        env_t_started=[episode.env_t_started for episode in episodes],
        env_t=[episode.env_t for episode in episodes],
        lookback=[episode.len_lookback_buffer for episode in episodes],
        terminated=[episode.is_terminated for episode in episodes],
        truncated=[episode.is_truncated for episode in episodes],
        leftovers={e: data for e, data in left.items() if data},
        observation_space=_observation_spaces(episodes),
        action_space=first.action_space if first else None,
        agent_to_module_mapping_fn=first.agent_to_module_mapping_fn if first else None,
    )


def _observation_spaces(episodes: list[MultiAgentEpisode]) -> Any:
    """Return the observation spaces by agent id, including those changed by connector pieces."""
    if not episodes:
        return None
    spaces = episodes[0].observation_space
    own = {
        agent_id: sae.observation_space
        for episode in episodes
        for agent_id, sae in episode.agent_episodes.items()
        if sae.observation_space is not None and sae.observation_space is not spaces.get(agent_id)
    }
    if not own:
        return spaces
    merged = {**dict(spaces), **own}
    return gym.spaces.Dict(merged) if isinstance(spaces, gym.spaces.Dict) else merged


def _structure(buffer: Any) -> Any:
    """Return the shapes and kinds of one item of a column, without its number of items."""
    if not buffer.len_incl_lookback():
        return None
    item = buffer.get(-buffer.lookback if buffer.lookback else 0, neg_index_as_lookback=True)
    return _keys(item), _signature(item)


def _keys(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _keys(item[key]) for key in sorted(item, key=str)}
    if isinstance(item, tuple):
        return tuple(_keys(part) for part in item)
    return None


def _signature(tree: Any) -> tuple[Any, ...]:
    """Return the shapes and kinds of a tree's leaves. Items with equal signatures can be stacked into one column."""
    return tuple((np.shape(leaf), np.asarray(leaf).dtype.str) for leaf in tree_leaves(tree))


def _episode_leftovers(episode: MultiAgentEpisode) -> dict[str, Any]:
    """Return the data of an episode that is not in the tables."""
    timeline = episode._timeline
    left: dict[str, Any] = {}
    values: dict[str, Any] = {
        "departed": dict(timeline.departed),
        "early_rewards": dict(timeline.early_rewards),
        "custom_data": dict(episode.custom_data),
        "agent_module_ids": {
            agent_id: module_id
            for agent_id, module_id in episode._agent_module_ids.items()
            if agent_id not in episode.agent_episodes
        },
        "duration_s": episode.get_duration_s(),
    }
    left.update((name, value) for name, value in values.items() if value)
    return left
