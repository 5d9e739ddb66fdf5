"""Roles as calls of a function, for engines whose tasks these are (Ray, Dask): each call is the host of one process.

The engine places a call, and repeats it when it fails or loses its node. What the head's join files say reaches the
other processes through the engine and their standard input, so keys are on no command line and in no log.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
import tomllib
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories
from rlzmq.launch.engine import EXIT_CODE, EXIT_RESUMABLE, LISTEN, Engine, Role
from rlzmq.net.join_file import JoinFile

__all__ = ["OVER", "Hosting", "News", "host", "memory_bytes"]

OVER = "over"
_END_S = 30.0  # for the end in order of a process whose run is over
_WRONG = (2, 78, 126, 127)  # wrong arguments or configuration, no such program: no restart mends them
_POLL_S = 1.0
_BOUND = ("setpriv", "--pdeathsig", "KILL", "env")  # the process ends with its host

_UNSEEN = (
    "{} is another directory on {}, or none: name a --run-dir that this machine and all nodes share, or let the "
    "options of [head] place it on nodes that share it."
)

News = Mapping[str, Any]
"""What a host hears: the texts of the head's join files by name; by the call's name, the seconds for its end; OVER."""


def host(role: Role, name: str, head: str, workdir: Path, address: str, tell: Callable[[News], News]) -> bool:
    """Run one process of a role on this node; return False if the engine is to start it again.

    Args:
        role: The role.
        name, head: Of this call, and of the head's.
        workdir: Where the process starts, if there is such a directory here.
        address: The node's, which the others reach.
        tell: Hands news to all hosts of the run; returns all news.
    """
    is_head, jobs, news = name == head, role.key.parent, tell({})
    if is_head and not (jobs / head).exists():  # another directory of this name
        tell({OVER: True})
        return True
    while not is_head and role.key.name not in news:
        if name in news or OVER in news:
            return True
        time.sleep(_POLL_S)
        news = tell({})
    key = "" if is_head else str(news[role.key.name])
    words = {LISTEN: f"tcp://{address}:0"} if is_head else {str(role.key): "-"}
    log = jobs / f"{role.name}{name.rpartition(role.name)[2]}.log"
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if jobs.is_dir() else None
        process = subprocess.Popen(
            [
                *_BOUND,
                f"OMP_NUM_THREADS={role.resources.cpus}",
                *(words.get(word, word) for word in role.argv),
            ],
            cwd=workdir if workdir.is_dir() else None,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(key.encode())
        end_at = 0.0
        while (code := process.poll()) is None:
            news = tell(_written(role, process.pid) if is_head else {})
            if not end_at and (name in news or OVER in news):
                end_at = time.monotonic() + news.get(name, _END_S)
                if name in news:
                    process.terminate()
            has_moved = not is_head and _addresses(news.get(role.key.name, key)) != _addresses(key)
            if has_moved or 0 < end_at < time.monotonic():
                process.kill()  # it waits for a head that is gone, or does not end
            time.sleep(_POLL_S)
    while code == 0 and news.get(role.key.name) == key and not (name in news or OVER in news):
        time.sleep(_POLL_S)  # this head has said goodbye: until another one, or none, is there
        news = tell({})
    if not (end_at or code in _WRONG) and (not is_head or code < 0 or code == EXIT_RESUMABLE):
        return False
    if is_head:
        (jobs / EXIT_CODE).write_text(str(code))
        tell({OVER: True})
    elif code in _WRONG:
        tell({head: _END_S})
    return True


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


def memory_bytes(role: Role) -> int:
    """Return the memory of each process; 0: it is not said."""
    return int(TypeAdapter(ByteSize).validate_python(role.resources.memory or 0))


class Hosting(Engine):
    """What such engines have in common. A handle is what the names of the calls begin with; the head's is its name."""

    what: str

    @abstractmethod
    def _submit(self, role: Role, name: str, options: dict[str, Any]) -> None:
        """Hand a call of `host` to the engine, which repeats it without end when it fails or is lost."""

    @abstractmethod
    def _names(self) -> Collection[str]:
        """Return the names of all calls that wait or run."""

    @abstractmethod
    def _order(self, name: str, grace_s: float) -> None:
        """Let a call end its process in order, or take it back if it has not begun; may be repeated."""

    @abstractmethod
    def _seen_by(self, path: Path) -> Mapping[str, bool]:
        """Return for each node whether this file is there."""

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Submit the calls of a role."""
        asked, handles, jobs = role.resources, self.jobs.handles, role.key.parent
        if unknown := [key for key in ("time", "image", "hosts") if getattr(asked, key)]:
            raise ConfigurationError(f"[{role.name}] {unknown[0]}: {self.what} has no such thing. Remove it.")
        try:
            options = tomllib.loads("\n".join(asked.options))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"[{role.name}] options: expected 'name = value': {error}") from error
        if role.name == "head":
            handles["head"] = f"rlzmq-{self.jobs.name}-{secrets.token_hex(3)}-head"
            make_directories(jobs, mode=0o700)
            (jobs / EXIT_CODE).unlink(missing_ok=True)
            (jobs / handles["head"]).touch()
            unseen = [node for node, sees in self._seen_by(jobs / handles["head"]).items() if not sees]
            if unseen and not options:
                raise ConfigurationError(_UNSEEN.format(jobs, ", ".join(unseen)))
        handles[role.name] = f"{handles['head'].removesuffix('head')}{role.name}"
        for place in places or range(asked.count):
            self._submit(role, self._name(role, place), options)
        return handles[role.name]

    def living(self, role: Role) -> list[int]:
        """Return the places of the calls."""
        names = [name.removeprefix(self._name(role, "")) for name in self._names() if self._is_of(name, role)]
        return [int(place or 0) for place in names]

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """Order the hosts to end their processes."""
        names = {self._name(role, place) for place in places}
        while left := names.intersection(self._names()):
            for name in left:
                self._order(name, grace_s)
            time.sleep(_POLL_S)

    def _name(self, role: Role, place: object) -> str:
        handle = self.jobs.handles[role.name]
        return handle if role.name == "head" else f"{handle}-{place}"

    def _is_of(self, name: str, role: Role) -> bool:
        return name == self._name(role, "") if role.name == "head" else name.startswith(self._name(role, ""))
