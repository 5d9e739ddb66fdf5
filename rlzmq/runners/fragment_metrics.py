"""Adds the fragment metadata sent by runners to a run's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rlzmq.core.metrics import MetricsLogger
from rlzmq.runners.episode_metrics import EpisodeMetrics

__all__ = ["add_fragment_metas"]


def add_fragment_metas(
    episodes: EpisodeMetrics, metrics: MetricsLogger, metas: Iterable[Mapping[str, Any]]
) -> None:
    """Add fragments' metadata to episode metrics, and the values that callbacks logged to `metrics`.

    Args:
        episodes, metrics: Receivers of the data.
        metas: Metadata per runner, in the order of its fragments.
    """
    rounds: list[list[Any]] = []  # the first fragment of each runner, then the second, …
    num_of_runner: Counter[Any] = Counter()
    for meta in metas:
        num_steps = int(meta.get("num_env_steps", 0))
        default_agent = {"default_agent": num_steps}
        episodes.add_steps(
            num_steps,
            meta.get("agent_steps", default_agent),
            meta.get("module_steps", {"default_policy": num_steps}),
        )
        episodes.timers.merge(meta.get("timers") or {})
        finished = meta.get("episode_metrics") or {}
        if finished.get("returns"):
            episodes.add_episodes(finished["returns"], finished["lengths"], finished["durations_s"])
        if finished.get("agent_returns") or finished.get("module_returns"):
            episodes.add_split_returns(finished.get("agent_returns", {}), finished.get("module_returns", {}))
        if meta.get("custom_metrics"):
            runner = meta.get("worker_index")
            if num_of_runner[runner] == len(rounds):
                rounds.append([])
            rounds[num_of_runner[runner]].append(meta["custom_metrics"])
            num_of_runner[runner] += 1
    for states in rounds:
        metrics.aggregate(states, key="env_runners")
