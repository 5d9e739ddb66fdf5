"""Traces of real runs: every role's stages, on one clock, with arrows from fragments to their updates."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlzmq import ConfigurationError
from rlzmq.cli.main import main
from rlzmq.core.trace import read_trace
from tests.support.runs import Command, listening, small
from tests.support.trace_format import check_trace

STAGES = {
    "driver": {"training_step", "report"},
    "broker": {"Fragment", "OpenUpdate", "UpdateDone", "Weights"},
    "env runner": {"sample", "env", "inference", "connector", "encode", "deliver", "wait"},
    "learner": {"decode", "update", "connector", "forward", "backward", "reduce", "wait"},
}


def config(num_env_runners: int, num_learners: int) -> Any:
    return small(num_env_runners=num_env_runners, num_learners=num_learners, train_batch_size_per_learner=100)


def by_process(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] != "M":
            found[names[event["pid"]]].append(event)
    return found


def test_each_stage_of_each_role_is_in_the_trace_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with config(2, 2).debugging(trace=str(path)).build() as algo:
        for _ in range(4):
            algo.train()
    written = json.loads(path.read_text())
    check_trace(written)
    processes = by_process(written)
    assert processes.keys() == {"driver", "broker", "env runner 1", "env runner 2", "learner 0", "learner 1"}
    for name, events in processes.items():
        role = name.rstrip(" 0123456789")
        assert {event["name"] for event in events} >= STAGES[role], name
    steps = [event for event in processes["driver"] if event["name"] == "training_step"]
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    updates = [event for event in processes["learner 0"] if event["name"] == "update"]
    assert len(updates) == 4
    assert all(begin <= event["ts"] and event["ts"] + event["dur"] <= end for event in updates)
    everything = [event for events in processes.values() for event in events]
    sent = {event["id"]: event["ts"] for event in everything if event["ph"] == "s"}
    trained = {event["id"]: event["ts"] for event in everything if event["ph"] == "f"}
    assert trained
    assert all(sent[id_] < at for id_, at in trained.items())


# A process whose clock differs, as that of another host does; uvloop reads the system's by itself.
_OTHER_CLOCK = """
import sys, time
sys.modules["uvloop"] = None
perf_counter, monotonic = time.perf_counter, time.monotonic
time.perf_counter = lambda: perf_counter() + 5000.0
time.monotonic = lambda: monotonic() + 5000.0
from rlzmq.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_runners_of_other_hosts_are_in_the_trace_by_the_drivers_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    config = listening(tmp_path, num_env_runners=1).learners(num_learners=1).debugging(trace="trace.json")
    join = ("runner", "--join", str(tmp_path / "join.toml"))
    begun = time.perf_counter()
    with (
        config.build() as algo,
        Command(elsewhere, *join, program=("-c", _OTHER_CLOCK)) as other,
        Command(elsewhere, *join, program=("-c", _OTHER_CLOCK)) as leaves,
    ):
        for runner in (other, leaves):
            runner.wait_for(" joined ")
        while len(names := named_stages(tmp_path)) < 2:
            algo.train()
        leaves.process.send_signal(signal.SIGINT)
        assert leaves.end() == 130, leaves.output
        for _ in range(3):
            algo.train()
        ended = time.perf_counter()
        algo.stop()
        assert other.end() == 0, other.output
    assert all("@" in name for name in names)
    events = read_trace(tmp_path / "trace.json")
    check_trace(events)
    processes = by_process(events)
    everything = [event for events in processes.values() for event in events]
    trained = {event["id"]: event["ts"] for event in everything if event["ph"] == "f"}
    for name in names:
        assert stages_between(processes[name], begun, ended) >= {"sample", "env", "inference", "encode"}
        sent = {event["id"]: event["ts"] for event in processes[name] if event["ph"] == "s"}
        assert sent.keys() & trained.keys()
        assert all(sent[id_] < trained[id_] for id_ in sent.keys() & trained.keys())


def named_stages(directory: Path) -> set[str]:
    """The processes of other hosts that have sent the stages of a fragment."""
    found = by_process(read_trace(directory / "trace.json"))
    return {name for name, events in found.items() if "@" in name and any(e["ph"] == "s" for e in events)}


def stages_between(events: list[dict[str, Any]], begun: float, ended: float) -> set[str]:
    """The stages of a process that began after this time; none ended after that one."""
    stages = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] + event["dur"] <= ended * 1e6 for event in stages)
    return {event["name"] for event in stages if event["ts"] >= begun * 1e6}


def test_train_writes_the_trace_into_the_run_directory_or_where_it_is_asked_to(tmp_path: Path) -> None:
    command = "train ppo --env CartPole-v1 --preset none --train-batch-size-per-learner 200 --num-epochs 1"
    command += " --stop training_iteration=1 --quiet --env-runners 0 --learners 0 --run-dir"
    assert main([*command.split(), str(tmp_path / "run"), "--trace"]) == 0
    ((name, events),) = by_process(read_trace(tmp_path / "run" / "trace.json")).items()
    assert name == "driver"
    stages = {"training_step", "sample", "env", "inference", "connector", "update", "forward", "backward"}
    assert {event["name"] for event in events} >= stages
    assert main([*command.split(), str(tmp_path / "other"), "--trace", str(tmp_path / "own.json")]) == 0
    assert read_trace(tmp_path / "own.json")
    with pytest.raises(ConfigurationError, match="set a path"):
        config(0, 0).debugging(trace="auto").build()
