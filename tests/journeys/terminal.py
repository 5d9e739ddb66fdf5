"""Terminal: what a person types, as real processes in a directory and a home of their own.

A journey types commands as they stand in the docs, waits for what they write (never for a time), sends signals to
processes as systems and people do, and at the end sees that nothing is left: no process, no temporary file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.support.warm_process import WarmPopen

__all__ = ["Command", "Done", "Terminal", "until"]

T = TypeVar("T")

_ROOT = Path(__file__).parents[2]
_MARK = "JOURNEY_ID"
_DEADLINE_S = 100.0  # of a wait for an event: only a fault reaches it, however busy the machine is
_LOOK_S = 0.02


class Done:
    """How a command ended: its exit code (-N for signal N), stdout and stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"exit code {self.code}\n-- stdout --\n{self.out}\n-- stderr --\n{self.err}"


class Command:
    """A command that runs.

    Attributes:
        process: The process itself.
    """

    def __init__(self, process: subprocess.Popen[str], out: Path, err: Path) -> None:
        self.process = process
        self._out, self._err = out, err

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def out(self) -> str:
        """What it has written to stdout."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has written to stderr."""
        return self._err.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Return its process and all descendants, the fork server and the roles among them."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int) -> None:
        """Send a signal to the command's own process, as ``kill PID`` does."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the command, as systemd, a pod's stop and ``scancel`` do."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until stdout or stderr has a match of `pattern`."""

        def found() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.out + "\n" + self.err)
            assert match or not ended, f"ended without {pattern!r}: {self.end()!r}"
            return match

        return until(found, f"{pattern!r}", lambda: self.out + self.err)

    def end(self) -> Done:
        """Wait for its end."""
        try:
            code = self.process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"it did not end\n-- stdout --\n{self.out}\n-- stderr --\n{self.err}"
            ) from None
        return Done(code, self.out, self.err)


class Terminal:
    """A shell's place: a working directory, a home and a temporary directory that only this journey uses.

    Args:
        cwd: The working directory.

    Attributes:
        cwd: The working directory.
        home: ``$HOME``.
        temporary: ``$TMPDIR``; it must be empty when the journey ends.
        environ: The environment of the commands.
    """

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self._base = Path(tempfile.mkdtemp(prefix="j"))  # short: sockets have paths below it
        self.home, self.temporary = self._base / "home", self._base / "t"
        self._outputs = self._base / "out"
        for directory in (self.home, self.temporary, self._outputs):
            directory.mkdir(mode=0o700)
        self._id = secrets.token_hex(8)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        self.environ: dict[str, str] = {
            **kept,
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            _MARK: self._id,
        }
        self._commands: list[Command] = []

    def start(self, line: str, *, warm: bool = True, **options: Any) -> Command:
        """Start a command line; ``rlzmq`` and ``python`` are this interpreter's.

        Args:
            line: The command, as typed.
            warm: Clone the process from one that has torch imported, which saves seconds. False where the first second
                of a process is the subject.
            options: For `subprocess.Popen`.
        """
        words = shlex.split(line)
        if words[0] == "rlzmq":
            words[:1] = [sys.executable, "-m", "rlzmq"]
        elif words[0] == "python":
            words[0] = sys.executable
        number = len(self._commands)
        out, err = self._outputs / f"{number}.out", self._outputs / f"{number}.err"
        popen: Any = WarmPopen if warm else subprocess.Popen
        environ = {**self.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        with open(out, "w") as stdout, open(err, "w") as stderr:
            process = popen(
                words,
                **{
                    "cwd": self.cwd,
                    "env": environ,
                    "stdin": subprocess.DEVNULL,
                    "start_new_session": True,
                    "stdout": stdout,
                    "stderr": stderr,
                    **options,
                },
                text=True,
            )
        command = Command(process, out, err)
        self._commands.append(command)
        return command

    def type(self, line: str, **options: Any) -> Done:
        """Run a command line to its end."""
        return self.start(line, **options).end()

    def left_processes(self) -> list[psutil.Process]:
        """Return the processes that this terminal's commands started, directly or not, and that still run."""
        return list(_marked(self._id))

    def left_files(self) -> list[str]:
        """Return what is left in the temporary directory."""
        return sorted(str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*"))

    def close(self) -> None:
        """End everything that still runs and remove the home."""
        for process in self.left_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for command in self._commands:
            with contextlib.suppress(ProcessLookupError):
                command.process.send_signal(signal.SIGKILL)
            command.process.wait(_DEADLINE_S)
        shutil.rmtree(self._base, ignore_errors=True)


def until(look: Callable[[], T | None], what: str, said: Callable[[], str] = lambda: "") -> T:
    """Return the first true answer of `look`; fail after a time that no busy machine needs."""
    deadline = time.monotonic() + _DEADLINE_S
    while not (answer := look()):
        assert time.monotonic() < deadline, f"{what} did not come\n{said()}"
        time.sleep(_LOOK_S)
    return answer


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
