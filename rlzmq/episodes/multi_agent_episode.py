"""MultiAgentEpisode: data of several agents in one episode of a multi-agent environment."""

from __future__ import annotations

import copy
import operator
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import gymnasium as gym

from rlzmq.core.errors import MultiAgentEnvError
from rlzmq.episodes.agent_timelines import (
    ALL_AGENTS,
    LAST_OBSERVATION,
    AgentEvent,
    AgentTrack,
    Pending,
    Timeline,
)
from rlzmq.episodes.columns import default_agent_to_module_mapping_fn
from rlzmq.episodes.episode_columns import located
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.multi_agent_getters import MultiAgentGetters
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.episodes.step_values import as_reward

__all__ = ["MultiAgentEpisode"]

MappingFn = Callable[[Any, Any], str]


class MultiAgentEpisode(MultiAgentGetters):
    """One episode (or a chunk of one) of several agents that need not act at the same time.

    Every agent has its own `SingleAgentEpisode` with its own steps. A step of an agent lasts from one of its
    observations to the next one, for any number of env steps; the rewards in between are summed. An action without a
    next observation is *hanging*. A common timeline stores the env step of each agent's observations, from which
    views by env step are derived.

    Example:
        >>> episode = MultiAgentEpisode()
        >>> episode.add_env_reset(observations={"a": 0, "b": 100})
        >>> episode.add_env_step({"a": 1}, {"a": 10, "b": 20}, {"a": 1, "b": 2})
        >>> episode.get_observations(-1), episode.get_actions(-1)
        ({'a': 1}, {'a': 10, 'b': 20})
        >>> len(episode.agent_episodes["a"]), len(episode.agent_episodes["b"])
        (1, 0)

    Args:
        id_: Unique id; generated if None. Chunks of one episode share it.
        agent_module_ids: Module ids of agents that are already known.
        agent_to_module_mapping_fn: ``(agent_id, episode) -> module id``, called once per agent and episode.
        observations: One dict (agent id -> observation) per env step, including the reset.
        observation_space: ``gym.spaces.Dict`` (or dict) of the agents' spaces by agent id.
        infos: One dict per env step, including the reset; None: no infos.
        actions: One dict per env step: the actions of the agents that acted on the previous observations.
        action_space: Like `observation_space`.
        rewards: One dict per env step; there may be one more than actions, with the rewards of hanging actions.
        terminateds, truncateds: Flags at the end by agent id, ``"__all__"`` for all. An agent that did not act on its
            last observation was done with it.
        extra_model_outputs: One dict (agent id -> {key: value}) per env step.
        env_t_started: Env step at which the chunk starts (after its lookback part).
        agent_t_started: Each agent's own time step at the chunk's start; missing agents start at 0.
        len_lookback_buffer: Number of the given env steps that are lookback; ``"auto"``: all.

    Attributes:
        id_: The episode's id.
        observation_space, action_space: The arguments ({} if None).
        agent_to_module_mapping_fn: The argument.
        agent_episodes: Agent id -> the agent's `SingleAgentEpisode`.
        SKIP_ENV_TS_TAG: See `env_t_to_agent_t`.
        custom_data: User data, deep-copied by `cut` and merged by `concat_episode`.

    Raises:
        ValueError: The lengths of the lists do not match.
        MultiAgentEnvError: The data contradict each other (see `add_env_step`).
    """

    SKIP_ENV_TS_TAG = "S"

    def __init__(
        self,
        id_: str | None = None,
        agent_module_ids: Mapping[Any, str] | None = None,
        agent_to_module_mapping_fn: MappingFn | None = None,
        *,
        observations: Sequence[Mapping[Any, Any]] | None = None,
        observation_space: gym.Space[Any] | Mapping[Any, gym.Space[Any]] | None = None,
        infos: Sequence[Mapping[Any, Any]] | None = None,
        actions: Sequence[Mapping[Any, Any]] | None = None,
        action_space: gym.Space[Any] | Mapping[Any, gym.Space[Any]] | None = None,
        rewards: Sequence[Mapping[Any, Any]] | None = None,
        terminateds: Mapping[Any, bool] | None = None,
        truncateds: Mapping[Any, bool] | None = None,
        extra_model_outputs: Sequence[Mapping[Any, Any]] | None = None,
        env_t_started: int | None = None,
        agent_t_started: Mapping[Any, int] | None = None,
        len_lookback_buffer: int | str = "auto",
    ) -> None:
        self.id_: str = id_ or uuid.uuid4().hex
        self.agent_to_module_mapping_fn: MappingFn = (
            agent_to_module_mapping_fn or default_agent_to_module_mapping_fn
        )
        self.observation_space: Mapping[Any, gym.Space[Any]] = cast(Any, observation_space or {})
        self.action_space: Mapping[Any, gym.Space[Any]] = cast(Any, action_space or {})
        self.custom_data: dict[str, Any] = {}
        self.agent_episodes: dict[Any, SingleAgentEpisode] = {}
        self._agent_module_ids: dict[Any, str] = dict(agent_module_ids or {})
        self._duration_s = 0.0
        self._last_step_time: float | None = None

        num_steps = max(len(rewards or ()), len(actions or ()))
        if len_lookback_buffer != "auto" and (
            not isinstance(len_lookback_buffer, int) or len_lookback_buffer < 0
        ):
            raise ValueError(
                f"len_lookback_buffer: expected 'auto' or an int >= 0, got {len_lookback_buffer!r}."
            )
        lookback = num_steps if len_lookback_buffer == "auto" else min(int(len_lookback_buffer), num_steps)
        self._timeline = Timeline(env_t_started or 0, lookback)
        terminateds, truncateds = terminateds or {}, truncateds or {}
        if observations:
            self._check_given(num_steps, observations, infos, actions, rewards, extra_model_outputs)
            of_observations = [_padded(data, num_steps + 1) for data in (observations, infos)]
            of_steps = [_padded(data, num_steps) for data in (actions, rewards, extra_model_outputs)]
            self._add_steps(num_steps, of_observations, of_steps, terminateds, truncateds)
            for agent_id, track in self._timeline.tracks.items():
                before_start = sum(env_t < self.env_t_started for env_t in track.obs_env_ts)
                t_started = (agent_t_started or {}).get(agent_id, 0)
                self.agent_episodes[agent_id]._look_back(before_start, t_started)
        elif num_steps:
            raise ValueError(
                f"expected observations with {num_steps} env steps of actions or rewards, got none."
            )
        self._timeline.is_terminated |= bool(terminateds.get(ALL_AGENTS))
        self._timeline.is_truncated |= bool(truncateds.get(ALL_AGENTS))

    def _check_given(self, num_steps: int, observations: Any, infos: Any, *of_steps: Any) -> None:
        """Check the numbers of dicts that the constructor got. The last actions and outputs may hang."""
        if len(observations) > num_steps + 1 or len(infos or ()) not in (0, len(observations)):
            raise ValueError(
                f"{self._where()}: expected observations and infos of {num_steps} env steps plus the reset, got "
                f"{len(observations)} and {len(infos or ())}."
            )
        num_rewards = len(of_steps[1] or ())
        for name, data in zip(("actions", "rewards", "extra_model_outputs"), of_steps, strict=True):
            hangs = name != "rewards" and num_rewards == num_steps
            if data and len(data) != num_steps and not (hangs and len(data) == num_steps - 1):
                raise ValueError(
                    f"{self._where()}: expected {name} of {num_steps} env steps, got {len(data)}."
                )

    def _add_steps(
        self,
        num_steps: int,
        of_observations: Sequence[Sequence[Mapping[Any, Any]]],
        of_steps: Sequence[Sequence[Mapping[Any, Any]]],
        terminateds: Mapping[Any, bool],
        truncateds: Mapping[Any, bool],
    ) -> None:
        """Add the env steps that the constructor got, from the start of the lookback part."""
        timeline = self._timeline
        timeline.env_t = timeline.env_t_started - timeline.lookback
        observations, infos = of_observations
        self._apply(timeline.reset(observations[0], infos[0]))
        for step, (action, reward, outputs) in enumerate(zip(*of_steps, strict=True), 1):
            ends = (terminateds, truncateds) if step == num_steps else ({}, {})
            self._advance(observations[step], action, reward, infos[step], *ends, outputs)
        for agent_id, track in timeline.tracks.items():
            is_own = terminateds.get(agent_id) or truncateds.get(agent_id)
            if not num_steps:
                track.terminated = bool(terminateds.get(agent_id, terminateds.get(ALL_AGENTS)))
                track.truncated = bool(truncateds.get(agent_id, truncateds.get(ALL_AGENTS)))
                track.done_env_t = timeline.env_t if track.is_done else -1
                episode = self.agent_episodes[agent_id]
                episode.is_terminated, episode.is_truncated = track.terminated, track.truncated
            elif track.is_done and is_own and track.pending is None and not track.reward:
                track.done_env_t = track.obs_env_ts[-1]  # it was done with its last observation

    # -- growing ------------------------------------------------------------------------------------

    def add_env_reset(
        self, *, observations: Mapping[Any, Any], infos: Mapping[Any, Any] | None = None
    ) -> None:
        """Add the first observations to an empty episode.

        Args:
            observations: Observations of the agents present at the start, by agent id; others may join later.
            infos: Their info dicts.

        Raises:
            ValueError: The episode was reset or stepped before, or is done. The episode is then unchanged, as after
                an error in `agent_to_module_mapping_fn`.
        """
        if self.is_done or self.agent_episodes or self.env_t != 0:
            raise ValueError(
                f"{self._where()}: expected an empty episode to reset, but it is at env step {self.env_t} with "
                f"{len(self.agent_episodes)} agents. Make a new MultiAgentEpisode for every env reset."
            )
        self._map(observations)
        self._apply(self._timeline.reset(observations, infos or {}))
        self._last_step_time = time.perf_counter()

    def add_env_step(
        self,
        observations: Mapping[Any, Any],
        actions: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        infos: Mapping[Any, Any] | None = None,
        *,
        terminateds: Mapping[Any, bool] | None = None,
        truncateds: Mapping[Any, bool] | None = None,
        extra_model_outputs: Mapping[Any, Mapping[str, Any]] | None = None,
    ) -> None:
        """Add one env step. Every argument maps agent ids to values and omits agents without a value.

        An agent with an action and an observation makes a complete step. With only an action, its step hangs. An
        observation completes a hanging step, or is a new agent's first one. Rewards are summed until the agent's next
        observation. An agent that terminates without a last observation keeps its previous one as the last. The
        episode is terminated with ``terminateds["__all__"]``, or when all known agents are done.

        Args:
            observations: Next observations, by agent.
            actions: Actions taken in this env step.
            rewards: Rewards of this env step; none is needed for an agent that waits for its next observation.
            infos: Info dicts (or anything else) that belong to the observations.
            terminateds, truncateds: Done flags; ``"__all__"`` applies to all agents. An agent may be both.
            extra_model_outputs: Agent -> {key: value} for the actions, e.g. ``{"a": {"action_logp": -0.7}}``.

        Raises:
            MultiAgentEnvError: The episode, or an agent with data, is done already; an agent acted without an
                observation (or twice on one), got an observation without having acted, acted and observed without a
                reward, or acted and was truncated without a last observation; rewards that must be summed are not
                numbers, or extra model outputs are not a dict. The episode is then unchanged. Or an item does not fit
                its column of an array-backed episode, which is then of no more use.
        """
        self._advance(
            observations,
            actions,
            rewards,
            infos or {},
            terminateds or {},
            truncateds or {},
            extra_model_outputs or {},
        )
        now = time.perf_counter()
        if self._last_step_time is not None:
            self._duration_s += now - self._last_step_time
        self._last_step_time = now

    def _advance(self, observations: Mapping[Any, Any], *step: Mapping[Any, Any]) -> None:
        """Add an env step; see `Timeline.advance`."""
        self._map(observations)
        self._apply(self._timeline.advance(observations, *step, where=self._where()))

    def _map(self, observations: Mapping[Any, Any]) -> None:
        """Map new agents to their modules, before anything is changed: the mapping function may fail."""
        for agent_id, observation in observations.items():
            known = agent_id in self._timeline.tracks or agent_id in self._timeline.departed
            if observation is not None and not known:
                self.module_for(agent_id)

    def _apply(self, events: Sequence[AgentEvent]) -> None:
        """Apply the timeline's changes to the agents' episodes."""
        for event in events:
            try:
                self._apply_event(event)
            except ValueError as error:  # of an array-backed column
                raise MultiAgentEnvError(
                    f"{self._where()}, env step {self.env_t}, agent {event.agent_id!r}: {error}"
                ) from error

    def _apply_event(self, event: AgentEvent) -> None:
        if event.kind == "reset":
            sae = SingleAgentEpisode(**self._agent_facts(event.agent_id))
            sae.add_env_reset(event.observation, event.info)
            self.agent_episodes[event.agent_id] = sae
            return
        sae = self.agent_episodes[event.agent_id]
        if event.kind == "end":
            sae.is_terminated, sae.is_truncated = event.terminated, event.truncated
            return
        observation, info = event.observation, event.info
        if observation is LAST_OBSERVATION:
            observation = sae.get_observations(-1)
            info = sae.get_infos(-1) if info is None else info
        sae.add_env_step(
            observation,
            event.action,
            event.reward,
            info,
            terminated=event.terminated,
            truncated=event.truncated,
            extra_model_outputs=dict(event.extra_model_outputs),
        )

    def truncate(self) -> None:
        """End the episode here, truncated for all agents that are not done. Hanging actions are dropped.

        Used after an environment has failed: the failed step is not part of the episode.
        """
        for agent_id in self._timeline.truncate():
            self.agent_episodes[agent_id].is_truncated = True

    def prune(self) -> None:
        """Remove the agents without a step in this chunk (all their data are lookback, or hanging)."""
        for agent_id in [agent_id for agent_id, sae in self.agent_episodes.items() if len(sae) == 0]:
            track = self._timeline.tracks.pop(agent_id)
            del self.agent_episodes[agent_id]
            if track.is_done:
                self._timeline.departed[agent_id] = track.departure

    def to_numpy(self) -> MultiAgentEpisode:
        """Convert all agents' data to arrays ``[num_items, ...]``, in place, and return this episode."""
        for sae in self.agent_episodes.values():
            if len(sae) > 0:
                sae.to_numpy()
        return self

    def validate(self) -> None:
        """Check that the agents' data and the timeline fit together.

        Raises:
            ValueError: They do not fit; the text names the agent.
        """
        timeline = self._timeline
        if set(timeline.tracks) != set(self.agent_episodes):
            raise ValueError(
                f"{self._where()}: tracks of {set(timeline.tracks)}, episodes of {set(self.agent_episodes)}."
            )
        for agent_id, track in timeline.tracks.items():
            sae = self.agent_episodes[agent_id]
            sae.validate()
            num_observations = sae.observations.len_incl_lookback()
            where = f"{self._where()}, agent {agent_id!r}"
            if len(track.obs_env_ts) != num_observations:
                raise ValueError(
                    f"{where}: expected {len(track.obs_env_ts)} observations, got {num_observations}."
                )
            ascending = all(a < b for a, b in zip(track.obs_env_ts, track.obs_env_ts[1:], strict=False))
            if not ascending or track.obs_env_ts[-1] > timeline.env_t:
                raise ValueError(
                    f"{where}: env steps {track.obs_env_ts} of its observations are not in order."
                )
            if (sae.is_terminated, sae.is_truncated) != (track.terminated, track.truncated):
                raise ValueError(f"{where}: done flags differ between its episode and the timeline.")

    # -- chunks -------------------------------------------------------------------------------------

    def cut(self, len_lookback_buffer: int = 0) -> MultiAgentEpisode:
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

    def __getitem__(self, item: slice) -> MultiAgentEpisode:
        if not isinstance(item, slice):
            raise NotImplementedError(
                f"{self._where()}: expected a slice (episode[a:b]), got {item!r}. Use the getters for "
                "single steps."
            )
        return self.slice(item)

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> MultiAgentEpisode:
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

    def writable_copy(self) -> MultiAgentEpisode:
        """Return a copy whose agents' episodes share their arrays until the first write."""
        chunk = copy.copy(self)
        chunk.agent_episodes = {id_: sae.writable_copy() for id_, sae in self.agent_episodes.items()}
        return chunk

    @property
    def batch_key(self) -> tuple[str]:
        """The episode id, as in the keys of its agents' items."""
        return (self.id_,)

    def set_id(self, id_: str) -> None:
        """Change the episode id, also of the agents' episodes."""
        self.id_ = id_
        for sae in self.agent_episodes.values():
            sae.multi_agent_episode_id = id_

    def _env_steps_to_first_own(self) -> int:
        """Return the number of env steps from the earliest observation acted on in this chunk to the chunk's start."""
        longest = 0
        for agent_id, track in self._timeline.tracks.items():
            sae = self.agent_episodes[agent_id]
            if len(sae) or track.pending is not None:
                first_env_t = track.obs_env_ts[sae.rewards.lookback]
                longest = max(longest, self._timeline.env_t_started - first_env_t)
        return longest

    def concat_episode(self, other: MultiAgentEpisode) -> None:
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

    # -- facts --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of env steps, without lookback."""
        return self.env_t - self.env_t_started

    def __repr__(self) -> str:
        return (
            f"MultiAgentEpisode(id_={self.id_!r}, len={len(self)}, done={self.is_done}, "
            f"agents={list(self.agent_episodes)})"
        )

    @property
    def env_t(self) -> int:
        """Env step of the latest observations, counted from the episode's reset."""
        return self._timeline.env_t

    @property
    def env_t_started(self) -> int:
        """Env step at which the chunk starts."""
        return self._timeline.env_t_started

    @property
    def len_lookback_buffer(self) -> int:
        """Number of stored env steps before the chunk's start."""
        return self._timeline.lookback

    @property
    def is_terminated(self) -> bool:
        """Whether the episode ended for all agents (terminated, or each in its own way)."""
        return self._timeline.is_terminated

    @property
    def is_truncated(self) -> bool:
        """Whether the episode was truncated for all agents."""
        return self._timeline.is_truncated

    @property
    def is_done(self) -> bool:
        """Whether the episode is terminated or truncated."""
        return self._timeline.is_done

    @property
    def is_reset(self) -> bool:
        """Whether any agent has an observation."""
        return bool(self.agent_episodes)

    @property
    def is_numpy(self) -> bool:
        """Whether `to_numpy` was called (agents without a step keep lists)."""
        return any(sae.is_numpy for sae in self.agent_episodes.values())

    @property
    def agent_ids(self) -> set[Any]:
        """Ids of all agents with data in this chunk, including its lookback part."""
        return set(self._timeline.tracks)

    @property
    def agent_episode_ids(self) -> dict[Any, str]:
        """Ids of the agents' episodes."""
        return {agent_id: sae.id_ for agent_id, sae in self.agent_episodes.items()}

    def module_for(self, agent_id: object) -> str:
        """Return this agent's module. The mapping function is called once per agent and episode."""
        module_id = self._agent_module_ids.get(agent_id)
        if module_id is None:
            module_id = self.agent_to_module_mapping_fn(agent_id, self)
            if not isinstance(module_id, str) or not module_id:
                raise ValueError(
                    f"agent_to_module_mapping_fn({agent_id!r}, episode): expected a module id (str), got "
                    f"{module_id!r}."
                )
            self._agent_module_ids[agent_id] = module_id
        return module_id

    def get_agents_that_stepped(self) -> set[Any]:
        """Return the agents with an observation at the latest env step."""
        env_t = self.env_t
        return {
            agent_id for agent_id, track in self._timeline.tracks.items() if track.obs_env_ts[-1] == env_t
        }

    def get_agents_that_observed(self) -> set[Any]:
        """Return the agents with a new observation at the latest env step.

        These are the agents that stepped, without those that terminated without a last observation: their last
        observation is the previous one again, which connector pieces have processed already.
        """
        return self.get_agents_that_stepped() - self._timeline.repeated

    def get_agents_to_act(self) -> set[Any]:
        """Return the agents with an observation at the latest env step that are not done."""
        if self.is_done:
            return set()
        tracks = self._timeline.tracks
        return {agent_id for agent_id in self.get_agents_that_stepped() if not tracks[agent_id].is_done}

    def get_terminateds(self) -> dict[Any, bool]:
        """Return the terminated flags by agent id, and ``"__all__"``."""
        return self._timeline.done_flags()[0]

    def get_truncateds(self) -> dict[Any, bool]:
        """Return the truncated flags by agent id, and ``"__all__"``."""
        return self._timeline.done_flags()[1]

    def env_steps(self) -> int:
        """Return the number of env steps, without lookback."""
        return len(self)

    def agent_steps(self) -> int:
        """Return the number of completed steps of all agents, without lookback."""
        return sum(len(sae) for sae in self.agent_episodes.values())

    def get_return(self, include_hanging_rewards: bool = False) -> float:
        """Return the sum of all agents' rewards, without lookback.

        Args:
            include_hanging_rewards: Whether to include rewards that belong to no completed step: those of hanging
                actions, of waiting agents, and those before an agent's first observation.

        Raises:
            ValueError: A reward is not a single number.
        """
        total = sum(sae.get_return() for sae in self.agent_episodes.values())
        if include_hanging_rewards:
            for agent_id, track in self._timeline.tracks.items():
                total += self._hanging(agent_id, track.reward) + self._hanging(
                    agent_id, track.reward_before_start
                )
            for agent_id, reward in self._timeline.early_rewards.items():
                total += self._hanging(agent_id, reward)
        return float(total)

    def _hanging(self, agent_id: object, reward: object) -> Any:
        try:
            return as_reward(reward)
        except ValueError as error:
            raise located(error, f"{self._where()}, agent {agent_id!r}", "rewards") from None

    def get_duration_s(self) -> float:
        """Return the duration in seconds from this chunk's start (reset or cut) to its last step."""
        return self._duration_s

    @property
    def env_t_to_agent_t(self) -> dict[Any, InfiniteLookbackBuffer]:
        """Return, by agent id, the agent's own time step at each stored env step.

        It is `SKIP_ENV_TS_TAG` where the agent has no observation. Each buffer ends with `env_t` and starts with the
        chunk's lookback part. The buffers are created on access: writes to them have no effect.
        """
        base = self.env_t_started - self._timeline.lookback
        found = {}
        for agent_id, track in self._timeline.tracks.items():
            sae = self.agent_episodes[agent_id]
            first_agent_t = sae.t_started - sae.observations.lookback
            agent_ts: list[Any] = [self.SKIP_ENV_TS_TAG] * (self.env_t - base + 1)
            for k, env_t in enumerate(track.obs_env_ts):
                if env_t >= base:
                    agent_ts[env_t - base] = first_agent_t + k
            found[agent_id] = InfiniteLookbackBuffer(agent_ts, self._timeline.lookback)
        return found

    def print(self) -> None:
        """Print which agent observed at which env step."""
        width = max((len(str(agent_id)) for agent_id in self.agent_episodes), default=2)
        base = self.env_t_started - self._timeline.lookback
        steps = range(base, self.env_t + 1)
        print(" ".join([" " * width, *(f"{env_t:>3}" for env_t in steps)]))
        for agent_id, agent_ts in self.env_t_to_agent_t.items():
            marks = ("   " if agent_t == self.SKIP_ENV_TS_TAG else "  x" for agent_t in agent_ts.data)
            print(" ".join([f"{agent_id!s:<{width}}", *marks]).rstrip())

    # -- state --------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the whole episode as a dict of lists, arrays and other values.

        It contains the mapping function itself under ``"agent_to_module_mapping_fn"``. Remove it before pickling the
        state (`from_state` then uses the default function; known agents keep their modules).
        """
        state = {
            "id_": self.id_,
            "timeline": copy.deepcopy(self._timeline),
            "agent_episodes": {agent_id: sae.get_state() for agent_id, sae in self.agent_episodes.items()},
            "agent_module_ids": dict(self._agent_module_ids),
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "custom_data": copy.deepcopy(self.custom_data),
            "duration_s": self.get_duration_s(),
        }
        if self.agent_to_module_mapping_fn is not default_agent_to_module_mapping_fn:
            state["agent_to_module_mapping_fn"] = self.agent_to_module_mapping_fn
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MultiAgentEpisode:
        """Return the episode of a state from `get_state`.

        Raises:
            ValueError: The state does not come from `get_state`.
        """
        try:
            episode = cls(
                state["id_"],
                state["agent_module_ids"],
                state.get("agent_to_module_mapping_fn"),
                observation_space=state["observation_space"],
                action_space=state["action_space"],
            )
            episode._timeline = copy.deepcopy(state["timeline"])
            episode.agent_episodes = {
                agent_id: SingleAgentEpisode.from_state(own)
                for agent_id, own in state["agent_episodes"].items()
            }
            episode.custom_data = copy.deepcopy(state["custom_data"])
            episode._duration_s = float(state["duration_s"])
            episode.validate()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"expected a MultiAgentEpisode's state, got one with a wrong field: {error!r}."
            ) from error
        return episode

    # -- inside -------------------------------------------------------------------------------------

    def _where(self) -> str:
        return f"episode {self.id_}"

    def _agent_facts(self, agent_id: object) -> dict[str, Any]:
        """Return constructor arguments for this agent's `SingleAgentEpisode`."""
        return {
            "id_": f"{self.id_}_{agent_id}",
            "agent_id": agent_id,
            "module_id": self.module_for(agent_id),
            "multi_agent_episode_id": self.id_,
            "observation_space": self.observation_space.get(agent_id),
            "action_space": self.action_space.get(agent_id),
        }

    def _derive(
        self, timeline: Timeline, agent_episodes: Mapping[Any, SingleAgentEpisode]
    ) -> MultiAgentEpisode:
        """Return an episode with the same id, spaces and mapping, but other data."""
        derived = MultiAgentEpisode(
            self.id_,
            self._agent_module_ids,
            self.agent_to_module_mapping_fn,
            observation_space=self.observation_space,
            action_space=self.action_space,
        )
        derived._timeline = timeline
        derived.agent_episodes = dict(agent_episodes)
        derived.custom_data = copy.deepcopy(self.custom_data)
        return derived


def _padded(data: Sequence[Mapping[Any, Any]] | None, num: int) -> Sequence[Mapping[Any, Any]]:
    return [*(data or ()), *[{}] * (num - len(data or ()))]


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
