"""Roles as calls of a function, for engines whose tasks these are (Ray, Dask): each call is the host of one process.

The engine places a call, and repeats it when it fails or loses its node. What the head's join files say reaches the
other processes through the engine and their standard input, so keys are on no command line and in no log.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import shlex
import signal
import subprocess
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories
from rlzmq.launch.engine import LISTEN, Jobs, Role, log_lines
from rlzmq.net.join_file import JoinFile

__all__ = ["OVER", "STOP_S", "WRONG", "Hosting", "News", "host"]

OVER = "over"
STOP_S = 30.0
"""For the end in order of a process whose run is over, or that is surplus."""
WRONG = (2, 78)
"""Exit codes of wrong arguments and configurations, which no restart mends."""
_LOST, _RESUMABLE = 70, 75
_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl

_UNSEEN = (
    "{} is another directory on {}, or none: name a --run-dir that this machine and all nodes share, or let the "
    "options of [head] place it on nodes that share it."
)

News = Mapping[str, Any]
"""What a host hears: the texts of the head's join files by name; by the call's name, the seconds for its end; OVER."""


def host(role: Role, name: str, workdir: Path, address: str, tell: Callable[[News], News]) -> int | None:
    """Run one process of a role on this node; return its exit code, or None if the engine is to start it again.

    Args:
        role: The role.
        name: Of the call.
        workdir: Where the process starts, if there is such a directory here.
        address: The node's, which the others reach.
        tell: Hands the texts of the head's join files to the engine; returns the news.
    """
    is_head, jobs, news = role.name == "head", role.key.parent, tell({})
    if is_head and not (jobs / name).exists():
        print("rlzmq:", _UNSEEN.format(jobs, address), flush=True)
        return WRONG[-1]
    while not is_head and role.key.name not in news:
        if name in news or OVER in news:
            return 0
        time.sleep(_POLL_S)
        news = tell({})
    key = "" if is_head else str(news[role.key.name])
    words = {LISTEN: f"tcp://{address}:0"} if is_head else {str(role.key): "-"}
    with contextlib.ExitStack() as stack:
        log = jobs / f"{role.name}{name.rpartition(role.name)[2]}.log"
        output = stack.enter_context(log.open("ab")) if jobs.is_dir() else None
        try:
            process = subprocess.Popen(
                [words.get(word, word) for word in role.argv],
                cwd=workdir if workdir.is_dir() else None,
                env={**os.environ, "OMP_NUM_THREADS": str(role.resources.cpus)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # it ends with its host
            )
        except OSError as error:
            os.write(output.fileno() if output else 1, f"rlzmq: {name} cannot start: {error}\n".encode())
            return WRONG[-1]
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(key.encode())
        stop_at = 0.0
        while (code := process.poll()) is None:
            news = tell(_written(role, process.pid) if is_head else {})
            if not stop_at and (name in news or OVER in news):
                stop_at = time.monotonic() + news.get(name, STOP_S)
                if name in news:
                    process.terminate()
            moved = not is_head and _addresses(news.get(role.key.name, key)) != _addresses(key)
            if moved or 0 < stop_at < time.monotonic():
                process.kill()  # it waits for a head that is gone, or does not end
            time.sleep(_POLL_S)
    while code == 0 and news.get(role.key.name) == key and not (name in news or OVER in news):
        time.sleep(_POLL_S)  # this head has said goodbye: until another one, or none, is there
        news = tell({})
    if not (stop_at or code in WRONG) and (not is_head or code < 0 or code == _RESUMABLE):
        return None
    if is_head:
        (jobs / "head.code").write_text(str(code))
    return code


def _addresses(text: str) -> Mapping[str, str]:
    """Return where the head of a join file is."""
    return JoinFile.from_text(text).addresses


def _written(role: Role, pid: int) -> dict[str, str]:
    """Return the join files that this head has written."""
    texts = {}
    for path in role.key.parent.glob(f"{role.key.stem}*.toml"):
        with contextlib.suppress(OSError, ConfigurationError):
            text = path.read_text()
            if JoinFile.from_text(text).writer.get("pid") == str(pid):
                texts[path.name] = text
    return texts


class Hosting(ABC):
    """What such engines have in common. A handle is the head's name, or what the names of the others begin with."""

    what: str

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    @abstractmethod
    def _submit(self, role: Role, name: str, options: dict[str, Any]) -> None:
        """Hand a call of `host` to the engine, which repeats it without end when it fails or is lost."""

    @abstractmethod
    def _living(self) -> set[str]:
        """Return the names of all calls that wait or run."""

    @abstractmethod
    def _order(self, name: str, grace_s: float) -> None:
        """Let a call end its process in order, or take it back if it has not begun; may be repeated."""

    @abstractmethod
    def _seen_by(self, path: Path) -> dict[str, bool]:
        """Return for each node whether this file is there."""

    def start(self, role: Role) -> str:
        """Submit the calls of a role."""
        head, jobs = self._jobs.handles.get("head", ""), role.key.parent
        if head:
            handle = f"{head.removesuffix('head')}{role.name}"
            self._call(role, [f"{handle}-{number}" for number in range(role.resources.count)])
            return handle
        handle = self._jobs.handles["head"] = f"rlzmq-{self._jobs.name}-{secrets.token_hex(3)}-head"
        make_directories(jobs, mode=0o700)
        (jobs / "head.code").unlink(missing_ok=True)
        (jobs / handle).touch()
        unseen = [node for node, sees in self._seen_by(jobs / handle).items() if not sees]
        if unseen and not role.resources.options:
            raise ConfigurationError(_UNSEEN.format(jobs, ", ".join(unseen)))
        self._call(role, [handle])
        return handle

    def _call(self, role: Role, names: list[str]) -> None:
        for key in ("time", "image", "hosts"):
            if getattr(role.resources, key):
                raise ConfigurationError(f"[{role.name}] {key}: {self.what} has no such thing. Remove it.")
        try:
            options = tomllib.loads("\n".join(role.resources.options))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"[{role.name}] options: expected 'name = value': {error}") from error
        for name in names:
            self._submit(role, name, options)

    def scale(self, handle: str, count: int) -> None:
        """Submit further calls, or end those with the highest numbers."""
        role = self._jobs.role(handle)
        names = sorted(self._of(handle), key=lambda name: int(name.rpartition("-")[2]))
        self._end(names[count:], STOP_S)
        free = (name for number in itertools.count() if (name := f"{handle}-{number}") not in names)
        self._call(role, list(itertools.islice(free, max(0, count - len(names)))))

    def logs(self, handle: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines that the processes wrote on nodes which share the run's directory."""
        return log_lines(self._jobs.role(handle), lambda: not follow or not self._of(handle))

    def wait(self, handle: str) -> int:
        """Wait for the head's end."""
        while self._of(handle):
            time.sleep(_POLL_S)
        code = self._jobs.roles["head"].key.parent / "head.code"
        return int(code.read_text()) if code.exists() else _LOST

    def stop(self, handle: str, grace_s: float) -> None:
        """End a role's calls."""
        self._end(self._of(handle), grace_s)

    def dry_run(self) -> str:
        """Return the commands of the calls."""
        return "\n".join(
            f"# {role.name}: {role.resources.count}\n{shlex.join(role.argv)}"
            for role in self._jobs.roles.values()
        )

    def _of(self, handle: str) -> list[str]:
        return [name for name in self._living() if name == handle or name.startswith(f"{handle}-")]

    def _end(self, names: list[str], grace_s: float) -> None:
        while left := self._living().intersection(names):
            for name in left:
                self._order(name, grace_s)
            time.sleep(_POLL_S)
