"""Watched: the runs and searches that the dashboard shows, found in the places that the user named."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError
from rlzmq.telemetry.curves import differing_settings
from rlzmq.telemetry.dashboard.live import LiveRun
from rlzmq.telemetry.dashboard.metrics_tail import LinesTail, MetricsTail
from rlzmq.telemetry.dashboard.trials import WatchedSearch, WatchedTrial, find_searches
from rlzmq.telemetry.event_log import EVENTS
from rlzmq.telemetry.runs import Run, find_runs

__all__ = ["Watched", "WatchedRun"]

_LOOK_S = 2.0  # between two searches for new runs
_STATE_S = 2.0  # between two checks whether a run still runs
_MAX_EVENTS = 200


class WatchedRun:
    """A run: a run directory, a trial of a search, or a broker of which only the address is known.

    Attributes:
        run_id: Its name on the page.
        label: Its name for display.
        about: ``algorithm``, ``env`` and ``seed``, as far as they are known.
        run: The run directory; None for a trial and for a broker alone.
        tail: Its results.
        live: Its broker; None for a trial.
    """

    def __init__(self, run_id: str, source: Run | WatchedTrial | str) -> None:
        self.run_id = run_id
        self.run: Run | None = source if isinstance(source, Run) else None
        self.about: dict[str, Any] = {}
        self.live: LiveRun | None = None
        self._trial = source if isinstance(source, WatchedTrial) else None
        self._events: EventsTail | None = None
        if isinstance(source, Run):
            self.label: str = source.path.name or str(source.path.absolute())
            self.about = {"algorithm": source.algorithm, "env": source.env, "seed": source.seed}
            self.tail: MetricsTail = MetricsTail(source.path / "metrics.jsonl")
            self.live = LiveRun(str(source.path))
            self._events = EventsTail(source.path / EVENTS)
        elif isinstance(source, WatchedTrial):
            self.label = f"{source.path.parent.name}/{source.path.name}"
            self.about = {"algorithm": source.path.name.rpartition("_")[0]}
            self.about |= {name: source.params.get(name) for name in ("env", "seed")}
            self.tail = source.tail
        else:
            self.label = source
            self.tail = MetricsTail(None)
            self.live = LiveRun(source)
        self._state = ("", 0.0)

    @property
    def state(self) -> str:
        """See `Run.state` and `WatchedTrial.state`; for a broker alone, "running" while it answers, else "unknown"."""
        if self.run is None and self._trial is None:
            return "running" if self.live is not None and self.live.status is not None else "unknown"
        now = time.monotonic()
        if now >= self._state[1]:
            try:
                source = self.run or self._trial
                assert source is not None
                self._state = (source.state, now + _STATE_S)
            except OSError:
                self._state = ("removed", now + _STATE_S)
        return self._state[0]

    @property
    def may_be_asked(self) -> bool:
        """Whether there may be a broker that answers."""
        return self.live is not None and (self.run is None or self.state == "running")

    @property
    def best(self) -> float | None:
        """The largest mean return so far; None before the first episode's end."""
        return self.tail.derived(_largest_return)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The newest events, oldest first; see `rlzmq.telemetry.event_log`."""
        if self._events is not None:
            return list(self._events.events)
        error = self._trial.error if self._trial is not None else ""
        if not error:
            return []
        text = error.strip().rpartition("\n")[2]
        return [{"time": None, "level": "error", "source": self.label, "text": text, "trace": error}]

    def read(self) -> bool:
        """Read a part of the new data; return whether there is more."""
        if self._events is not None:
            self._events.read()
        return self.tail.read()

    def summary(self) -> dict[str, Any]:
        """Return the run's row in the table of runs."""
        newest = self.tail.newest
        runners = newest.get("env_runners") or {}
        sampled, trained = (newest.get(f"num_env_steps_{name}_lifetime") for name in ("sampled", "trained"))
        return {
            "id": self.run_id,
            "label": self.label,
            "is_trial": self._trial is not None,
            "algorithm": self.about.get("algorithm"),
            "env": self.about.get("env"),
            "seed": self.about.get("seed"),
            "state": self.state,
            "rows": self.tail.num_rows,
            "iteration": newest.get("training_iteration"),
            "steps": sampled or trained,
            "time_s": newest.get("time_total_s"),
            "return": runners.get("episode_return_mean"),
            "best": self.best,
            "rate": runners.get("num_env_steps_sampled_lifetime_throughput"),
        }


class EventsTail(LinesTail):
    """The newest lines of a run's ``events.jsonl``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)

    def begin(self) -> None:
        self.events.clear()

    def add_lines(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                self.events.append(event)


class Watched:
    """The runs and searches in the places that the user named, including those that appear later.

    Args:
        places: Run directories, directories of runs or searches, brokers' addresses and join files.

    Raises:
        ConfigurationError: A place does not exist.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = list(places)
        self._runs: dict[str, WatchedRun] = {}
        self._searches: dict[Path, WatchedSearch] = {}
        self._looked_at = -_LOOK_S
        self._differing: tuple[int, list[str]] = (0, [])
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

    @property
    def searches(self) -> list[WatchedSearch]:
        """The searches, in the order in which they were found."""
        return list(self._searches.values())

    def get(self, run_id: str) -> WatchedRun | None:
        """Return a run by its id."""
        return next((run for run in self._runs.values() if run.run_id == run_id), None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the table of runs; each row has ``settings``, those in which the runs differ."""
        runs = self.runs
        directories = [run.run for run in runs if run.run is not None]
        if self._differing[0] != len(directories):
            names = differing_settings(directories)
            self._differing = (len(directories), [name for name in names if name not in ("seed", "env")])
        return [
            {**run.summary(), "settings": {} if run.run is None else self._settings_of(run.run)}
            for run in runs
        ]

    def _settings_of(self, run: Run) -> Mapping[str, str]:
        return {name: str(run.settings.get(name, "default"))[:40] for name in self._differing[1]}

    def look(self) -> None:
        """Look for new runs and trials, if it is time to."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for place in self._places:
            for key, source in _sources(place):
                self._add(key, source)
            if not _is_address(place):
                for path in find_searches(Path(place)):
                    self._look_at_search(path)

    def _look_at_search(self, path: Path) -> None:
        try:
            search = self._searches.get(path.absolute()) or WatchedSearch(path)
        except (OSError, ValueError):  # the file is being written
            return
        self._searches[path.absolute()] = search
        for trial in search.look():
            self._add(str(trial.path.absolute()), trial)

    async def read(self) -> bool:
        """Read a part of each file that has grown; return whether there is more."""
        return any([await asyncio.to_thread(run.read) for run in self.runs])

    async def close(self) -> None:
        """Disconnect from the brokers."""
        for run in self.runs:
            if run.live is not None:
                await run.live.close()

    def _add(self, key: str, source: Run | WatchedTrial | str) -> None:
        if key not in self._runs:
            self._runs[key] = WatchedRun(f"r{len(self._runs)}", source)


def _sources(place: str) -> Iterator[tuple[str, Run | str]]:
    """Yield (key, run) of the runs in a place."""
    if _is_address(place):
        yield place, place
        return
    try:
        for run in find_runs(place):
            yield str(run.path.absolute()), run
    except ConfigurationError:  # there are no runs yet
        return


def _largest_return(columns: Mapping[str, NDArray[np.float64]]) -> float | None:
    known = columns["mean"][np.isfinite(columns["mean"])]
    return float(known.max()) if len(known) else None


def _is_address(place: str) -> bool:
    return "://" in place or Path(place).is_file() or (Path(place) / "data").is_socket()
