"""Watched: the runs that the dashboard shows, found in the places that the user named."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.telemetry.dashboard.live import LiveRun
from rlzmq.telemetry.dashboard.metrics_tail import MetricsTail
from rlzmq.telemetry.runs import Run, find_runs

__all__ = ["Watched", "WatchedRun", "summary_of"]

_LOOK_S = 2.0  # between two looks for new runs
_STATE_S = 2.0  # between two looks at whether a run still runs


class WatchedRun:
    """One run: its directory with the results, or only the address of its broker, or both.

    Attributes:
        run_id: Its name on the page.
        run: Its directory; None: only its broker is known.
        tail: Its results.
        live: Its broker.
    """

    def __init__(self, run_id: str, run: Run | None, where: str) -> None:
        self.run_id = run_id
        self.where = where
        self.run = run
        self.tail = MetricsTail(Path(where) / "metrics.jsonl" if run is not None else Path("/dev/null"))
        self.live = LiveRun(where)
        self._state = ("", 0.0)
        self._best: tuple[int, float | None] = (-1, None)

    @functools.cached_property
    def label(self) -> str:
        """The directory's name, or the address."""
        return self.where if self.run is None else self.run.path.name or str(self.run.path.absolute())

    @property
    def state(self) -> str:
        """See `Run.state`; of a broker without a directory "running" while it answers, else "unknown"."""
        if self.run is None:
            return "running" if self.live.status is not None else "unknown"
        now = time.monotonic()
        if now >= self._state[1]:
            try:
                self._state = (self.run.state, now + _STATE_S)
            except OSError:
                self._state = ("removed", now + _STATE_S)
        return self._state[0]

    @property
    def best(self) -> float | None:
        """The largest mean return so far; None before the first episode has ended."""
        num_read = self.tail.num_read
        if self._best[0] != num_read:
            returns = self.tail.columns()["mean"]
            best = np.fmax.reduce(returns) if len(returns) else np.nan
            self._best = (num_read, None if np.isnan(best) else float(best))
        return self._best[1]


class Watched:
    """The runs in the places that the user named; new ones are found while they are watched.

    Args:
        places: Run directories, directories of runs, brokers' addresses and join files.

    Raises:
        ConfigurationError: A place does not exist.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = list(places)
        self._runs: dict[str, WatchedRun] = {}
        self._looked_at = -_LOOK_S
        for place in places:
            if not _is_address(place) and not Path(place).is_dir():
                raise ConfigurationError(
                    f"{place} does not exist: name run directories, directories of runs, a join file, or ipc:///path "
                    "of a broker's data socket."
                )
        self.look()

    @property
    def runs(self) -> list[WatchedRun]:
        """The runs, in the order in which they were found."""
        return list(self._runs.values())

    def get(self, run_id: str) -> WatchedRun | None:
        """Return a run by its id."""
        return next((run for run in self._runs.values() if run.run_id == run_id), None)

    def look(self) -> None:
        """Look for new runs, if it is time to."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for place in self._places:
            if _is_address(place):
                self._add(place, None)
                continue
            try:
                found = find_runs(place)
            except ConfigurationError:  # none so far
                continue
            for run in found:
                self._add(str(run.path), run)

    async def read(self) -> None:
        """Read a slice of each file that has grown."""
        for run in self.runs:
            if run.run is not None:
                await asyncio.to_thread(run.tail.read)

    async def close(self) -> None:
        """Leave the brokers."""
        for run in self.runs:
            await run.live.close()

    def _add(self, where: str, run: Run | None) -> None:
        key = where if run is None else str(Path(where).absolute())
        if key not in self._runs:
            self._runs[key] = WatchedRun(f"r{len(self._runs)}", run, where)


def _is_address(place: str) -> bool:
    return "://" in place or Path(place).is_file() or (Path(place) / "data").is_socket()


def summary_of(watched: WatchedRun) -> dict[str, Any]:
    """Return a run's row in the table of runs."""
    run, newest = watched.run, watched.tail.newest
    runners = newest.get("env_runners", {})
    return {
        "id": watched.run_id,
        "label": watched.label,
        "algorithm": run.algorithm if run is not None else "",
        "env": run.env if run is not None else "",
        "seed": run.seed if run is not None else None,
        "state": watched.state,
        "rows": watched.tail.num_rows,
        "iteration": newest.get("training_iteration"),
        "steps": newest.get("num_env_steps_sampled_lifetime") or newest.get("num_env_steps_trained_lifetime"),
        "time_s": newest.get("time_total_s"),
        "return": runners.get("episode_return_mean"),
        "best": watched.best,
        "rate": runners.get("num_env_steps_sampled_lifetime_throughput"),
    }
