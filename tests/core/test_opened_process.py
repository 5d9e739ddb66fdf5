"""An opened process: signals reach it or nobody, even if its number is another process's by then."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlzmq.core.process import OpenedProcess, start_mark

ROOT = Path(__file__).parents[2]
# Where signals are sent by number, and why the number is still the process's.
BY_NUMBER = {
    "rlzmq/actors/fork_main.py": "children that it has not waited for",
    "scripts/mutate.py": "children that it has not waited for",
    "scripts/resume_exactly.py": "a child that it has not waited for",
    "tests/support/kubernetes.py": "groups of children that it has not waited for",
}
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def reuse_number(pid: int) -> subprocess.Popen[bytes] | None:
    """Start a process that has this number, which must be free; None if others took it or it cannot be chosen."""
    for _ in range(50):
        try:
            LAST_PID.write_text(str(pid - 1))
        except OSError:
            return None
        process = subprocess.Popen(["sleep", "600"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    return None


def wait_for_another_start(mark: str | None) -> None:
    """Wait until new processes have another time of start."""
    while True:
        with subprocess.Popen(["sleep", "600"]) as probe:
            is_other = start_mark(probe.pid) != mark
            probe.kill()
        if is_other:
            return


def test_a_signal_reaches_the_process(child: subprocess.Popen[bytes]) -> None:
    with OpenedProcess(child.pid, start_mark(child.pid)) as opened:
        opened.send_signal(signal.SIGTERM)
        assert child.wait(30) == -signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            opened.send_signal(signal.SIGTERM)
    opened.close()


def test_a_mark_belongs_to_one_process(child: subprocess.Popen[bytes]) -> None:
    mark = start_mark(child.pid)
    assert mark == start_mark(child.pid) != start_mark(os.getpid())
    child.kill()
    child.wait()
    assert start_mark(child.pid) != mark


def test_a_process_that_got_the_number_of_another_one_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    mark = start_mark(child.pid)
    with OpenedProcess(child.pid) as opened:
        child.kill()
        child.wait()
        wait_for_another_start(mark)
        successor = reuse_number(child.pid)
        if successor is None:
            pytest.skip("the number cannot be given to another process here")
        with successor:
            try:
                with pytest.raises(ProcessLookupError):
                    opened.send_signal(signal.SIGKILL)
                with pytest.raises(ProcessLookupError, match="has ended"):
                    OpenedProcess(child.pid, mark)
                assert successor.poll() is None
            finally:
                successor.kill()


def signals_by_number(path: Path) -> list[int]:
    """Lines that send a signal by number to another process."""
    found: list[int] = []
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "os.kill" in text else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.kill", "os.killpg"):
            target, number = map(ast.unparse, node.args)
            if target != "os.getpid()" and number != "0":
                found.append(node.lineno)
    return found


def test_nothing_else_sends_signals_by_number() -> None:
    guilty = {
        str(path.relative_to(ROOT)): lines
        for folder in ("rlzmq", "scripts", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := signals_by_number(path))
    }
    assert set(guilty) == set(BY_NUMBER), f"use rlzmq.core.process, or a handle: {guilty}"
