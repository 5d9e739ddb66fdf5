"""Totals of multi-agent episodes, ongoing and ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlzmq.core.plain import from_plain, to_plain
from rlzmq.episodes.bad_values import LARGEST
from rlzmq.runners.single.ongoing_episodes import FinishedEpisodes

__all__ = ["EpisodeTotals", "MultiAgentFinished"]


@dataclass
class MultiAgentFinished(FinishedEpisodes):
    """Statistics of ended multi-agent episodes.

    Attributes:
        agent_returns: Agent id -> its return in each episode that it was in.
        module_returns: Module id -> returns of the agents that it acted for.
    """

    agent_returns: dict[Any, list[float]] = field(default_factory=dict)
    module_returns: dict[str, list[float]] = field(default_factory=dict)

    def add(self, totals: EpisodeTotals, num_env_steps: int) -> None:
        """Add an episode that ended after `num_env_steps` env steps."""
        self.returns.append(sum(totals.agent_returns.values()))
        self.lengths.append(num_env_steps)
        self.durations_s.append(time.perf_counter() - totals.started_s)
        for agent_id, value in totals.agent_returns.items():
            self.agent_returns.setdefault(agent_id, []).append(value)
            self.module_returns.setdefault(totals.module_ids[agent_id], []).append(value)

    def leave_out_unusable(self) -> None:
        """Remove unusable returns of agents and modules too."""
        super().leave_out_unusable()
        for by_id in (self.agent_returns, self.module_returns):
            for name, returns in by_id.items():
                by_id[name] = [value for value in returns if abs(value) < LARGEST]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, for a fragment's meta."""
        return {
            **super().to_dict(),
            "agent_returns": self.agent_returns,
            "module_returns": self.module_returns,
        }


class EpisodeTotals:
    """Sums over the chunks of one ongoing episode.

    Attributes:
        agent_returns: Agent id -> rewards of its completed steps so far.
        module_ids: Agent id -> module id.
        started_s: Start on the clock of ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.agent_returns: dict[Any, float] = {}
        self.module_ids: dict[Any, str] = {}
        self.started_s = time.perf_counter()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EpisodeTotals:
        """Create from a state of `get_state`; the time since then is not counted."""
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
            self.module_ids[agent_id] = module_ids[agent_id]
