"""Trace: the stages of a run's processes over time, in one file for Perfetto (ui.perfetto.dev) or chrome://tracing.

    driver: create ──► file ◄── join: every other process of the host     (each appends whole lines, O_APPEND)
                         ▲
            add_events ──┘◄── take_events: processes of other hosts, whose links send them to the driver

The file is a JSON array of trace events, one per line. A killed run leaves the array open, which both viewers and
`read_trace` accept. Times are microseconds of the monotonic clock of the driver's host, which all its processes share;
those of other hosts are placed by both hosts' wall clocks (`WALL_OFFSET_S`). Without `create` or `join`, `span` is not
called: see `is_on`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import platform
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import opener
from rlzmq.core.process import boot_id

__all__ = [
    "WALL_OFFSET_S",
    "add_events",
    "close",
    "create",
    "flow",
    "flush",
    "is_on",
    "is_remote",
    "join",
    "read_trace",
    "span",
    "take_events",
]


MAX_FILE_BYTES = 256 * 2**20
"""File size at which the processes stop writing: about 2.5 million events, which viewers can still open."""

_MAX_EVENTS = 1000  # maximum number of events in memory
_MAX_THREADS = 64  # maximum number of threads per process
_MAX_WAITING = 20_000  # maximum number of events that wait for `take_events`
_MAX_SOURCES = 10_000  # maximum number of processes of other hosts
_MAX_NAME = 200  # maximum length of names from other hosts
_FIRST_PID = 1 << 22  # above all process ids of Linux: numbers of the processes of other hosts
_MAX_AGE_S = 1.0  # maximum age of an event in memory, which a killed process loses

WALL_OFFSET_S = time.time() - time.perf_counter()
"""What a stage's time lacks to be one of the wall clock; read once, so that a process's stages keep their order."""

_log = logging.getLogger("rlzmq.core")

is_on: bool = False
"""Whether this process is traced. It is checked before `span` is called, so runs without a trace pay nothing."""

_writer: _Writer | _Waiting | None = None


def create(path: str | os.PathLike[str], name: str) -> None:
    """Start a trace in this process. Other processes may join it.

    Args:
        path: The file; an existing one is overwritten.
        name: Name of this process's track.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    close()
    try:
        with open(path, "w", encoding="utf-8", opener=opener) as file:
            file.write(f"[\n{_header()}")
    except OSError as error:
        raise ConfigurationError(f"cannot write the trace {path}: {error.strerror}") from None
    _begin(path, name)


def join(path: str | os.PathLike[str] | None, name: str) -> None:
    """Add this process to a trace. If its file was created on another host, the stages wait for `take_events`.

    Args:
        path: See `create`; None: no trace.
        name: Name of this process's track. A process that is already traced keeps its name.
    """
    if path is None or is_on:
        return
    try:
        with open(path, encoding="utf-8") as file:
            is_here = file.readline() == "[\n" and file.readline() == _header()
    except OSError:
        is_here = False
    if not is_here:
        _log.info("The trace %s belongs to another host: %s sends its stages to the driver.", path, name)
        _use(_Waiting(name))
        return
    _begin(path, name)


def span(name: str, begin_s: float, end_s: float, **facts: Any) -> None:
    """Add a stage of the calling thread.

    Args:
        name: The stage.
        begin_s, end_s: Times of ``time.perf_counter`` or ``time.monotonic``, which are the same clock on Linux.
        facts: Plain values to show with the stage.
    """
    if _writer is not None:
        _writer.add(("X", name, begin_s, end_s - begin_s, threading.get_ident(), facts), end_s)


def flow(id_: str, at_s: float, *, ends: bool) -> None:
    """Start an arrow at this thread's stage at this time, or end the one that was started with this id, anywhere."""
    if _writer is not None:
        _writer.add(("f" if ends else "s", id_, at_s, 0.0, threading.get_ident(), {}), at_s)


def flush() -> None:
    """Write the events that are still in memory."""
    if isinstance(_writer, _Writer):
        _writer.flush()


def is_remote() -> bool:
    """Return whether the trace belongs to another host, so that `take_events` must be called."""
    return isinstance(_writer, _Waiting)


def take_events(max_events: int) -> dict[str, Any] | None:
    """Return and remove events for `add_events` as plain values, with times of this host's clock; None: none wait.

    If too many wait, the oldest are lost. ``offset_s`` is `WALL_OFFSET_S` of this process.
    """
    return _writer.take(max_events) if isinstance(_writer, _Waiting) else None


def add_events(source: str, events: object, offset_s: float) -> None:
    """Add events from a process of another host.

    Args:
        source: Unique id of the process.
        events: The result of its `take_events`. It is checked.
        offset_s: This host's clock minus that of the process, in seconds.

    Raises:
        ValueError: `events` is malformed.
    """
    if isinstance(_writer, _Writer):
        _writer.add_remote(source, events, offset_s)


def close() -> None:
    """End the trace in this process and close the array. Other processes should flush before."""
    global is_on, _writer
    writer, is_on, _writer = _writer, False, None
    if isinstance(writer, _Writer):
        writer.close()


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a trace file, which may be that of a killed run.

    Raises:
        ValueError: The file is not a trace.
    """
    first, *lines = Path(path).read_text(encoding="utf-8").splitlines()
    if first != "[":
        raise ValueError(f"{path} is not a trace: expected a first line '[', got {first[:40]!r}")
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):  # cut off because its process was killed, or the disk was full
            events.append(json.loads(line.removesuffix(",")))
    return [event for event in events if isinstance(event, dict)]


def _begin(path: str | os.PathLike[str], name: str) -> None:
    writer = _Writer(path, name)
    writer.flush()
    _use(writer)


def _use(writer: _Writer | _Waiting) -> None:
    global is_on, _writer
    _writer = writer
    is_on = True


def _header() -> str:
    """Return the first event, which names the clock of the times."""
    try:
        clock = boot_id()
    except OSError:
        clock = platform.node()
    return json.dumps({"name": "rlzmq", "ph": "M", "pid": 0, "args": {"clock": clock}}) + ",\n"


_Event = tuple[str, str, float, float, int, dict[str, Any]]


class _Waiting:
    """Holds one process's newest events until they are taken. Any thread may call `add`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: deque[_Event] = deque(maxlen=_MAX_WAITING)
        self._threads: dict[int, tuple[int, str]] = {}

    def add(self, event: _Event, now: float) -> None:
        if event[4] not in self._threads:
            number = min(len(self._threads), _MAX_THREADS - 1)
            self._threads[event[4]] = number, threading.current_thread().name
        self._events.append(event)

    def take(self, max_events: int) -> dict[str, Any] | None:
        """See `take_events`."""
        taken = [self._events.popleft() for _ in range(min(max_events, len(self._events)))]
        if not taken:
            return None
        events = [
            [*timed, self._threads[thread][0], {key: _plain(value) for key, value in facts.items()}]
            for *timed, thread, facts in taken
        ]
        threads = [[number, name] for number, name in list(self._threads.values())]
        return {"process": self._name, "threads": threads, "events": events, "offset_s": WALL_OFFSET_S}


class _Writer:
    """Appends one process's events to the file. Any thread may call `add`."""

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._pid = os.getpid()
        self._events: deque[_Event] = deque()
        self._sources: dict[str, tuple[int, set[int]]] = {}  # process number, known threads
        self._lock = threading.Lock()
        self._flushed_at = time.perf_counter()
        self._threads: dict[int, int] = {}  # unique numbers among the host's processes
        self._numbers = itertools.count()
        self._thread_names: deque[str] = deque()
        self._is_full = False
        self._lines = [self._name("process_name", 0, name)]

    def add(self, event: _Event, now: float) -> None:
        thread = event[4]
        if thread not in self._threads:
            self._threads[thread] = _MAX_THREADS * self._pid + next(self._numbers)
            name = self._name("thread_name", self._threads[thread], threading.current_thread().name)
            self._thread_names.append(name)
        self._events.append(event)
        if len(self._events) >= _MAX_EVENTS or now - self._flushed_at > _MAX_AGE_S:
            self.flush()

    def add_remote(self, source: str, batch: Any, offset_s: float) -> None:
        """See `add_events`."""
        name, threads, events = _checked(batch)
        with self._lock:
            if source not in self._sources:
                if len(self._sources) >= _MAX_SOURCES:
                    return
                self._sources[source] = _FIRST_PID + len(self._sources), set()
                self._lines.append(self._name("process_name", 0, name, self._sources[source][0]))
            pid, known = self._sources[source]
            for number, thread_name in threads:
                if number not in known:
                    known.add(number)
                    tid = _MAX_THREADS * pid + number
                    self._lines.append(self._name("thread_name", tid, thread_name, pid))
            for kind, stage, at, seconds, thread, facts in events:
                here = kind, stage, max(0.0, at + offset_s), seconds, thread, facts
                self._format(here, _MAX_THREADS * pid + thread, pid)
            self._write()

    def flush(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is writing them
        try:
            self._flushed_at = time.perf_counter()
            self._format_all()
            self._write()
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._format_all()
            self._write(self._name("process_labels", 0, "ended").rstrip(",\n") + "\n]\n")
            os.close(self._fd)
            self._is_full = True

    def _format_all(self) -> None:
        while self._events:
            event = self._events.popleft()
            self._format(event, self._threads[event[4]], self._pid)

    def _format(self, event: _Event, tid: int, pid: int) -> None:
        kind, name, at, seconds, _, facts = event
        shown: dict[str, Any] = {"name": name, "ph": kind, "ts": round(at * 1e6, 1), "pid": pid, "tid": tid}
        if kind == "X":
            shown["dur"] = round(seconds * 1e6, 1)
            if facts:
                shown["args"] = facts
        else:
            shown |= {"name": "fragment", "cat": "fragment", "id": zlib.crc32(name.encode())}
            if kind == "f":
                shown["bp"] = "e"
        self._lines.append(json.dumps(shown, default=str) + ",\n")

    def _name(self, what: str, tid: int, name: str, pid: int | None = None) -> str:
        facts = {"labels" if what == "process_labels" else "name": name}
        event = {"name": what, "ph": "M", "pid": pid or self._pid, "tid": tid, "args": facts}
        return json.dumps(event) + ",\n"

    def _write(self, end: str = "") -> None:
        while self._thread_names:
            self._lines.append(self._thread_names.popleft())
        data, self._lines = ("".join(self._lines) + end).encode(), []
        if self._is_full or not data:
            return
        try:
            if os.fstat(self._fd).st_size + len(data) > MAX_FILE_BYTES:
                self._is_full = True
                _log.warning(
                    "The trace has %d MiB, the maximum size: no more events are written.",
                    MAX_FILE_BYTES >> 20,
                )
            else:
                os.write(self._fd, data)
        except OSError as error:
            self._is_full = True
            _log.warning("Cannot write the trace: %s. Training continues without it.", error.strerror)


def _plain(value: object) -> Any:
    return value if isinstance(value, bool | int | float) else str(value)[:_MAX_NAME]


def _checked(batch: Any) -> tuple[str, list[tuple[int, str]], list[_Event]]:
    """Return (process name, threads, events) of `take_events`."""
    try:
        name, threads, events = batch["process"], batch["threads"], batch["events"]
        numbers = {number for number, _ in threads}
        is_right = (
            _is_text(name)
            and all(type(number) is int and 0 <= number < _MAX_THREADS for number in numbers)
            and all(_is_text(thread_name) for _, thread_name in threads)
            and all(
                kind in ("X", "s", "f")
                and _is_text(stage)
                and _is_time(at)
                and _is_time(seconds)
                and thread in numbers
                and all(_is_text(key) and _is_fact(value) for key, value in facts.items())
                for kind, stage, at, seconds, thread, facts in events
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        is_right = False
    if not is_right:
        raise ValueError("the events of a trace are malformed")
    return name, threads, events


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= _MAX_NAME


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0.0 <= value < 1e12


def _is_fact(value: object) -> bool:
    return _is_text(value) or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))
