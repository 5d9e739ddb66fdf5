"""Trace: the stages of a run's processes over time, in one file for Perfetto (ui.perfetto.dev) or chrome://tracing.

    driver: create ──► file ◄── join: every other process of the host     (each appends whole lines, O_APPEND)

The file is a JSON array of trace events, one per line. A killed run leaves the array open, which both viewers and
`read_trace` accept. Times are microseconds of the host's monotonic clock, which all its processes share; processes on
other hosts do not join. Without `create` or `join`, `span` is not called: see `is_on`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
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
from rlzmq.core.machine import boot_id

__all__ = ["close", "create", "flow_end", "flow_start", "flush", "is_on", "join", "read_trace", "span"]

MAX_FILE_BYTES = 256 * 2**20
"""File size at which the processes stop writing: about 2.5 million events, which viewers can still open."""

_MAX_EVENTS = 1000  # maximum number of events in memory
_MAX_THREADS = 64  # maximum number of threads per process
_MAX_AGE_S = 1.0  # maximum age of an event in memory, which a killed process loses

_log = logging.getLogger("rlzmq.core")

is_on: bool = False
"""Whether this process is traced. It is checked before `span` is called, so runs without a trace pay nothing."""

_writer: _Writer | None = None


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
    """Add this process to the trace if the file was created on this host; otherwise log that it is not included.

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
        _log.info("%s is not in the trace %s, which belongs to another host.", name, path)
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


def flow_start(id_: str, at_s: float) -> None:
    """Start an arrow at this thread's stage at this time. Calls of `flow_end` with the same id, anywhere, end it."""
    if _writer is not None:
        _writer.add(("s", id_, at_s, 0.0, threading.get_ident(), {}), at_s)


def flow_end(id_: str, at_s: float) -> None:
    """End an arrow at this thread's stage at this time."""
    if _writer is not None:
        _writer.add(("f", id_, at_s, 0.0, threading.get_ident(), {}), at_s)


def flush() -> None:
    """Write the events that are still in memory."""
    if _writer is not None:
        _writer.flush()


def close() -> None:
    """End the trace in this process and close the array. Other processes should flush before."""
    global is_on, _writer
    writer, is_on, _writer = _writer, False, None
    if writer is not None:
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
    global is_on, _writer
    _writer = _Writer(path, name)
    _writer.flush()
    is_on = True


def _header() -> str:
    """Return the first event, which names the clock of the times."""
    try:
        clock = boot_id()
    except OSError:
        clock = platform.node()
    return json.dumps({"name": "rlzmq", "ph": "M", "pid": 0, "args": {"clock": clock}}) + ",\n"


class _Writer:
    """Appends one process's events to the file. Any thread may call `add`."""

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._pid = os.getpid()
        self._events: deque[tuple[str, str, float, float, int, dict[str, Any]]] = deque()
        self._lock = threading.Lock()
        self._flushed_at = time.perf_counter()
        self._threads: dict[int, int] = {}  # unique numbers among the host's processes
        self._numbers = itertools.count()
        self._thread_names: deque[str] = deque()
        self._is_full = False
        self._lines = [self._name("process_name", 0, name)]

    def add(self, event: tuple[str, str, float, float, int, dict[str, Any]], now: float) -> None:
        thread = event[4]
        if thread not in self._threads:
            self._threads[thread] = _MAX_THREADS * self._pid + next(self._numbers)
            name = self._name("thread_name", self._threads[thread], threading.current_thread().name)
            self._thread_names.append(name)
        self._events.append(event)
        if len(self._events) >= _MAX_EVENTS or now - self._flushed_at > _MAX_AGE_S:
            self.flush()

    def flush(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is writing them
        try:
            self._flushed_at = time.perf_counter()
            while self._events:
                self._format(*self._events.popleft())
            self._write()
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            while self._events:
                self._format(*self._events.popleft())
            self._write(self._name("process_labels", 0, "ended").rstrip(",\n") + "\n]\n")
            os.close(self._fd)
            self._is_full = True

    def _format(
        self, kind: str, name: str, at: float, seconds: float, thread: int, facts: dict[str, Any]
    ) -> None:
        place = f'"ts":{at * 1e6:.1f},"pid":{self._pid},"tid":{self._threads[thread]}'
        if kind == "X":
            args = f',"args":{json.dumps(facts, default=str)}' if facts else ""
            self._lines.append(f'{{"name":"{name}","ph":"X",{place},"dur":{seconds * 1e6:.1f}{args}}},\n')
        else:
            end = ',"bp":"e"' if kind == "f" else ""
            id_ = zlib.crc32(name.encode())
            self._lines.append(
                f'{{"name":"fragment","cat":"fragment","ph":"{kind}",{place},"id":{id_}{end}}},\n'
            )

    def _name(self, what: str, thread: int, name: str) -> str:
        key = "labels" if what == "process_labels" else "name"
        event = {"name": what, "ph": "M", "pid": self._pid, "tid": thread, "args": {key: name}}
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
