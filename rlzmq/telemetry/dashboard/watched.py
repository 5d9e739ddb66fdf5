"""Watched: the runs and searches that the dashboard shows, found in the places that the user named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError, RlzmqError
from rlzmq.net.keys import JoinFile
from rlzmq.roles.remote_peer import Observer
from rlzmq.telemetry.run_directory import EVENTS
from rlzmq.telemetry.runs import RETURN_MEAN, X_AXES, Run, differing_settings, find_runs, number_at, value_at

__all__ = [
    "COLUMNS",
    "MetricsTail",
    "Rates",
    "Watched",
    "WatchedRun",
    "broker_of_run",
    "find_broker",
    "runner_grid",
]


COLUMNS = {
    "iterations": X_AXES["iterations"],
    "steps": X_AXES["steps"],
    "trained": "num_env_steps_trained_lifetime",
    "time": X_AXES["time"],
    "mean": RETURN_MEAN,
    "low": "env_runners/episode_return_min",
    "high": "env_runners/episode_return_max",
    "rate": "env_runners/num_env_steps_sampled_lifetime_throughput",
}
"""Column name -> path of its number in a result."""

_FIRST_ROWS = 1024
_SLICE_BYTES = 4 << 20


class MetricsTail:
    """The numbers of a file with one result per line, as columns. A repeated iteration replaces the earlier one.

    `read` may run in another thread than the other methods.

    Args:
        path: The file. It may be missing, or be replaced while it is read. None: there is no file.

    Attributes:
        num_read: A counter that rises whenever the numbers change.
        newest: The newest result; {} before the first.
        steps_by_lag: Number of trained env steps by policy lag, of all results. Iterations that were repeated after a
            return to a checkpoint count each time.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""
        self._lock = threading.Lock()
        self.num_read: int = 0
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            self._rows = np.empty((_FIRST_ROWS, len(COLUMNS)))
            self._num_rows = 0
            self.newest: Mapping[str, Any] = {}
            self.steps_by_lag: list[int] = []
            self.num_read += 1

    @property
    def num_rows(self) -> int:
        """Number of results."""
        return self._num_rows

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns by name ``[N]``, with NaN where a result lacks the number. Do not modify them."""
        with self._lock:
            rows = self._rows[: self._num_rows]
            return {name: rows[:, index] for index, name in enumerate(COLUMNS)}

    def read(self) -> bool:
        """Read at most 4 MiB of new data; return whether there is more."""
        if self._path is None:
            return False
        try:
            with open(self._path, "rb") as file:
                facts = os.fstat(file.fileno())
                if self._inode is not None and (facts.st_ino != self._inode or facts.st_size < self._offset):
                    self._offset, self._rest = 0, b""
                    self._begin()
                self._inode = facts.st_ino
                if facts.st_size == self._offset:
                    return False
                file.seek(self._offset)
                data = file.read(_SLICE_BYTES)
        except OSError:  # the file does not exist yet, or was removed
            return False
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self._add_lines(lines)
        return self._offset < facts.st_size

    def _add_lines(self, lines: Sequence[bytes]) -> None:
        rows: list[list[float]] = []
        paths = list(COLUMNS.values())
        for line in lines:
            try:
                result = json.loads(line)
                row = [math.nan if (at := value_at(result, path)) is None else float(at) for path in paths]
            except (ValueError, TypeError):  # a torn line
                continue
            if math.isnan(row[0]):
                continue
            while rows and rows[-1][0] >= row[0]:
                rows.pop()
            rows.append(row)
            self.newest = result
            self._add_lags(result)
        with self._lock:
            if rows:
                self._add(rows)
            self.num_read += 1

    def _add_lags(self, result: Mapping[str, Any]) -> None:
        counts = value_at(result, "policy_lag/num_env_steps")
        if isinstance(counts, list) and all(type(count) is int for count in counts):
            self.steps_by_lag = [
                known + new for known, new in zip_longest(self.steps_by_lag, counts, fillvalue=0)
            ]

    def _add(self, rows: Sequence[Sequence[float]]) -> None:
        count = self._num_rows
        if count and self._rows[count - 1, 0] >= rows[0][0]:
            count = int(np.searchsorted(self._rows[:count, 0], rows[0][0]))
            self._rows = self._rows.copy()  # readers keep the previous columns
        end = count + len(rows)
        if end > len(self._rows):
            more = np.empty((max(end, 2 * len(self._rows)), len(COLUMNS)))
            more[:count] = self._rows[:count]
            self._rows = more
        self._rows[count:end] = rows
        self._num_rows = end


_SEARCH, _CONFIG = "__search__", "__algorithm_config__"
_LOGARITHMIC = ("loguniform", "qloguniform", "lograndint", "qlograndint")
_MAX_TEXT = 40


class WatchedTrial:
    """One trial's directory.

    Attributes:
        path: The directory.
        tail: Its results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail: MetricsTail = MetricsTail(path / "result.json")
        self._params: tuple[int, dict[str, Any]] = (0, {})

    @property
    def params(self) -> dict[str, Any]:
        """Its current config, which population-based training may change."""
        file = self.path / "params.json"
        try:
            changed = file.stat().st_mtime_ns
            if changed != self._params[0]:
                self._params = (changed, json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # not written yet
            pass
        return self._params[1]

    @property
    def state(self) -> str:
        """``"failed"``, ``"ended"``, ``"running"``, ``"unfinished"`` or ``"starting"``."""
        if (self.path / "error.txt").exists():
            return "failed"
        newest = self.tail.newest
        if not newest:
            return "starting"
        if newest.get("done"):
            return "ended"
        return "running" if Path(f"/proc/{newest.get('pid')}").exists() else "unfinished"

    @property
    def error(self) -> str:
        """The traceback of the error that ended it; "" if there is none."""
        try:
            return (self.path / "error.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


class WatchedSearch:
    """A search.

    Attributes:
        path: Its directory.
        trials: Its trials so far, by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[str, WatchedTrial] = {}
        stored = json.loads((path / "tuner.json").read_text(encoding="utf-8"))
        space = (stored.get("param_space") or {}).get("value") or {}
        self._axes = dict(_searched((space.get(_CONFIG) or {}).get("values") or space))
        fields = (stored.get("tune_config") or {}).get("fields") or {}
        self._metric = (fields.get("metric") or {}).get("value") or "env_runners/episode_return_mean"
        self._mode = (fields.get("mode") or {}).get("value") or "max"

    def look(self) -> list[WatchedTrial]:
        """Look for new trials and return them."""
        found = sorted(path.parent for path in self.path.glob("*/params.json"))
        new = [WatchedTrial(path) for path in found if path.name not in self.trials]
        self.trials |= {trial.path.name: trial for trial in new}
        return new

    def table(self) -> dict[str, Any]:
        """Return the search's axes and trials.

        The form is ``{"metric", "mode", "axes": [{"path", "is_log"}], "trials": [{"name", "state", "iteration",
        "values", "metric"}]}``; values that are not numbers are given as text.
        """
        return {
            "name": self.path.name,
            "metric": self._metric,
            "mode": self._mode,
            "axes": [{"path": path, "is_log": kind in _LOGARITHMIC} for path, kind in self._axes.items()],
            "trials": [
                {
                    "name": name,
                    "state": trial.state,
                    "iteration": trial.tail.newest.get("training_iteration"),
                    "values": [_plain(value_at(trial.params, path)) for path in self._axes],
                    "metric": number_at(trial.tail.newest, self._metric),
                }
                for name, trial in sorted(self.trials.items())
            ],
        }


def find_searches(place: Path) -> list[Path]:
    """Return the directories of searches in a directory, which may be one itself."""
    return [
        path.parent
        for pattern in ("tuner.json", "*/tuner.json", "*/*/tuner.json")
        for path in place.glob(pattern)
    ]


def _searched(space: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, kind) of the search objects in a stored space."""
    if not isinstance(space, Mapping):
        return
    for name, value in space.items():
        if isinstance(value, Mapping) and isinstance(value.get(_SEARCH), Mapping):
            yield f"{prefix}{name}", next(iter(value[_SEARCH]), "")
        else:
            yield from _searched(value, f"{prefix}{name}/")


def _plain(value: object) -> float | str | None:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        return (value if isinstance(value, str) else json.dumps(value))[:_MAX_TEXT]
    return value


_TIMEOUT_S = 2.0
_LEAST_INTERVAL_S = 1.0
_RUNNERS_PER_S = 1000  # with many runners, poll less often, so that the broker's load stays bounded
_MAX_GONE = 500


class LiveRun:
    """The newest status of one broker.

    Attributes:
        status: The broker's status (`BrokerCore.status`); None if it did not answer.
        rates: Env steps per second by runner, with ``"sampled"`` and ``"trained"`` for the totals.
        problem: Why there is no status; "" if there is one.
        gone: Runners that have left.
    """

    problem: str

    def __init__(self, where: str) -> None:
        self._where = where
        self._open = AsyncExitStack()
        self._observer: Observer | None = None
        self._rates = Rates()
        self._next_at = 0.0
        self._known: dict[str, None] = {}
        self.status: Mapping[str, Any] | None = None
        self.rates: Mapping[str, float] = {}
        self.problem = "not asked so far"
        self.gone: list[str] = []

    async def poll(self) -> None:
        """Request the broker's status, if it is time to."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + _LEAST_INTERVAL_S
        try:
            if self._observer is None:
                address, join = await asyncio.to_thread(find_broker, self._where)
                self._observer = await self._open.enter_async_context(Observer(address, join))
            status = await self._observer.status(timeout_s=_TIMEOUT_S)
        except (RlzmqError, OSError) as error:
            self.status, self.rates, self.problem = None, {}, str(error)
            await self.close()
            if not isinstance(error, ConfigurationError):
                self._next_at += _TIMEOUT_S
            return
        self.status, self.problem = status, ""
        self.rates = self._rates.update(status, time.monotonic())
        names = {runner["name"] for runner in status["runners"]}
        self._known |= dict.fromkeys(names)
        self.gone = [name for name in self._known if name not in names][-_MAX_GONE:]
        self._next_at = now + max(_LEAST_INTERVAL_S, len(names) / _RUNNERS_PER_S)

    async def close(self) -> None:
        """Disconnect from the broker; `poll` connects again."""
        self._observer = None
        opened, self._open = self._open, AsyncExitStack()
        await opened.aclose()


def runner_grid(live: LiveRun | None) -> dict[str, Any]:
    """Return the runners' states and numbers in columns, one entry per runner.

    The state is a letter: "s" samples, "i" waits for a lease, "u" suspect (it missed heartbeats), "g" gone.
    """
    status = live.status if live is not None else None
    runners = [] if status is None else status["runners"]
    gone = [] if live is None or status is None else live.gone
    rates = {} if live is None else live.rates
    return {
        "problem": "" if live is None else live.problem,
        "names": [runner["name"] for runner in runners] + gone,
        "states": "".join(map(_state_of, runners)) + "g" * len(gone),
        "rates": [round(rates.get(runner["name"], 0.0), 1) for runner in runners],
        "steps": [runner["num_env_steps"] for runner in runners],
        "leases": [runner["num_leases"] for runner in runners],
        "oldest_s": [round(runner["oldest_lease_s"], 1) for runner in runners],
        "bad": [runner["num_bad"] for runner in runners],
        "learners": [
            {"name": learner["name"], "rank": learner["rank"], "update": learner["next_update"]}
            for learner in ([] if status is None else status["learners"])
        ],
    }


def _state_of(runner: Mapping[str, Any]) -> str:
    if runner["is_suspect"]:
        return "u"
    return "s" if runner["num_leases"] else "i"


_LOOK_S = 2.0  # between two searches for new runs
_STATE_S = 2.0  # between two checks whether a run still runs
_MAX_EVENTS, _EVENTS_BYTES = 200, 1 << 20  # that are shown


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
        if isinstance(source, Run):
            self.label: str = source.path.name or str(source.path.absolute())
            self.about = {"algorithm": source.algorithm, "env": source.env, "seed": source.seed}
            self.tail: MetricsTail = MetricsTail(source.path / "metrics.jsonl")
            self.live = LiveRun(str(source.path))
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
        source = self.run or self._trial
        if source is None:
            return "running" if self.live is not None and self.live.status is not None else "unknown"
        now = time.monotonic()
        if now >= self._state[1]:
            try:
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
        means = self.tail.columns()["mean"]
        known = means[np.isfinite(means)]
        return float(known.max()) if len(known) else None

    @property
    def events(self) -> list[dict[str, Any]]:
        """The newest events, oldest first; see `rlzmq.telemetry.run_directory`."""
        if self.run is not None:
            return newest_events(self.run.path / EVENTS)
        error = self._trial.error if self._trial is not None else ""
        if not error:
            return []
        text = error.strip().rpartition("\n")[2]
        return [{"time": None, "level": "error", "source": self.label, "text": text, "trace": error}]

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


def newest_events(file: Path) -> list[dict[str, Any]]:
    """Return the newest lines of a run's ``events.jsonl``, oldest first."""
    try:
        with open(file, "rb") as lines:
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - _EVENTS_BYTES))
            texts = lines.read().splitlines()[-_MAX_EVENTS:]
    except OSError:  # nothing has happened
        return []
    events = []
    for text in texts:
        with contextlib.suppress(ValueError):  # a line that is being written, or the end of one
            if isinstance(event := json.loads(text), dict):
                events.append(event)
    return events


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
        return any([await asyncio.to_thread(run.tail.read) for run in self.runs])

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


def _is_address(place: str) -> bool:
    return "://" in place or Path(place).is_file() or (Path(place) / "data").is_socket()


_SOCKET = "data"
_LOCK = "/owner.lock"


def find_broker(where: str) -> tuple[str, JoinFile | None]:
    """Return (data address, JoinFile or None) of a run.

    Args:
        where: A join file, a run directory, a run's private directory, ``ipc:///path`` of its data socket; "": the
            newest run of this user on this machine.

    Raises:
        ConfigurationError: No run was found.
    """
    if where.startswith("ipc://"):
        return where, None
    if where.startswith("tcp://"):
        raise ConfigurationError(f"{where}: TCP needs keys; give the run's join file instead")
    if where and Path(where).is_file():
        join = JoinFile.read(where)
        return join.addresses["data"], join
    if where and (Path(where) / "run.json").is_file():
        run = Run.open(where)
        address = broker_of_run(run) if run.state == "running" else None
        if address is None:
            why = "it has ended"
            if run.state != "ended":
                why = f"its driver is on {run.facts.get('host')}: name its join.observer.toml; or it has no broker"
            raise ConfigurationError(f"{where}: no broker of this run is here ({why})")
        return address, None
    directories = [Path(where)] if where else _own_socket_directories()
    for directory in directories:
        if (directory / _SOCKET).is_socket():
            return f"ipc://{(directory / _SOCKET).absolute()}", None
    what = f"no run has its sockets in {where}" if where else "no run of this user is here"
    raise ConfigurationError(f"{what}: give a join file, a run or private directory, or ipc:///path/data")


def broker_of_run(run: Run) -> str | None:
    """Return the address of a running run's broker; None if it is on another machine, of another user, or missing.

    The run's driver holds a lock on the directory of its sockets.
    """
    pid = run.facts.get("pid")
    if not isinstance(pid, int) or run.facts.get("host") != platform.node():
        return None
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # it may have ended
        for entry in entries:
            with contextlib.suppress(OSError):  # closed in the meantime
                target = os.readlink(entry.path)
                if target.endswith(_LOCK) and (path := Path(target).with_name(_SOCKET)).is_socket():
                    return f"ipc://{path}"
    return None


def _own_socket_directories() -> list[Path]:
    bases = {
        Path(base) for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp") if base
    }
    found = [path for base in bases for path in base.glob("rlzmq-*") if path.is_dir()]
    own = [path for path in found if path.stat().st_uid == os.getuid()]
    return sorted(own, key=lambda path: path.stat().st_mtime, reverse=True)


class Rates:
    """Env steps per second between two status reports, per runner and in total."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, int]] | None = None

    def update(self, status: Mapping[str, Any], now: float) -> dict[str, float]:
        """Return env steps/s since the last call by runner name; ``"sampled"`` and ``"trained"`` are the totals."""
        counts = {runner["name"]: int(runner["num_env_steps"]) for runner in status["runners"]}
        counts |= {name: int(status["accounting"][name]) for name in ("sampled", "trained")}
        before, self._before = self._before, (now, counts)
        if before is None:
            return {}
        seconds = max(now - before[0], 1e-9)
        return {name: max(0, count - before[1].get(name, 0)) / seconds for name, count in counts.items()}
