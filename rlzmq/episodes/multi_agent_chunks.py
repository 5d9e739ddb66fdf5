"""MultiAgentChunks: cutting, slicing and joining MultiAgentEpisodes."""

from __future__ import annotations

import copy
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from rlzmq.episodes.agent_timelines import AgentTrack, Pending, Timeline
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["MultiAgentChunks"]


class MultiAgentChunks:
    """Mixin with the chunk operations of `MultiAgentEpisode`."""

    id_: str
    agent_episodes: dict[Any, SingleAgentEpisode]
    custom_data: dict[str, Any]
    _timeline: Timeline
    _agent_module_ids: dict[Any, str]
    _duration_s: float
    _last_step_time: float | None

    if TYPE_CHECKING:

        def __len__(self) -> int: ...

        def _where(self) -> str: ...

        def _derive(self, timeline: Timeline, agent_episodes: Mapping[Any, SingleAgentEpisode]) -> Self: ...

    def cut(self, len_lookback_buffer: int = 0) -> Self:
        """Return the continuation of this episode: an empty chunk that starts where this one ends.

        It contains the latest observations, the last env steps as lookback, and everything that hangs: the actions
        that wait for their outcome, with the rewards so far. Their steps are completed in the continuation, so no
        step and no reward is lost or counted twice. This chunk does not change.

        Args:
            len_lookback_buffer: Number of env steps to look back at, >= 0; more if needed to reach the observations
                of hanging actions.

        Returns:
            A MultiAgentEpisode with the same id, ``env_t_started = self.env_t`` and length 0.

        Raises:
            RuntimeError: The episode is done.
            ValueError: The lookback is negative.
        """
        old = self._timeline
        if old.is_done:
            raise RuntimeError(f"{self._where()}: expected an ongoing episode to cut, but it is done.")
        wanted = operator.index(len_lookback_buffer)
        if wanted < 0:
            raise ValueError(
                f"len_lookback_buffer: expected at least 0 env steps, got {len_lookback_buffer}."
            )
        new = old.carry_on(wanted)
        first = new.env_t_started - new.lookback
        episodes: dict[Any, SingleAgentEpisode] = {}
        for agent_id, track in old.tracks.items():
            num = len(track.obs_env_ts)
            begin = min(bisect_left(track.obs_env_ts, first), num - 1)
            sae = self.agent_episodes[agent_id]
            if not track.is_done:
                episodes[agent_id] = sae.cut(len_lookback_buffer=num - 1 - begin)
            elif begin < num - 1:
                episodes[agent_id] = _part(sae, begin, num - 1, num - 1 - begin, is_last=True)
            else:
                new.departed[agent_id] = track.departure
                continue
            new.tracks[agent_id] = track.carry_on(begin)
        chunk = self._derive(new, episodes)
        chunk._last_step_time = self._last_step_time
        return chunk

    def __getitem__(self, item: slice) -> Self:
        if not isinstance(item, slice):
            raise NotImplementedError(
                f"{self._where()}: expected a slice (episode[a:b]), got {item!r}. Use the getters for "
                "single steps."
            )
        return self.slice(item)

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> Self:
        """Return the env steps of a slice as an episode with the same id.

        A step of an agent belongs to the env step of its observation. If its outcome is after the slice's end, it
        hangs there. Done flags are kept for agents that are done within the slice.

        Args:
            slice_: Env steps, from 0 for the chunk's first one; negative ones count from the end. Bounds outside of
                the chunk are clipped.
            len_lookback_buffer: Number of env steps to look back at from the slice's start, as far as they exist;
                None: as many as this episode has. A slice from this chunk's start looks back further if needed to
                reach the observations of its first steps.

        Raises:
            NotImplementedError: The slice's step is not 1.
        """
        if slice_.step not in (None, 1):
            raise NotImplementedError(f"{self._where()}: expected a slice of step 1, got {slice_}.")
        old = self._timeline
        start, stop, _ = slice_.indices(len(self))
        stop = max(start, stop)
        wanted = old.lookback if len_lookback_buffer is None else operator.index(len_lookback_buffer)
        if wanted < 0:
            raise ValueError(
                f"len_lookback_buffer: expected at least 0 env steps, got {len_lookback_buffer}."
            )
        if start == 0:
            wanted = max(wanted, self._env_steps_to_first_own())
        new = Timeline(old.env_t_started + start, min(wanted, start + old.lookback))
        new.env_t = old.env_t_started + stop
        # Agents that joined and left after the slice's end may still join it.
        new.departed = {agent_id: gone for agent_id, gone in old.departed.items() if gone[2] <= new.env_t}
        if new.env_t == old.env_t:
            new.is_terminated, new.is_truncated = old.is_terminated, old.is_truncated
            new.early_rewards = dict(old.early_rewards)
        first = new.env_t_started - new.lookback
        episodes: dict[Any, SingleAgentEpisode] = {}
        for agent_id, track in old.tracks.items():
            sae = self.agent_episodes[agent_id]
            begin = bisect_left(track.obs_env_ts, first)
            if start == 0:
                # As in `cut`: the first step of this chunk may start from an observation long ago.
                begin = min(begin, sae.rewards.lookback)
            end = bisect_right(track.obs_env_ts, new.env_t) - 1
            is_last = end == len(track.obs_env_ts) - 1
            is_done = track.is_done and is_last and track.done_env_t <= new.env_t
            if is_done and (begin > end or (begin == end and track.done_env_t <= new.env_t_started)):
                new.departed[agent_id] = track.departure
            elif begin <= end:
                # At this chunk's start, steps that began before it but ended in it belong to it.
                first_own = (
                    bisect_left(track.obs_env_ts, new.env_t_started) if start else sae.rewards.lookback
                )
                lookback = min(max(first_own - begin, 0), end - begin)
                episodes[agent_id] = _part(sae, begin, end, lookback, is_last=is_done)
                new.tracks[agent_id] = kept = AgentTrack(
                    track.obs_env_ts[begin : end + 1], output_keys=track.output_keys
                )
                if is_done:
                    kept.end(*track.departure)
                if start == 0 or track.obs_env_ts[0] > new.env_t_started:
                    kept.reward_before_start = track.reward_before_start
                if track.obs_env_ts[end] < new.env_t:
                    if is_last:
                        kept.pending = None if track.pending is None else track.pending.copy()
                        kept.reward = track.reward
                    else:
                        kept.pending, kept.reward = _step(sae, end)
        return self._derive(new, episodes)

    def _env_steps_to_first_own(self) -> int:
        """Return the number of env steps from the earliest observation acted on in this chunk to the chunk's start."""
        longest = 0
        for agent_id, track in self._timeline.tracks.items():
            sae = self.agent_episodes[agent_id]
            if len(sae) or track.pending is not None:
                first_env_t = track.obs_env_ts[sae.rewards.lookback]
                longest = max(longest, self._timeline.env_t_started - first_env_t)
        return longest

    def concat_episode(self, other: Self) -> None:
        """Append the following chunk (a continuation from `cut`, or a slice), in place.

        Args:
            other: A chunk of the same episode that starts where this one ends.

        Raises:
            ValueError: The other chunk is of another episode or does not start here, this one is done, or an agent's
                data do not fit.
        """
        mine, theirs = self._timeline, other._timeline
        if other.id_ != self.id_:
            raise ValueError(
                f"{self._where()}: expected a chunk of the same episode, got one of {other.id_}."
            )
        if mine.is_done:
            raise ValueError(f"{self._where()}: expected an ongoing episode to append to, but it is done.")
        if theirs.env_t_started != mine.env_t:
            raise ValueError(
                f"{self._where()}: expected a chunk that starts at env step {mine.env_t}, got "
                f"{theirs.env_t_started}."
            )
        for agent_id, track in theirs.tracks.items():
            sae = other.agent_episodes[agent_id]
            if agent_id not in mine.tracks:
                if agent_id not in mine.departed:
                    self.agent_episodes[agent_id] = copy.deepcopy(sae)
                    mine.tracks[agent_id] = copy.deepcopy(track)
                continue
            own = mine.tracks[agent_id]
            if own.is_done:
                continue
            own_sae = self.agent_episodes[agent_id]
            lookback = sae.observations.lookback
            if sae.t_started == own_sae.t + 1 and own.pending is not None:
                # The other chunk is a slice: the step that hangs here ends with its first observation.
                own_sae.add_env_step(
                    sae.get_observations(0),
                    own.pending.action,
                    own.reward,
                    sae.get_infos(0),
                    extra_model_outputs=own.pending.extra_model_outputs,
                )
                own.obs_env_ts.append(track.obs_env_ts[lookback])
            own_sae.concat_episode(sae)
            own.obs_env_ts.extend(track.obs_env_ts[lookback + 1 :])
            mine.tracks[agent_id] = replace(
                track.carry_on(0), obs_env_ts=own.obs_env_ts, reward_before_start=own.reward_before_start
            )
        for agent_id, (terminated, truncated, env_t) in theirs.departed.items():
            departed = mine.tracks.get(agent_id)
            if departed is None:
                mine.departed[agent_id] = (terminated, truncated, env_t)
            elif not departed.is_done:
                departed.end(terminated, truncated, env_t)
                self.agent_episodes[agent_id].is_terminated = terminated
                self.agent_episodes[agent_id].is_truncated = truncated
        mine.early_rewards = dict(theirs.early_rewards)
        mine.env_t = theirs.env_t
        mine.is_terminated, mine.is_truncated = theirs.is_terminated, theirs.is_truncated
        self._agent_module_ids.update(other._agent_module_ids)
        self.custom_data.update(other.custom_data)
        self._duration_s += other._duration_s
        self._last_step_time = other._last_step_time


def _part(
    sae: SingleAgentEpisode, begin: int, end: int, lookback: int, *, is_last: bool
) -> SingleAgentEpisode:
    """Return an agent's stored steps ``begin … end-1``; the first `lookback` of them become lookback."""
    part = sae._chunk(begin, end, lookback, sae.t_started - sae.rewards.lookback + begin + lookback)
    if is_last:
        part.is_terminated, part.is_truncated = sae.is_terminated, sae.is_truncated
    part.custom_data = dict(sae.custom_data)
    return part


def _step(sae: SingleAgentEpisode, k: int) -> tuple[Pending, Any]:
    """Return the k-th stored step (including the lookback part) as a hanging one, and its reward."""
    position = k - sae.rewards.lookback
    outputs = {
        key: buffer.get(position, neg_index_as_lookback=True)
        for key, buffer in sae.extra_model_outputs.items()
    }
    pending = Pending(sae.actions.get(position, neg_index_as_lookback=True), outputs)
    return pending, sae.rewards.get(position, neg_index_as_lookback=True)
