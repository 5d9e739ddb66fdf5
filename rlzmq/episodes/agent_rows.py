"""AgentRows: agents' chunks on shared columns, and their positions in the multi-agent episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_map
from rlzmq.episodes.agent_timelines import AgentTrack
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.step_values import as_reward

__all__ = ["AgentRows", "track_leftovers"]

IntArray = NDArray[np.int64]


class AgentRows:
    """Chunks of agents' episodes on shared columns, and their positions in the multi-agent episodes.

    Attributes:
        batch: The chunks, with agent_ids and module_ids.
        episode: int64[C], index of each chunk's multi-agent episode.
        order: int64[C], position among the agents of its episode.
        obs_env_ts: int64[sum of lookback + length + 1], env steps of the chunks' stored observations, one
            chunk after the other.
        tracks: Data that most chunks lack, e.g. a hanging action (keyword arguments of
            `AgentTrack`), by chunk.
    """

    __slots__ = ("batch", "episode", "obs_env_ts", "order", "tracks")

    def __init__(
        self,
        batch: EpisodeBatch,
        episode: Any,
        order: Any,
        obs_env_ts: Any,
        tracks: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        self.batch: EpisodeBatch = batch
        self.episode: IntArray = np.asarray(episode, np.int64)
        self.order: IntArray = np.asarray(order, np.int64)
        self.obs_env_ts: IntArray = np.asarray(obs_env_ts, np.int64)
        self.tracks: dict[int, dict[str, Any]] = {} if tracks is None else tracks

    @property
    def counts(self) -> IntArray:
        """Number of stored observations of each chunk, int64[C]."""
        counts: IntArray = self.batch.lookback + self.batch.length + 1
        return counts

    @property
    def offsets(self) -> IntArray:
        """The position at which each chunk's part of `obs_env_ts` begins, int64[C]."""
        counts = self.counts
        offsets: IntArray = np.cumsum(counts) - counts
        return offsets

    def select(self, chunks: IntArray, episode: IntArray) -> AgentRows:
        """Return some of the chunks; ``episode[i]`` is the new index of the i-th chunk's episode."""
        listed: list[int] = chunks.tolist()
        return AgentRows(
            self.batch.select(chunks),
            episode,
            self.order[chunks],
            self.obs_env_ts[ragged_arange(self.offsets[chunks], self.counts[chunks])],
            {i: self.tracks[c] for i, c in enumerate(listed) if c in self.tracks} if self.tracks else {},
        )

    def of_episodes(self, episodes: IntArray, num_episodes: int) -> AgentRows:
        """Return the chunks of some episodes, in their current order.

        Args:
            episodes: int64[K], episodes in ``0 … num_episodes-1``, each any number of times; their positions are the
                new indices.
        """
        counts = np.bincount(self.episode, minlength=num_episodes)
        offsets = np.cumsum(counts) - counts
        by_episode = np.argsort(self.episode, kind="stable")
        chunks = by_episode[ragged_arange(offsets[episodes], counts[episodes])]
        new_index = np.repeat(np.arange(len(episodes)), counts[episodes])
        order = np.argsort(chunks, kind="stable")
        return self.select(chunks[order], new_index[order])

    def between(
        self, first_t: IntArray, last_t: IntArray, is_whole: NDArray[np.bool_], new_index: IntArray
    ) -> tuple[AgentRows, list[tuple[int, Any, tuple[bool, bool, int]]]]:
        """Return the chunks' steps that are completed in env steps ``(first_t, last_t]`` of their episodes.

        Args:
            first_t, last_t: int64[E], bounds by episode.
            is_whole: bool[E], whether the bounds are the episode's own; agents without a step are then kept, too.
            new_index: int64[E], the new index of each episode; -1: left out.

        Returns:
            The chunks, and (new episode, agent id, (terminated, truncated, env step)) for the agents that are done by
            the part's end, which a part without the agent's chunk needs.
        """
        counts, offsets, batch = self.counts, self.offsets, self.batch
        chunk_of = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(self.obs_env_ts)) - offsets[chunk_of]
        episode_of = self.episode[chunk_of]
        # The observations after the chunks' own steps.
        own = position > batch.lookback[chunk_of]
        before = own & (self.obs_env_ts <= first_t[episode_of])
        within = own & ~before & (self.obs_env_ts <= last_t[episode_of])
        num_before = np.bincount(chunk_of[before], minlength=len(counts))
        num_within = np.bincount(chunk_of[within], minlength=len(counts))
        is_there = new_index[self.episode] >= 0
        is_kept = is_there & ((num_within > 0) | is_whole[self.episode])
        departed = self._departed(np.flatnonzero(is_there & ~is_kept), last_t, new_index)
        chunks = np.flatnonzero(is_kept)
        num_before, num_within = num_before[chunks], num_within[chunks]
        part = self.select(chunks, new_index[self.episode[chunks]])
        new = part.batch
        starts_later = num_before > 0
        is_cut = num_before + num_within < new.length
        stored = new.lookback + num_before + num_within + 1
        part.obs_env_ts = self.obs_env_ts[ragged_arange(offsets[chunks], stored)]
        new.start = new.start + num_before
        new.lookback = new.lookback + num_before
        new.t_started = new.t_started + num_before
        new.length = num_within.astype(np.int64)
        new.terminated = new.terminated & ~is_cut
        new.truncated = new.truncated & ~is_cut
        if new.duration_s is not None:
            new.duration_s = new.duration_s * (num_within / np.maximum(batch.length[chunks], 1))
        if new.initial_state is not None and starts_later.any() and Columns.STATE_OUT in new.columns:
            slots = new.start[starts_later] - 1

            def take_over(states: NDArray[Any], state_out: NDArray[Any]) -> NDArray[Any]:
                states = states.copy()
                states[starts_later] = state_out[slots]
                return states

            new.initial_state = tree_map(take_over, new.initial_state, new.columns[Columns.STATE_OUT])
        for c, track in list(part.tracks.items()):
            fresh = (
                {name: value for name, value in track.items() if name == "output_keys"}
                if is_cut[c]
                else track
            )
            if starts_later[c]:
                fresh = {name: value for name, value in fresh.items() if name != "reward_before_start"}
            part.tracks[c] = fresh
        return part, departed

    def _departed(
        self, chunks: IntArray, last_t: IntArray, new_index: IntArray
    ) -> list[tuple[int, Any, tuple[bool, bool, int]]]:
        """Return those of the chunks' agents that are done by ``last_t`` of their episode; see `between`."""
        batch, departed = self.batch, []
        last_seen = self.obs_env_ts[self.offsets + self.counts - 1]
        for c in chunks[batch.terminated[chunks] | batch.truncated[chunks]].tolist():
            e = int(self.episode[c])
            done_env_t = int(self.tracks.get(c, {}).get("done_env_t", last_seen[c]))
            if done_env_t <= last_t[e]:
                agent_id = None if batch.agent_ids is None else batch.agent_ids[c]
                gone = bool(batch.terminated[c]), bool(batch.truncated[c]), done_env_t
                departed.append((int(new_index[e]), agent_id, gone))
        return departed


def track_leftovers(track: AgentTrack, num_steps: int) -> dict[str, Any]:
    """Return the data of a track that is not in the columns.

    Raises:
        ValueError: A reward that belongs to no step yet is not a single number.
    """
    left: dict[str, Any] = {}
    if track.pending is not None:
        left["pending"] = track.pending.copy()
    for name in ("reward", "reward_before_start"):
        value = as_reward(getattr(track, name))
        if value != 0:
            left[name] = value
    if track.is_done and track.done_env_t != track.obs_env_ts[-1]:
        left["done_env_t"] = track.done_env_t
    if num_steps == 0 and track.output_keys is not None:
        left["output_keys"] = track.output_keys
    return left
