"""The trace file: what it holds when processes end, are killed, or write too much."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlzmq import ConfigurationError
from rlzmq.core import trace


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    trace.close()


def stages(path: Path) -> list[dict[str, Any]]:
    return [event for event in trace.read_trace(path) if event["ph"] == "X"]


def test_stages_of_all_threads_have_their_times_and_facts(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.create(path, "driver")
    trace.span("env", 1.0, 1.25)
    thread = threading.Thread(target=lambda: trace.span("forward", 2.0, 2.5, rows=3), name="learner")
    thread.start()
    thread.join()
    trace.flow_start("a/0/1", 1.1)
    trace.flow_end("a/0/1", 2.1)
    trace.flow_end("a/0/2", 2.2)
    trace.close()
    events = json.loads(path.read_text())
    assert events == trace.read_trace(path)
    env, forward = stages(path)
    assert (env["name"], env["ts"], env["dur"], env["pid"]) == ("env", 1e6, 0.25e6, os.getpid())
    assert (forward["name"], forward["ts"], forward["args"]) == ("forward", 2e6, {"rows": 3})
    assert env["tid"] != forward["tid"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[forward["tid"]] == "learner"
    (process,) = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert process == "driver"
    start, end, other = [event for event in events if event["ph"] in "sf"]
    assert (start["ph"], end["ph"]) == ("s", "f")
    assert start["id"] == end["id"] != other["id"]


def test_without_a_trace_nothing_is_kept() -> None:
    assert not trace.is_on
    trace.span("env", 1.0, 2.0)
    trace.flush()
    trace.close()
    trace.join(None, "env runner 1")
    assert not trace.is_on


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


def test_an_idle_buffer_is_written_with_the_next_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.create(path, "driver")
    now = time.perf_counter()
    trace.span("env", now, now)
    assert not stages(path)
    trace.span("env", now, now + 5.0)
    assert len(stages(path)) == 2


def test_a_trace_of_another_host_is_not_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    with caplog.at_level("INFO", logger="rlzmq.core"):
        trace.join(path, "env runner 1")
        path.write_text('[\n{"name": "rlzmq", "ph": "M", "pid": 0, "args": {"clock": "another"}},\n')
        trace.join(path, "env runner 1")
    assert not trace.is_on
    assert caplog.text.count("env runner 1 is not in the trace") == 2


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
