"""Faults fire at their place, once; histories survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlzmq.core import faults

PROGRAM = """
from rlzmq.core import faults
faults.arm("runner-1")
for n in range(5):
    faults.record("came", n=n)
    faults.at("here")
print("through")
"""


@pytest.fixture(autouse=True)
def disarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RLZMQ_FAULT", "RLZMQ_FAULT_LOG", "RLZMQ_HISTORY"):
        monkeypatch.delenv(name, raising=False)
    yield
    faults.at, faults.record, faults.is_armed, faults.is_recording = NOTHING


NOTHING = (faults.at, faults.record, faults.is_armed, faults.is_recording)


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("fault", "code"),
    [("here:kill:3", -signal.SIGKILL), ("here@runner-1:exit:3", 3), ("here@runner-0:kill:3", 0)],
)
def test_a_fault_fires_at_the_nth_visit_of_its_process_and_leaves_proof(
    fault: str, code: int, tmp_path: Path
) -> None:
    log, history = tmp_path / "log", tmp_path / "history"
    result = run(RLZMQ_FAULT=fault, RLZMQ_FAULT_LOG=str(log), RLZMQ_HISTORY=str(history))
    assert result.returncode == code
    (file,) = history.iterdir()
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [event["n"] for event in events] == (list(range(3)) if code else list(range(5)))
    if not code:
        assert not log.exists()
        return
    assert log.read_text().split() == ["here", "runner-1", fault.split(":")[1], "3"]
    again = run(RLZMQ_FAULT=fault, RLZMQ_FAULT_LOG=str(log))
    assert again.stdout == "through\n", "once per run"


def test_later_incarnations_have_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", "here:kill:1")
    faults.arm("runner-0", incarnation=1)
    assert not faults.is_armed


@pytest.mark.parametrize("text", ["here", "here:kill", "here:explode:1", "here:kill:0", "here:kill:x"])
def test_a_mistake_in_the_variable_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME"):
        faults.parse_faults(text)
