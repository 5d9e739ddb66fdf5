"""The trace file: what it holds when processes end, are killed, or write too much."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlzmq import ConfigurationError
from rlzmq.core import trace
from tests.support.trace_format import check_trace


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    trace.close()


def stages(path: Path) -> list[dict[str, Any]]:
    return [event for event in trace.read_trace(path) if event["ph"] == "X"]


_JOINS = """
import os, signal, sys, time
from rlzmq.core import trace
trace.join(sys.argv[1], "env runner 1")
for number in range(3000):
    trace.span("env", number, number + 0.5)
print(trace.is_on, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
trace.flush()
"""


@pytest.mark.parametrize("end", ["flushed", "killed"])
def test_processes_of_one_host_write_one_file_which_can_be_read_when_they_were_killed(
    tmp_path: Path, end: str
) -> None:
    path = tmp_path / "trace.json"
    trace.create(path, "driver")
    others = [
        subprocess.Popen([sys.executable, "-c", _JOINS, path, end], stdout=subprocess.PIPE) for _ in range(2)
    ]
    for other in others:
        assert other.communicate(timeout=60)[0] == b"True\n"
        assert other.returncode == (-signal.SIGKILL if end == "killed" else 0)
    with path.open("a") as file:
        file.write('{"name":"env","ph":"X","ts":1')  # cut off
    for other in others:
        mine = [event for event in stages(path) if event["pid"] == other.pid]
        assert len(mine) == 3000  # a full buffer is written at once
        assert [event["ts"] for event in mine] == [number * 1e6 for number in range(3000)]


def test_stages_of_another_host_wait_until_they_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    for text in ("", '[\n{"name": "rlzmq", "ph": "M", "pid": 0, "args": {"clock": "another"}},\n'):
        if text:
            path.write_text(text)
        with caplog.at_level("INFO", logger="rlzmq.core"):
            trace.join(path, "env runner 1")
        assert trace.is_on
        assert trace.is_remote()
        assert trace.take_events(10) is None
        for number in range(30_000):
            trace.span("env", number, number + 0.5, rows=3, text="x" * 1000)
        trace.flow("a/0/1", 7.0, ends=False)
        taken = trace.take_events(10**6)
        assert taken is not None
        assert (taken["process"], taken["threads"]) == (
            "env runner 1",
            [[0, threading.current_thread().name]],
        )
        assert len(taken["events"]) == 20_000, "the oldest are lost"
        assert taken["events"][-2] == ["X", "env", 29999, 0.5, 0, {"rows": 3, "text": "x" * 200}]
        assert taken["events"][-1][:3] == ["s", "a/0/1", 7.0]
        trace.flush()
        trace.close()
        assert not trace.is_on
    assert caplog.text.count("belongs to another host: env runner 1 sends its stages") == 2


def test_stages_of_other_hosts_are_written_by_this_hosts_clock(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.create(path, "driver")
    batch = {"process": "runner@b", "threads": [[0, "main"], [1, "sampler"]], "events": []}
    trace.add_events("uuid-1", {**batch, "events": [["X", "env", 107.0, 0.5, 1, {"rows": 2}]]}, -100.0)
    trace.add_events("uuid-1", {**batch, "events": [["s", "a/0/1", 107.2, 0.0, 1, {}]]}, -100.0)
    trace.add_events("uuid-2", {**batch, "events": [["X", 'quo"ted', 1.0, 0.5, 0, {}]]}, 3.0)
    trace.flow("a/0/1", 8.0, ends=True)
    trace.close()
    events = trace.read_trace(path)
    check_trace(events)
    (env, quoted) = [event for event in events if event["ph"] == "X"]
    assert (env["ts"], env["dur"], env["args"]) == (7e6, 0.5e6, {"rows": 2})
    assert (quoted["name"], quoted["ts"]) == ('quo"ted', 4e6)
    assert len({env["pid"], quoted["pid"], os.getpid()}) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {"process": "x" * 1000},
        {"threads": [[64, "main"]]},
        {"events": [["X", "env", 1.0, 0.5, 3, {}]]},
        {"events": [["X", "env", float("nan"), 0.5, 0, {}]]},
        {"events": [["X", "env", 1.0, 0.5, 0, {"fact": [1]}]]},
    ],
)
def test_malformed_stages_of_other_hosts_are_refused(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "trace.json"
    trace.create(path, "driver")
    batch = {"process": "runner@b", "threads": [[0, "main"]], "events": []}
    given = {**batch, **wrong} if wrong else wrong
    with pytest.raises(ValueError, match="the events of a trace are malformed"):
        trace.add_events("uuid-1", given, 0.0)
    trace.close()
    check_trace(trace.read_trace(path))


def test_the_file_is_bounded_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "MAX_FILE_BYTES", 20_000)
    path = tmp_path / "trace.json"
    trace.create(path, "driver")
    for number in range(5000):
        trace.span("env", number, number + 0.5)
    trace.close()
    assert path.stat().st_size <= 20_000
    assert caplog.text.count("the maximum size") == 1
    assert trace.read_trace(path)


def test_a_file_that_cannot_be_written_or_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot write the trace"):
        trace.create(tmp_path / "nowhere" / "trace.json", "driver")
    (tmp_path / "a").write_text("{}\n")
    with pytest.raises(ValueError, match="is not a trace"):
        trace.read_trace(tmp_path / "a")
