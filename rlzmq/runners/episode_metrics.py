"""Metrics of a runner's finished episodes, and its step counts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.metrics_stats import logged_state
from rlzmq.core.stage_timers import StageTimers
from rlzmq.episodes.columns import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID

__all__ = ["HOW_TO_LIMIT", "EpisodeMetrics", "EpisodeResults", "add_fragment_metas"]

HOW_TO_LIMIT = (
    "gymnasium.wrappers.TimeLimit(env, max_episode_steps=…) where the environment is made, or "
    "env_config={'max_episode_steps': …} with an id of Gymnasium"
)
"""Advice for episodes that never end."""

_COUNTS = ("num_episodes", "num_env_steps", "num_episodes_lifetime", "num_env_steps_lifetime")
_COUNTS_BY_NAME = ("agent_steps", "module_steps", "agent_steps_lifetime", "module_steps_lifetime")
_WINDOWS = ("returns", "lengths", "durations_s")
_WINDOWS_BY_NAME = ("agent_returns", "module_returns")


class EpisodeMetrics:
    """Returns, lengths and durations of finished episodes, step counts, and timers.

    Args:
        num_smoothed: Window of the means, minima and maxima, in episodes.
    """

    def __init__(self, num_smoothed: int = 100) -> None:
        self.returns: deque[float] = deque(maxlen=num_smoothed)
        self.lengths: deque[int] = deque(maxlen=num_smoothed)
        self.durations_s: deque[float] = deque(maxlen=num_smoothed)
        self.agent_returns: dict[str, deque[float]] = {}
        self.module_returns: dict[str, deque[float]] = {}
        self.timers = StageTimers()
        self._num_smoothed = num_smoothed
        self.num_episodes = 0
        self._num_split_returns: Counter[tuple[str, str]] = Counter()
        self.num_env_steps = 0
        self.agent_steps: dict[str, int] = {}
        self.module_steps: dict[str, int] = {}
        self.num_episodes_lifetime = 0
        self.num_env_steps_lifetime = 0
        self.agent_steps_lifetime: dict[str, int] = {}
        self.module_steps_lifetime: dict[str, int] = {}

    def add_fragment(self, meta: Mapping[str, Any]) -> None:
        """Add a fragment's metadata: step counts, finished episodes and timers.

        Args:
            meta: ``num_env_steps`` (without autoreset steps); ``agent_steps`` and ``module_steps`` by id (default: all
                of the default agent's); ``episode_metrics``, see `FinishedEpisodes.to_dict`; ``timers``.
        """
        num_env_steps = int(meta.get("num_env_steps", 0))
        self.num_env_steps += num_env_steps
        self.num_env_steps_lifetime += num_env_steps
        agent_steps = meta.get("agent_steps", {DEFAULT_AGENT_ID: num_env_steps})
        module_steps = meta.get("module_steps", {DEFAULT_MODULE_ID: num_env_steps})
        for counts, lifetime, new in (
            (self.agent_steps, self.agent_steps_lifetime, agent_steps),
            (self.module_steps, self.module_steps_lifetime, module_steps),
        ):
            for name, num in new.items():
                counts[name] = counts.get(name, 0) + num
                lifetime[name] = lifetime.get(name, 0) + num
        finished = meta.get("episode_metrics") or {}
        returns = finished.get("returns", ())
        self.returns.extend(returns)
        self.lengths.extend(finished.get("lengths", ()))
        self.durations_s.extend(finished.get("durations_s", ()))
        self.num_episodes += len(returns)
        self.num_episodes_lifetime += len(returns)
        for key, own in (("agent", self.agent_returns), ("module", self.module_returns)):
            for name, returns in finished.get(f"{key}_returns", {}).items():
                self._num_split_returns[key, name] += len(returns)
                own.setdefault(name, deque(maxlen=self._num_smoothed)).extend(returns)
        self.timers.merge(meta.get("timers") or {})

    def get_state(self) -> dict[str, Any]:
        """Return windows and counts as plain values, without timers."""
        state: dict[str, Any] = {name: dict(getattr(self, name)) for name in _COUNTS_BY_NAME}
        state |= {name: getattr(self, name) for name in _COUNTS}
        state |= {
            name: [value.item() if hasattr(value, "item") else value for value in getattr(self, name)]
            for name in _WINDOWS
        }
        for name in _WINDOWS_BY_NAME:
            state[name] = {
                key: [float(value) for value in values] for key, values in getattr(self, name).items()
            }
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned; missing entries keep their values."""
        for name in _COUNTS:
            setattr(self, name, int(state.get(name, getattr(self, name))))
        for name in _COUNTS_BY_NAME:
            setattr(self, name, dict(state.get(name, getattr(self, name))))
        for name in _WINDOWS:
            if name in state:
                setattr(self, name, deque(state[name], maxlen=self._num_smoothed))
        for name in _WINDOWS_BY_NAME:
            windows = state.get(name, getattr(self, name))
            setattr(
                self, name, {key: deque(values, maxlen=self._num_smoothed) for key, values in windows.items()}
            )

    def states(self) -> dict[str, dict[str, Any]]:
        """Return everything since the last `reduce` as states that `MetricsLogger.aggregate` merges."""
        states: dict[str, dict[str, Any]] = {}
        for name, count in (
            ("num_episodes", self.num_episodes),
            ("num_env_steps_sampled", self.num_env_steps),
            *((f"num_agent_steps_sampled/{agent}", num) for agent, num in self.agent_steps.items()),
            *((f"num_module_steps_sampled/{module}", num) for module, num in self.module_steps.items()),
        ):
            base, slash, rest = name.partition("/")
            states[name] = logged_state("sum", [count])
            states[f"{base}_lifetime{slash}{rest}"] = logged_state("lifetime_sum", [count])
        for what, unit, window in (
            ("episode_return", "", self.returns),
            ("episode_len", "", self.lengths),
            ("episode_duration", "_sec", self.durations_s),
        ):
            new = _newest(window, self.num_episodes)
            for reduction in ("mean", "min", "max") if new and not unit else ("mean",) if new else ():
                states[f"{what}{unit}_{reduction}"] = self._windowed(reduction, new)
        for key, by_name in (("agent", self.agent_returns), ("module", self.module_returns)):
            for name, window in by_name.items():
                new = _newest(window, self._num_split_returns[key, name])
                if new:
                    states[f"{key}_episode_return_mean/{name}"] = self._windowed("mean", new)
        return states

    def _windowed(self, reduction: str, values: Sequence[float]) -> dict[str, Any]:
        return logged_state(reduction, values, window=self._num_smoothed)

    def reduce(self) -> dict[str, Any]:
        """Return the results under RLlib's keys; reset counts, keep the windows of means, average timers per call."""
        result: dict[str, Any] = {
            "num_episodes": self.num_episodes,
            "num_episodes_lifetime": self.num_episodes_lifetime,
            "num_env_steps_sampled": self.num_env_steps,
            "num_env_steps_sampled_lifetime": self.num_env_steps_lifetime,
            "num_agent_steps_sampled": dict(self.agent_steps),
            "num_agent_steps_sampled_lifetime": dict(self.agent_steps_lifetime),
            "num_module_steps_sampled": dict(self.module_steps),
            "num_module_steps_sampled_lifetime": dict(self.module_steps_lifetime),
        }
        result = EpisodeResults(result)
        if self.returns:
            result.update(
                episode_return_mean=sum(self.returns) / len(self.returns),
                episode_return_min=min(self.returns),
                episode_return_max=max(self.returns),
                episode_len_mean=sum(self.lengths) / len(self.lengths),
                episode_len_min=min(self.lengths),
                episode_len_max=max(self.lengths),
                episode_duration_sec_mean=sum(self.durations_s) / len(self.durations_s),
            )
        for key, by_name in (
            ("agent_episode_return_mean", self.agent_returns),
            ("module_episode_return_mean", self.module_returns),
        ):
            if by_name:
                result[key] = {name: sum(values) / len(values) for name, values in by_name.items() if values}
        result.update(self.timers.reduce())
        self.num_episodes = self.num_env_steps = 0
        self._num_split_returns.clear()
        self.agent_steps = {}
        self.module_steps = {}
        return result


class EpisodeResults(dict[str, Any]):
    """Results in which a statistic of episodes is NaN until an episode has ended.

    So ``result["env_runners"]["episode_return_mean"] >= 450`` is then False instead of a KeyError. The key is still
    absent for ``in``, ``get`` and iteration.
    """

    _STATISTICS = frozenset(
        [f"episode_{what}_{kind}" for what in ("return", "len") for kind in ("mean", "min", "max")]
        + ["episode_duration_sec_mean"]
    )

    def __missing__(self, name: str) -> float:
        if name in self._STATISTICS:
            return math.nan
        raise KeyError(name)


def _newest(window: deque[Any], count: int) -> list[Any]:
    return list(window)[max(len(window) - count, 0) :]


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
        episodes.add_fragment(meta)
        if meta.get("custom_metrics"):
            runner = meta.get("worker_index")
            if num_of_runner[runner] == len(rounds):
                rounds.append([])
            rounds[num_of_runner[runner]].append(meta["custom_metrics"])
            num_of_runner[runner] += 1
    for states in rounds:
        metrics.aggregate(states, key="env_runners")
