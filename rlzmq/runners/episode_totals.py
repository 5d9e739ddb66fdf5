"""Totals of episodes: EpisodeTotals for an ongoing episode, FinishedEpisodes for ended ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlzmq.core.plain import from_plain, to_plain
from rlzmq.episodes.bad_values import LARGEST

__all__ = ["EpisodeTotals", "FinishedEpisodes"]


@dataclass
class FinishedEpisodes:
    """Statistics of ended episodes, one list entry per episode.

    Attributes:
        returns: Sums of rewards over the whole episode, of all agents.
        lengths: Env steps of the whole episode.
        durations_s: Wall time in seconds; on whole columns, a fragment's time is spread evenly over its steps.
        agent_returns: Multi-agent: agent id -> its return in each of its episodes.
        module_returns: Multi-agent: module id -> returns of its agents.
    """

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    agent_returns: dict[Any, list[float]] = field(default_factory=dict)
    module_returns: dict[str, list[float]] = field(default_factory=dict)

    def add(self, totals: EpisodeTotals, num_env_steps: int, duration_s: float) -> None:
        """Add an episode that ended after `num_env_steps` env steps."""
        self.returns.append(sum(totals.agent_returns.values()))
        self.lengths.append(num_env_steps)
        self.durations_s.append(duration_s)
        for agent_id, module_id in totals.module_ids.items():
            value = totals.agent_returns[agent_id]
            self.agent_returns.setdefault(agent_id, []).append(value)
            self.module_returns.setdefault(module_id, []).append(value)

    def leave_out_unusable(self) -> None:
        """Remove episodes without a usable return (some of their steps were left out), and unusable returns by id."""
        kept = [n for n, value in enumerate(self.returns) if abs(value) < LARGEST]  # False for NaN
        self.returns = [self.returns[n] for n in kept]
        self.lengths = [self.lengths[n] for n in kept]
        self.durations_s = [self.durations_s[n] for n in kept]
        for by_id in (self.agent_returns, self.module_returns):
            for returns in by_id.values():
                returns[:] = [value for value in returns if abs(value) < LARGEST]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists by attribute, for a fragment's meta, without empty returns by id."""
        return {name: value for name, value in vars(self).items() if type(value) is list or value}


class EpisodeTotals:
    """Sums over the chunks of one ongoing episode.

    Attributes:
        agent_returns: Agent id -> sum of the rewards of its completed steps so far.
        module_ids: Agent id -> module id; empty for single-agent episodes.
        started_s: Start time on the clock of ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.agent_returns: dict[Any, float] = {}
        self.module_ids: dict[Any, str] = {}
        self.started_s: float = time.perf_counter()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EpisodeTotals:
        """Create from a state of `get_state`. The time in between is not counted."""
        totals = cls()
        totals.agent_returns = from_plain(state["agent_returns"])
        totals.module_ids = from_plain(state["module_ids"])
        totals.started_s -= state["age_s"]
        return totals

    def get_state(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "agent_returns": to_plain(self.agent_returns),
            "module_ids": to_plain(self.module_ids),
            "age_s": time.perf_counter() - self.started_s,
        }

    def add(self, returns: Mapping[Any, float], module_ids: Mapping[Any, str]) -> None:
        """Add one chunk's returns by agent."""
        for agent_id, value in returns.items():
            self.agent_returns[agent_id] = self.agent_returns.get(agent_id, 0.0) + value
        self.module_ids.update(module_ids)
