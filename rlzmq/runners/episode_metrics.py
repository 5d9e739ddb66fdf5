"""Metrics of a runner's episodes: totals of ongoing ones, statistics of finished ones, and step counts.

How ``episode_return_mean`` comes about::

    a sampler                sums each chunk's rewards (`OngoingEpisodes`; with episodes `EpisodeTotals`), and
                             adds the returns of ended episodes to `FinishedEpisodes`
    EnvRunner._meta_of       sends these with the fragment, as `FragmentMeta`
    Iterations.add_update    in the driver: passes the fragments' metas to `EpisodeMetrics.add_fragment`, in order
    EpisodeMetrics.reduce    the mean over the newest ``metrics_num_episodes_for_smoothing`` episodes
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.metrics import MetricsLogger, StageTimers, logged_state
from rlzmq.core.synonyms import missing_key
from rlzmq.episodes.bad_values import LARGEST
from rlzmq.episodes.columns import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = [
    "HOW_TO_LIMIT",
    "ChunkTable",
    "EpisodeMetrics",
    "EpisodeResults",
    "EpisodeTotals",
    "FinishedEpisodes",
    "FragmentMeta",
    "OngoingEpisodes",
    "add_finished",
    "add_fragment_metas",
    "length_of",
    "recorded_return",
    "returns_of",
]

HOW_TO_LIMIT = (
    "environment(wrappers=['TimeLimit(max_episode_steps=500)']), on the command line "
    "rlzmq train … --wrappers 'TimeLimit(max_episode_steps=500)'"
)
"""Advice about episodes that never end."""

# Attributes of EpisodeMetrics, and their names in results.
_COUNTS = {"num_episodes": "num_episodes", "num_env_steps": "num_env_steps_sampled"}
_COUNTS_BY_ID = {"agent_steps": "num_agent_steps_sampled", "module_steps": "num_module_steps_sampled"}
_WINDOWS = {"returns": "episode_return", "lengths": "episode_len", "durations_s": "episode_duration_sec"}
_WINDOWS_BY_ID = {
    "agent_returns": "agent_episode_return_mean",
    "module_returns": "module_episode_return_mean",
}
_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}
_STATISTICS = [
    (attribute, f"{name}_{reduction}", reduction)
    for attribute, name in _WINDOWS.items()
    for reduction in _REDUCTIONS
    if reduction == "mean" or attribute != "durations_s"
]


class FragmentMeta(TypedDict, total=False):
    """Metadata that a runner sends with a fragment, as plain values.

    Attributes:
        worker_index, incarnation: The runner.
        num_env_steps: Number of its env steps, without autoreset steps.
        num_vector_steps: Number of vector steps that were made for it.
        weights_version, weights_generation: The weights that it was sampled with.
        agent_steps, module_steps: Steps by id. Default: all steps are the default agent's and module's.
        num_env_steps_not_finite: Number of env steps that the runner left out.
        episode_metrics: The lists of `FinishedEpisodes`, by attribute.
        timers: See `StageTimers.take`.
        custom_metrics: States of the values that callbacks logged, see `MetricsLogger.reduce`.
        connector_delta: What the connector pieces have learned since the last fragment.
    """

    worker_index: int
    incarnation: int
    num_env_steps: int
    num_vector_steps: int
    weights_version: int
    weights_generation: int
    agent_steps: dict[str, int]
    module_steps: dict[str, int]
    num_env_steps_not_finite: int
    episode_metrics: dict[str, Any]
    timers: dict[str, list[float]]
    custom_metrics: dict[str, Any]
    connector_delta: dict[str, Any]


@dataclass
class FinishedEpisodes:
    """Statistics of ended episodes, one list entry per episode.

    Attributes:
        returns: Sums of rewards over the whole episode, of all agents; or see `recorded_return`.
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
        if all(map(LARGEST.__gt__, map(abs, self.returns))):  # False for NaN
            return
        kept = [n for n, value in enumerate(self.returns) if abs(value) < LARGEST]  # False for NaN
        self.returns = [self.returns[n] for n in kept]
        self.lengths = [self.lengths[n] for n in kept]
        self.durations_s = [self.durations_s[n] for n in kept]
        for by_id in (self.agent_returns, self.module_returns):
            for returns in by_id.values():
                returns[:] = [value for value in returns if abs(value) < LARGEST]


def recorded_return(info: Mapping[str, Any]) -> float | None:
    """Return an episode's return by the info of its last step (Gymnasium's RecordEpisodeStatistics), or None.

    Wrappers around that one may scale or clip the rewards that are trained on.
    """
    recorded = info.get("episode")
    return float(recorded["r"]) if isinstance(recorded, Mapping) and "r" in recorded else None


def add_finished(finished: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the lists of other `FinishedEpisodes`, by attribute."""
    for name, values in more.items():
        if isinstance(values, Mapping):
            add_finished(finished.setdefault(name, {}), values)
        else:
            finished[name] = [*finished.get(name, ()), *values]


def length_of(episode: Any) -> int:
    """Return the env steps of a whole episode so far, of one agent or of several."""
    return episode.t if isinstance(episode, SingleAgentEpisode) else int(episode.env_t)


def returns_of(episode: Any) -> tuple[dict[Any, float], dict[Any, str]]:
    """Return a chunk's return by agent id and, with several agents, module id by agent id."""
    if isinstance(episode, SingleAgentEpisode):
        return {DEFAULT_AGENT_ID: episode.get_return()}, {}
    parts = getattr(episode, "agent_episodes", None)
    if parts is None:
        return episode.returns()  # type: ignore[no-any-return]
    returns = {agent_id: part.get_return() for agent_id, part in parts.items()}
    return returns, {agent_id: str(part.module_id) for agent_id, part in parts.items()}


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

    def add(self, returns: Mapping[Any, float], module_ids: Mapping[Any, str]) -> None:
        """Add one chunk's returns by agent."""
        for agent_id, value in returns.items():
            self.agent_returns[agent_id] = self.agent_returns.get(agent_id, 0.0) + value
        self.module_ids.update(module_ids)


@dataclass
class ChunkTable:
    """Positions of a fragment's chunks: finished ones by (step, env), then ongoing ones by env.

    Attributes:
        env_index: int64[C].
        first_step: int64[C], first step, counted from the fragment's begin.
        length: int64[C], number of steps.
        terminated, truncated: bool[C].
        continues: bool[C], whether the chunk's episode began before the fragment.
        num_finished: Number of chunks that ended their episode.
    """

    env_index: NDArray[np.int64]
    first_step: NDArray[np.int64]
    length: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    continues: NDArray[np.bool_]
    num_finished: int

    def select(self, mask: NDArray[np.bool_]) -> ChunkTable:
        """Return the chunks where ``mask`` is True."""
        return ChunkTable(
            self.env_index[mask],
            self.first_step[mask],
            self.length[mask],
            self.terminated[mask],
            self.truncated[mask],
            self.continues[mask],
            int(mask[: self.num_finished].sum()),
        )


class OngoingEpisodes:
    """Ids, steps, returns and start times of each env's current episode.

    Args:
        num_envs: Number of environments; a new episode begins in each one.
        new_id: Creates episode ids.

    Attributes:
        ids: Episode id per env.
        steps: int64[N], number of env steps so far.
        returns: float64[N], sum of rewards so far.
        started_s: float64[N], start time on the clock of ``time.perf_counter``.
    """

    def __init__(self, num_envs: int, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.ids: list[str] = [new_id() for _ in range(num_envs)]
        self.steps: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.returns: NDArray[np.float64] = np.zeros(num_envs, np.float64)
        self.started_s: NDArray[Any] = np.full(num_envs, time.perf_counter())

    def close(self, index: int, finished: FinishedEpisodes) -> None:
        """End the episode of env ``index`` between two fragments; its chunks have been returned already."""
        if self.steps[index]:
            finished.returns.append(float(self.returns[index]))
            finished.lengths.append(int(self.steps[index]))
            finished.durations_s.append(time.perf_counter() - float(self.started_s[index]))
        self.steps[index] = 0

    def add_fragment(
        self,
        table: ChunkTable,
        chunk_returns: NDArray[np.float64],
        begin_s: float,
        num_steps: int,
        finished: FinishedEpisodes,
    ) -> tuple[list[str], NDArray[np.int64]]:
        """Add a fragment's chunks.

        Args:
            table: The chunks.
            chunk_returns: float64[C].
            begin_s: Start time of the fragment.
            num_steps: The fragment's number of vector steps.
            finished: Receives the ended episodes.

        Returns:
            The episode id of each chunk, and its first time step.
        """
        if not table.num_finished and len(table.env_index) == len(self.ids) and table.continues.all():
            t_started, self.steps = self.steps, self.steps + table.length
            self.returns += chunk_returns
            return list(self.ids), t_started
        end_s = time.perf_counter()
        step_s = (end_s - begin_s) / max(num_steps, 1)
        env, continues, num = table.env_index, table.continues, table.num_finished
        total_returns = chunk_returns + np.where(continues, self.returns[env], 0.0)
        t_started = np.where(continues, self.steps[env], 0)
        total_steps = table.length + t_started
        started_s = np.where(continues, self.started_s[env], begin_s + step_s * table.first_step)

        ended_s = begin_s + step_s * (table.first_step[:num] + table.length[:num])
        finished.returns += total_returns[:num].tolist()
        finished.lengths += total_steps[:num].tolist()
        finished.durations_s += (ended_s - started_s[:num]).tolist()

        ids = [
            self.ids[index] if is_continued else self._new_id()
            for index, is_continued in zip(env.tolist(), continues.tolist(), strict=True)
        ]
        self.steps[:] = 0
        self.returns[:] = 0.0
        self.started_s[:] = end_s
        open_envs = env[num:]
        self.steps[open_envs] = total_steps[num:]
        self.returns[open_envs] = total_returns[num:]
        self.started_s[open_envs] = started_s[num:]
        open_ids = dict(zip(open_envs.tolist(), ids[num:], strict=True))
        self.ids = [open_ids.get(index) or self._new_id() for index in range(len(self.ids))]
        return ids, t_started


class EpisodeMetrics:
    """Returns, lengths and durations of finished episodes, step counts, and timers.

    Args:
        num_smoothed: Window of means, minima and maxima, in episodes.
    """

    def __init__(self, num_smoothed: int = 100) -> None:
        self.returns: deque[float] = deque(maxlen=num_smoothed)
        self.lengths: deque[int] = deque(maxlen=num_smoothed)
        self.durations_s: deque[float] = deque(maxlen=num_smoothed)
        self.agent_returns: dict[str, deque[float]] = {}
        self.module_returns: dict[str, deque[float]] = {}
        self.timers: StageTimers = StageTimers()
        # By runner: env steps, seconds of sampling, seconds in between.
        self._speeds: dict[int, list[float]] = {}
        self._num_smoothed = num_smoothed
        self._num_new_returns: Counter[tuple[str, str]] = Counter()  # by attribute and id
        self.num_episodes: int = 0
        self.num_episodes_lifetime: int = 0
        self.num_env_steps: int = 0
        self.num_env_steps_lifetime: int = 0
        self.agent_steps: Counter[str] = Counter()
        self.module_steps: Counter[str] = Counter()
        self.agent_steps_lifetime: Counter[str] = Counter()
        self.module_steps_lifetime: Counter[str] = Counter()

    def add_fragment(self, meta: FragmentMeta) -> None:
        """Add a fragment's metadata: step counts, finished episodes and timers."""
        num_env_steps = int(meta.get("num_env_steps", 0))
        self.num_env_steps += num_env_steps
        self.num_env_steps_lifetime += num_env_steps
        for counts, lifetime, steps in (
            (
                self.agent_steps,
                self.agent_steps_lifetime,
                meta.get("agent_steps", {DEFAULT_AGENT_ID: num_env_steps}),
            ),
            (
                self.module_steps,
                self.module_steps_lifetime,
                meta.get("module_steps", {DEFAULT_MODULE_ID: num_env_steps}),
            ),
        ):
            for id_, count in steps.items():
                counts[id_] += count
                lifetime[id_] += count
        finished = meta.get("episode_metrics") or {}
        if any(finished.values()):
            for name in _WINDOWS:
                getattr(self, name).extend(finished.get(name, ()))
            self.num_episodes += len(finished.get("returns", ()))
            self.num_episodes_lifetime += len(finished.get("returns", ()))
        for name in _WINDOWS_BY_ID.keys() & finished.keys():
            for id_, returns in finished[name].items():
                self._num_new_returns[name, id_] += len(returns)
                getattr(self, name).setdefault(id_, self._window()).extend(returns)
        timers = meta.get("timers") or {}
        self.timers.merge(timers)
        if "sample" in timers and type(meta.get("worker_index")) is int:  # it is shown on terminals
            sums = self._speeds.setdefault(meta["worker_index"], [0, 0.0, 0.0])
            sums[0] += num_env_steps
            sums[1] += timers["sample"][1]
            sums[2] += timers.get("time_between_sampling", (0, 0.0))[1]

    def _window(self, values: Iterable[Any] = ()) -> deque[Any]:
        return deque(values, maxlen=self._num_smoothed)

    def get_state(self) -> dict[str, Any]:
        """Return windows and counts as plain values, without timers."""
        state: dict[str, Any] = {}
        for end in ("", "_lifetime"):
            state |= {name + end: getattr(self, name + end) for name in _COUNTS}
            state |= {name + end: dict(getattr(self, name + end)) for name in _COUNTS_BY_ID}
        for name in _WINDOWS:
            state[name] = [value.item() if hasattr(value, "item") else value for value in getattr(self, name)]
        for name in _WINDOWS_BY_ID:
            state[name] = {id_: list(map(float, values)) for id_, values in getattr(self, name).items()}
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned; missing entries keep their values."""
        for end in ("", "_lifetime"):
            for name in (name + end for name in _COUNTS if name + end in state):
                setattr(self, name, int(state[name]))
            for name in (name + end for name in _COUNTS_BY_ID if name + end in state):
                setattr(self, name, Counter(state[name]))
        for name in _WINDOWS.keys() & state.keys():
            setattr(self, name, self._window(state[name]))
        for name in _WINDOWS_BY_ID.keys() & state.keys():
            setattr(self, name, {id_: self._window(values) for id_, values in state[name].items()})

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the data since the last `reduce` as states that `MetricsLogger.aggregate` merges."""
        states: dict[str, dict[str, Any]] = {}

        def add_count(name: str, id_: str, count: int) -> None:
            states[name + id_] = logged_state("sum", [count])
            states[f"{name}_lifetime{id_}"] = logged_state("lifetime_sum", [count])

        for attribute, name in _COUNTS.items():
            add_count(name, "", getattr(self, attribute))
        for attribute, name in _COUNTS_BY_ID.items():
            for id_, count in getattr(self, attribute).items():
                add_count(name, f"/{id_}", count)
        for attribute, name, reduction in _STATISTICS:
            new = _newest(getattr(self, attribute), self.num_episodes)
            if new:
                states[name] = logged_state(reduction, new, window=self._num_smoothed)
        for attribute, name in _WINDOWS_BY_ID.items():
            for id_, window in getattr(self, attribute).items():
                new = _newest(window, self._num_new_returns[attribute, id_])
                if new:
                    states[f"{name}/{id_}"] = logged_state("mean", new, window=self._num_smoothed)
        return states

    def reduce(self) -> dict[str, Any]:
        """Return the results under RLlib's keys; reset counts, keep the windows of means, average timers per call."""
        result = EpisodeResults()
        for attribute, name in {**_COUNTS, **_COUNTS_BY_ID}.items():
            for end in ("", "_lifetime"):
                count = getattr(self, attribute + end)
                result[name + end] = count if isinstance(count, int) else dict(count)
        for attribute, name, reduction in _STATISTICS if self.returns else ():
            result[name] = _REDUCTIONS[reduction](getattr(self, attribute))
        for attribute, name in _WINDOWS_BY_ID.items():
            windows = getattr(self, attribute)
            if windows:
                result[name] = {id_: sum(values) / len(values) for id_, values in windows.items() if values}
        result.update(self.timers.reduce())
        if len(self._speeds) > 1:
            result["runner_speed"] = self._runner_speed()
        self._speeds = {}
        self.num_episodes = self.num_env_steps = 0
        self._num_new_returns.clear()
        self.agent_steps, self.module_steps = Counter(), Counter()
        return result

    def _runner_speed(self) -> dict[str, Any]:
        """Return how fast several runners sample."""
        sums = self._speeds
        speeds = {runner: steps / max(sample_s, 1e-9) for runner, (steps, sample_s, _) in sums.items()}
        ascending = sorted(speeds.values())
        busy = [sample_s / max(sample_s + between_s, 1e-9) for _, sample_s, between_s in sums.values()]
        return {
            "min": ascending[0],
            "median": ascending[len(ascending) // 2],  # with two runners, that of the faster one
            "mean": sum(ascending) / len(ascending),
            "slowest": min(speeds, key=speeds.__getitem__),
            "busy_mean": sum(busy) / len(busy),
            "busy_max": max(busy),
        }


class EpisodeResults(dict[str, Any]):
    """Results in which a statistic of episodes is NaN until an episode has ended.

    ``result["env_runners"]["episode_return_mean"] >= 450`` is then False instead of a KeyError. The key is still absent
    for ``in``, ``get`` and iteration.
    """

    _NAMES = frozenset(name for _, name, _ in _STATISTICS)

    def __missing__(self, name: str) -> float:
        if name in self._NAMES:
            return math.nan
        raise KeyError(missing_key(name, [*self, *self._NAMES]))


def _newest(window: deque[Any], count: int) -> list[Any]:
    return list(window)[max(len(window) - count, 0) :]


def add_fragment_metas(
    episodes: EpisodeMetrics, metrics: MetricsLogger, metas: Iterable[FragmentMeta]
) -> None:
    """Add fragments' metadata to the episode metrics, and the values that callbacks logged to `metrics`."""
    rounds: list[list[Any]] = []  # the first fragment of each runner, then the second, …
    num_of_runner: dict[Any, int] = {}
    for meta in metas:
        episodes.add_fragment(meta)
        if meta.get("custom_metrics"):
            runner = meta.get("worker_index")
            num = num_of_runner.get(runner, 0)
            if num == len(rounds):
                rounds.append([])
            rounds[num].append(meta["custom_metrics"])
            num_of_runner[runner] = num + 1
    for states in rounds:
        metrics.aggregate(states, key="env_runners")
