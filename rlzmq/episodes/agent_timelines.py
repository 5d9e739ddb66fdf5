"""Env steps of each agent's observations and actions in a multi-agent episode.

For every agent, the timeline knows the env steps of its observations, the action that waits for its outcome, and the
rewards received since then. It holds no observations: `Timeline.advance` checks one env step of data and returns the
changes (`AgentEvent`) for the agents' episodes. `MultiAgentEpisode`, its constructor and the env runner all use these
rules.

Env steps are absolute (counted from the episode's reset). An agent's k-th stored observation (including the lookback)
was made at env step ``obs_env_ts[k]``. Its k-th stored step leads from observation k to k+1 and counts as taken at env
step ``obs_env_ts[k]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from rlzmq.core.errors import MultiAgentEnvError
from rlzmq.episodes.step_values import REWARD_TYPES, add_up, as_reward, can_add_up, checked_flags, kept_reward

__all__ = [
    "ALL_AGENTS",
    "LAST_OBSERVATION",
    "AgentEvent",
    "AgentTrack",
    "Pending",
    "Timeline",
]

ALL_AGENTS: Final = "__all__"


class _LastObservation:
    """Placeholder for a missing last observation: the agent's previous observation is repeated."""

    def __repr__(self) -> str:
        return "LAST_OBSERVATION"


LAST_OBSERVATION: Final = _LastObservation()


@dataclass(slots=True)
class Pending:
    """An action that waits for its next observation, with the model outputs of its step."""

    action: Any
    extra_model_outputs: Mapping[str, Any]

    def copy(self) -> Pending:
        return Pending(self.action, dict(self.extra_model_outputs))


@dataclass(slots=True)
class AgentTrack:
    """One agent's observations, actions and rewards within the episode.

    Attributes:
        obs_env_ts: Env step of each stored observation, strictly increasing.
        pending: The hanging action, if the agent has acted on its last observation and waits.
        reward: Sum of the rewards since the last observation, a part of the incomplete step.
        reward_before_start: Sum of the rewards before the first observation, not a part of any step.
        terminated, truncated: Whether the agent is done.
        done_env_t: Env step at which it was done; -1 before.
        output_keys: Names of the extra model outputs of its first action, which every action must have; None before it.
    """

    obs_env_ts: list[int] = field(default_factory=list)
    pending: Pending | None = None
    reward: Any = 0.0
    reward_before_start: Any = 0.0
    terminated: bool = False
    truncated: bool = False
    done_env_t: int = -1
    output_keys: frozenset[str] | None = None

    @property
    def is_done(self) -> bool:
        return self.terminated or self.truncated

    @property
    def departure(self) -> tuple[bool, bool, int]:
        """The entry of `Timeline.departed` for this agent."""
        return self.terminated, self.truncated, self.done_env_t

    def end(self, terminated: bool, truncated: bool, env_t: int) -> None:
        """Set the flags of env step `env_t`; the agent is done if one of them is True."""
        self.terminated, self.truncated = terminated, truncated
        if terminated or truncated:
            self.done_env_t = env_t

    def leftovers(self, num_steps: int) -> dict[str, Any]:
        """Return what an agent's chunk of `num_steps` stored steps lacks; see `of_chunk`.

        Raises:
            ValueError: A reward that belongs to no step yet is not a single number.
        """
        left: dict[str, Any] = {}
        if self.pending is not None:
            left["pending"] = self.pending.copy()
        for name in ("reward", "reward_before_start"):
            value = as_reward(getattr(self, name))
            if value != 0:
                left[name] = value
        if self.is_done and self.done_env_t != self.obs_env_ts[-1]:
            left["done_env_t"] = self.done_env_t
        if num_steps == 0 and self.output_keys is not None:
            left["output_keys"] = self.output_keys
        return left

    @classmethod
    def of_chunk(
        cls, obs_env_ts: list[int], terminated: bool, truncated: bool, leftovers: Mapping[str, Any]
    ) -> AgentTrack:
        """Return the track of an agent's chunk, with its `leftovers`."""
        track = cls(obs_env_ts)
        track.end(terminated, truncated, obs_env_ts[-1])
        for name, value in leftovers.items():
            setattr(track, name, value.copy() if isinstance(value, Pending) else value)
        return track

    def carry_on(self, begin: int) -> AgentTrack:
        """Return the track of a continuation that stores the observations from position `begin` on."""
        pending = None if self.pending is None else self.pending.copy()
        return replace(self, obs_env_ts=self.obs_env_ts[begin:], pending=pending, reward_before_start=0.0)


class AgentEvent(NamedTuple):
    """A change of one agent's episode, caused by one env step.

    Attributes:
        agent_id: The agent.
        kind: ``"reset"``: its first observation; ``"step"``: a completed step; ``"end"``: it is done without an
            outstanding action (no further step).
        observation: The new observation, or `LAST_OBSERVATION`.
        info: Its info dict, or None.
        action, reward, extra_model_outputs, terminated, truncated: Data of the completed step.
    """

    agent_id: Any
    kind: str
    observation: Any = None
    info: Any = None
    action: Any = None
    reward: Any = 0
    extra_model_outputs: Mapping[str, Any] = {}
    terminated: bool = False
    truncated: bool = False


@dataclass(slots=True)
class Timeline:
    """The agents' tracks between two env steps.

    Attributes:
        env_t_started: Env step at which the chunk starts.
        env_t: Env step of the latest observations.
        lookback: Number of stored env steps before the chunk's start.
        tracks: Agent id -> track, in order of appearance.
        departed: Agents that are done, but not stored: (terminated, truncated, env step at which they were done).
        early_rewards: Rewards of agents that have not appeared yet.
        repeated: Agents that terminated at `env_t` without a last observation, so that their previous one is repeated.
        is_terminated, is_truncated: Whether the whole episode is done.
    """

    env_t_started: int = 0
    lookback: int = 0
    env_t: int = field(init=False)
    tracks: dict[Any, AgentTrack] = field(default_factory=dict)
    departed: dict[Any, tuple[bool, bool, int]] = field(default_factory=dict)
    early_rewards: dict[Any, Any] = field(default_factory=dict)
    repeated: set[Any] = field(default_factory=set)
    is_terminated: bool = False
    is_truncated: bool = False

    def __post_init__(self) -> None:
        self.env_t = self.env_t_started

    @property
    def is_done(self) -> bool:
        return self.is_terminated or self.is_truncated

    def reset(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> list[AgentEvent]:
        """Add the episode's first observations; return the changes to the agents' episodes."""
        events = []
        for agent_id, observation in observations.items():
            if observation is None:
                continue
            self.tracks[agent_id] = AgentTrack([self.env_t])
            events.append(AgentEvent(agent_id, "reset", observation, infos.get(agent_id)))
        return events

    def advance(
        self,
        observations: Mapping[Any, Any],
        actions: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        terminateds: Mapping[Any, Any],
        truncateds: Mapping[Any, Any],
        extra_model_outputs: Mapping[Any, Mapping[str, Any] | None],
        *,
        where: str = "episode",
    ) -> list[AgentEvent]:
        """Add one env step; return the changes. All arguments are by agent id; a missing (or None) entry means no data.

        Returns:
            The changes to the agents' episodes, in order of the agents' appearance.

        Raises:
            MultiAgentEnvError: The data contradict earlier steps. Nothing was changed.
        """
        env_t = self.env_t + 1
        if self.is_done:
            raise MultiAgentEnvError(
                f"{where}: expected no further step, the episode is done since env step {self.env_t}."
            )
        terminateds = checked_flags(terminateds, "terminateds", f"{where}, env step {env_t}")
        truncateds = checked_flags(truncateds, "truncateds", f"{where}, env step {env_t}")
        all_terminated = bool(terminateds.get(ALL_AGENTS))
        all_truncated = bool(truncateds.get(ALL_AGENTS))

        events: list[AgentEvent] = []
        waiting: list[tuple[Any, Pending | None, Any]] = []  # agent, new hanging action, reward to add
        early: list[tuple[Any, Any]] = []
        stillborn: list[tuple[Any, tuple[bool, bool, int]]] = []
        any_alive = False
        sources = (self.tracks, observations, actions, rewards, terminateds, truncateds, infos)
        for agent_id in _each_once(sources):
            track = self.tracks.get(agent_id)
            observation = observations.get(agent_id)
            action = actions.get(agent_id)
            reward = rewards.get(agent_id)
            if reward is not None:
                if type(reward) not in REWARD_TYPES:
                    reward = kept_reward(reward)
                total = self.early_rewards.get(agent_id, 0.0) if track is None else track.reward
                if not can_add_up(total, reward):
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}, agent {agent_id!r}, column 'rewards': expected numbers "
                        f"to add up until its next observation, got {total!r:.80} and {reward!r:.80}."
                    )
            if (track is not None and track.is_done) or agent_id in self.departed:
                if observation is not None or action is not None or reward is not None or infos.get(agent_id):
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}: agent {agent_id!r} is done already, but got "
                        f"{_given(observation, action, reward, infos.get(agent_id))}. Leave a done agent "
                        "out of all dicts."
                    )
                continue
            terminated = all_terminated or bool(terminateds.get(agent_id))
            truncated = all_truncated or bool(truncateds.get(agent_id))

            if track is None:
                if action is not None:
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}: agent {agent_id!r} acted ({action!r}) before it had "
                        "any observation."
                    )
                if observation is None:
                    if reward is not None:
                        early.append((agent_id, reward))
                elif terminated or truncated:
                    stillborn.append((agent_id, (terminated, truncated, env_t)))
                else:
                    any_alive = True
                    events.append(
                        AgentEvent(agent_id, "reset", observation, infos.get(agent_id), reward=reward)
                    )
                continue

            any_alive = any_alive or not (terminated or truncated)
            pending = track.pending
            if action is not None:
                if pending is not None:
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}: agent {agent_id!r} acted ({action!r}), but its action of env "
                        f"step {track.obs_env_ts[-1]} ({pending.action!r}) still waits for the next observation."
                    )
                outputs = extra_model_outputs.get(agent_id) or {}
                if type(outputs) is not dict and not isinstance(outputs, Mapping):
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}, agent {agent_id!r}: expected extra model outputs by "
                        f"name (a dict), got {type(outputs).__name__} {outputs!r:.80}."
                    )
                if track.output_keys is not None and outputs.keys() != track.output_keys:
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}, agent {agent_id!r}: expected the extra model outputs of its "
                        f"first action ({', '.join(sorted(track.output_keys)) or 'none'}), got "
                        f"{', '.join(sorted(outputs)) or 'none'}. Every action of an agent must have the same ones."
                    )
                pending = Pending(action, outputs)
            if observation is not None:
                if pending is None:
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}: agent {agent_id!r} got an observation, but has not acted on its "
                        f"last one (env step {track.obs_env_ts[-1]}). Give an observation only to agents that acted "
                        "or are new."
                    )
                if action is not None and reward is None:
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}: agent {agent_id!r} acted and got its next "
                        "observation, but no reward. "
                        "The env must return a reward for it (0.0 if there is none)."
                    )
            elif pending is not None and (terminated or truncated):
                if not terminated:
                    raise MultiAgentEnvError(
                        f"{where}, env step {env_t}: agent {agent_id!r} acted and was truncated, but got no last "
                        "observation. The env must return one: the value of what was cut off is estimated from it."
                    )
                observation = LAST_OBSERVATION

            if observation is not None and pending is not None:
                total = track.reward if reward is None else add_up(track.reward, reward)
                events.append(
                    AgentEvent(
                        agent_id,
                        "step",
                        observation,
                        infos.get(agent_id),
                        pending.action,
                        total,
                        pending.extra_model_outputs,
                        terminated,
                        truncated,
                    )
                )
            else:
                waiting.append((agent_id, pending, reward))
                if terminated or truncated:
                    events.append(AgentEvent(agent_id, "end", terminated=terminated, truncated=truncated))

        # All data have been checked: nothing below raises an error.
        self.env_t = env_t
        for agent_id, pending, reward in waiting:
            track = self.tracks[agent_id]
            if pending is not None and track.pending is None:
                track.output_keys = frozenset(pending.extra_model_outputs)
            track.pending = pending
            if reward is not None:
                track.reward = add_up(track.reward, reward)
        for agent_id, reward in early:
            self.early_rewards[agent_id] = add_up(self.early_rewards.get(agent_id, 0.0), reward)
        self.departed.update(stillborn)
        self.repeated = {event.agent_id for event in events if event.observation is LAST_OBSERVATION}
        for agent_id, _ in stillborn:
            self.early_rewards.pop(agent_id, None)
        for event in events:
            if event.kind == "reset":
                start = self.early_rewards.pop(event.agent_id, 0.0)
                start = start if event.reward is None else add_up(start, event.reward)
                self.tracks[event.agent_id] = AgentTrack([env_t], reward_before_start=start)
                continue
            track = self.tracks[event.agent_id]
            track.end(event.terminated, event.truncated, env_t)
            if event.kind == "step":
                if track.output_keys is None:
                    track.output_keys = frozenset(event.extra_model_outputs)
                track.obs_env_ts.append(env_t)
                track.pending = None
                track.reward = 0.0
        self.end(all_terminated, all_truncated, any_alive=any_alive)
        return events

    def leftovers(self, module_ids: Mapping[Any, str]) -> dict[str, Any]:
        """Return the data of an episode that is in none of its agents' chunks.

        Args:
            module_ids: The modules of the agents without a chunk.
        """
        values: dict[str, Any] = {
            "departed": dict(self.departed),
            "early_rewards": dict(self.early_rewards),
            "agent_module_ids": dict(module_ids),
        }
        return {name: value for name, value in values.items() if value}

    def end(self, all_terminated: bool, all_truncated: bool, *, any_alive: bool) -> None:
        """End the episode after an env step with these flags for all agents, or if no known agent is alive."""
        knows_agents = bool(self.tracks) or bool(self.departed)
        self.is_terminated = all_terminated or (knows_agents and not any_alive and not all_truncated)
        self.is_truncated = all_truncated

    def truncate(self) -> list[Any]:
        """End the episode here, truncated for all agents that are not done; return these. See `MultiAgentEpisode`."""
        self.is_truncated = True
        ongoing = [agent_id for agent_id, track in self.tracks.items() if not track.is_done]
        for agent_id in ongoing:
            self.tracks[agent_id].pending = None
            self.tracks[agent_id].end(False, True, self.env_t)
        return ongoing

    def carry_on(self, lookback: int) -> Timeline:
        """Return the timeline of a continuation that starts here, without tracks.

        Args:
            lookback: Number of env steps to look back at, as far as they are stored; more if needed to reach the
                observations of hanging actions.
        """
        for track in self.tracks.values():
            if track.pending is not None:
                lookback = max(lookback, self.env_t - track.obs_env_ts[-1])
        new = Timeline(self.env_t, min(lookback, self.env_t - self.env_t_started + self.lookback))
        new.departed, new.early_rewards = dict(self.departed), dict(self.early_rewards)
        return new

    def env_steps_back(self, num_steps: int) -> int:
        """Return the lookback in env steps for which every active agent keeps its last `num_steps` steps."""
        first = self.env_t
        for track in self.tracks.values() if num_steps else ():
            if not track.is_done:
                first = min(first, track.obs_env_ts[max(-1 - num_steps, -len(track.obs_env_ts))])
        return self.env_t - first

    def done_flags(self) -> tuple[dict[Any, bool], dict[Any, bool]]:
        """Return (terminated, truncated) by agent, including ``"__all__"``."""
        terminateds = {agent_id: track.terminated for agent_id, track in self.tracks.items()}
        truncateds = {agent_id: track.truncated for agent_id, track in self.tracks.items()}
        terminateds[ALL_AGENTS] = self.is_terminated
        truncateds[ALL_AGENTS] = self.is_truncated
        return terminateds, truncateds


def _each_once(sources: Iterable[Mapping[Any, Any]]) -> dict[Any, None]:
    """Return the agent ids of all mappings, each once, in order of appearance."""
    ids: dict[Any, None] = {}
    for source in sources:
        for agent_id in source:
            if agent_id not in ids and agent_id != ALL_AGENTS:
                ids[agent_id] = None
    return ids


def _given(observation: object, action: object, reward: object, info: object) -> str:
    named = {"observation": observation, "action": action, "reward": reward, "info": info}
    return ", ".join(f"{name} {value!r}" for name, value in named.items() if value is not None)
