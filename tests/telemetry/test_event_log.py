"""Warnings and errors of a run are kept with their tracebacks, and are still printed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rlzmq.cli.main import main
from rlzmq.telemetry import run_directory
from rlzmq.telemetry.run_directory import EventLog
from tests.telemetry.test_runs import make_run


def events_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def test_warnings_are_kept_with_the_traceback_of_what_they_tell(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", [1.0])
    assert not (directory.path / "events.jsonl").exists()
    log = logging.getLogger("rlzmq.somewhere")
    log.info("not worth it")
    log.warning("%d of %d", 1, 2)
    try:
        raise KeyError("lost\x1b[31m")
    except KeyError as error:
        log.error("it died", extra={"error": error})
        log.exception("again")
    logging.getLogger("another").warning("not ours")
    directory.events.add_error(RuntimeError("the end"))
    directory.close()
    log.warning("too late")
    events = events_in(directory.path)
    assert [(event["level"], event["text"]) for event in events] == [
        ("warning", "1 of 2"), ("error", "it died"), ("error", "again"), ("error", "RuntimeError: the end"),
    ]  # fmt: skip
    assert events[0]["source"] == "rlzmq.somewhere"
    assert "trace" not in events[0]
    for event in events[1:3]:
        assert "test_event_log.py" in event["trace"]
        assert "KeyError: 'lost" in event["trace"]
        assert "\x1b" not in event["trace"]


def test_a_flood_ends_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_MAX_EVENTS", 3)
    events = EventLog(tmp_path / "events.jsonl")
    for number in range(9):
        logging.getLogger("rlzmq.x").warning("number %d", number)
    events.close()
    assert [event["text"] for event in events_in(tmp_path)] == [
        "number 0", "number 1", "3 events are written: later ones are left out.",
    ]  # fmt: skip


def test_a_run_that_ends_with_an_error_keeps_the_users_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Fragile(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed); return np.zeros(2, np.float32), {}\n"
        "    def step(self, action):\n"
        "        raise RuntimeError('the wheel came off')\n"
    )
    arguments = ["--env", "fragile:Fragile", "--num-env-runners", "0", "--preset", "none", "--run-dir", "run"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", *arguments, "--restart-failed-sub-environments", "false"]) == 70
    last = events_in(tmp_path / "run")[-1]
    assert (last["level"], last["source"]) == ("error", "run")
    assert "the wheel came off" in last["text"]
    assert "fragile.py" in last["trace"]
