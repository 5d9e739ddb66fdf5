"""StepDicts: converts a multi-agent episode given as lists of dicts to data by agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlzmq.episodes.agent_timelines import ALL_AGENTS, LAST_OBSERVATION, AgentEvent, AgentTrack, Timeline

__all__ = ["StepDicts"]

Dicts = Sequence[Mapping[Any, Any]]


@dataclass(frozen=True)
class StepDicts:
    """Constructor data of `MultiAgentEpisode`, whose docstring documents it.

    Attributes:
        num_steps: Number of env steps.
        observations, infos: One dict per env step, plus one for the reset (infos may be empty).
        actions, rewards, extra_model_outputs: One dict per env step, or empty. Rewards may have one env step more
            than actions and outputs, which then hang.
        terminateds, truncateds: Flags at the end. An agent that did not act on its last observation was done with it.
    """

    num_steps: int
    observations: Dicts
    infos: Dicts
    actions: Dicts
    rewards: Dicts
    extra_model_outputs: Dicts
    terminateds: Mapping[Any, bool]
    truncateds: Mapping[Any, bool]

    def replay(self, timeline: Timeline, where: str) -> dict[Any, dict[str, Any]]:
        """Advance a new timeline (with its lookback set) through all steps.

        Returns:
            Agent id -> lists for its `SingleAgentEpisode`: observations, infos, actions, rewards,
            extra_model_outputs.

        Raises:
            ValueError: The lengths of the lists do not match.
            MultiAgentEnvError: If the data contradict each other.
        """
        self._check_lengths(where)
        timeline.env_t = timeline.env_t_started - timeline.lookback
        agents: dict[Any, dict[str, Any]] = {}
        _sort_in(agents, timeline.reset(self.observations[0], _at(self.infos, 0)))
        for step in range(self.num_steps):
            is_last = step == self.num_steps - 1
            events = timeline.advance(
                _at(self.observations, step + 1),
                _at(self.actions, step),
                _at(self.rewards, step),
                _at(self.infos, step + 1),
                self.terminateds if is_last else {},
                self.truncateds if is_last else {},
                _at(self.extra_model_outputs, step),
                where=where,
            )
            _sort_in(agents, events)
        for agent_id, track in timeline.tracks.items():
            if self.num_steps and track.is_done and self._ended_with_last_observation(agent_id, track):
                track.done_env_t = track.obs_env_ts[-1]
        if self.num_steps == 0:
            for agent_id, track in timeline.tracks.items():
                track.terminated = bool(self.terminateds.get(agent_id, self.terminateds.get(ALL_AGENTS)))
                track.truncated = bool(self.truncateds.get(agent_id, self.truncateds.get(ALL_AGENTS)))
                track.done_env_t = timeline.env_t if track.is_done else -1
        return agents

    def _ended_with_last_observation(self, agent_id: Any, track: AgentTrack) -> bool:
        is_own = self.terminateds.get(agent_id) or self.truncateds.get(agent_id)
        return bool(is_own) and track.pending is None and not track.reward

    def _check_lengths(self, where: str) -> None:
        num_observations, num_infos = len(self.observations), len(self.infos)
        if num_observations > self.num_steps + 1 or num_infos not in (0, num_observations):
            raise ValueError(
                f"{where}: expected observations and infos of {self.num_steps} env steps plus the reset, got "
                f"{num_observations} and {num_infos}."
            )
        for name in ("actions", "rewards", "extra_model_outputs"):
            data = getattr(self, name)
            hangs = (
                name != "rewards" and len(data) == self.num_steps - 1 and len(self.rewards) == self.num_steps
            )
            if data and len(data) != self.num_steps and not hangs:
                raise ValueError(f"{where}: expected {name} of {self.num_steps} env steps, got {len(data)}.")


def _at(data: Dicts, step: int) -> Mapping[Any, Any]:
    return data[step] if step < len(data) else {}


def _sort_in(agents: dict[Any, dict[str, Any]], events: Sequence[AgentEvent]) -> None:
    """Append each event's data to its agent's lists."""
    for event in events:
        if event.kind == "end":
            continue
        lists = agents.get(event.agent_id)
        if lists is None:
            lists = agents[event.agent_id] = {
                "observations": [],
                "infos": [],
                "actions": [],
                "rewards": [],
                "extra_model_outputs": {},
            }
        repeats = event.observation is LAST_OBSERVATION
        lists["observations"].append(lists["observations"][-1] if repeats else event.observation)
        lists["infos"].append({} if event.info is None else event.info)
        if event.kind == "step":
            lists["actions"].append(event.action)
            lists["rewards"].append(event.reward)
            for key, value in event.extra_model_outputs.items():
                lists["extra_model_outputs"].setdefault(key, []).append(value)
