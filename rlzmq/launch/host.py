"""The host of one process of a role, on its node: it starts the process when the key is there, and ends it in order.

Every engine runs one for each process: one that can repeats `host`, the others start this module. Hosts meet in the
directory of the role's key, ``RUN/jobs``: the head writes its join files there, its host the exit code, which is the
end of the run; ``NAME.end`` asks the host of this name to end. A process gets its key by its standard input.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rlzmq.core.files import make_directories, write_text
from rlzmq.launch.engine import EXIT_CODE, EXIT_RESUMABLE, LISTEN, Engine, Role
from rlzmq.net.keys import JoinFile

__all__ = ["OWN", "Hosted", "end", "host"]

OWN = ("-m", "rlzmq.launch.host")
"""Arguments of the Python interpreter that make it a host."""

_END_S = 30.0  # for the end in order of a process whose run is over
_WRONG = (2, 78, 126, 127)  # wrong arguments or configuration, no such program: no restart mends them
_POLL_S = 1.0
_RESTART_S = 2.0
_ASK_EVERY = 60  # polls: whether the run is over
_BOUND = ("setpriv", "--pdeathsig", "KILL", "env")  # the process ends with its host
_JOIN_FILES = ("join.toml", "join.learner.toml", "join.observer.toml")


def host(
    role: Role,
    name: str,
    address: str,
    workdir: Path = Path(),
    *,
    ends: Callable[[], bool] = lambda: False,
    is_over: Callable[[int | None], bool] = lambda code: False,
) -> bool:
    """Run one process of a role on this node; return False if it is to be started again.

    Args:
        role: The role.
        name: Of this host and its log.
        address: The node's, which the others reach.
        workdir: Where the process starts, if there is such a directory here.
        ends: Whether the process is to end.
        is_over: Whether the run is over, by what the engine knows or by the exit code of the process, if it has ended.
    """
    is_head, jobs = role.name == "head", role.key.parent
    order, exit_code = jobs / f"{name}.end", jobs / EXIT_CODE

    def is_done(code: int | None = None) -> bool:
        return ends() or order.exists() or is_over(code) or (not is_head and exit_code.exists())

    while not is_done():
        if (key := _text(role.key)) or is_head:
            break
        time.sleep(_POLL_S)
    else:
        return True
    if is_head:
        forget(jobs)
    words = {LISTEN: f"tcp://{address}:0"} if is_head else {str(role.key): "-"}
    argv = [*_BOUND, f"OMP_NUM_THREADS={role.cpus}", *(words.get(word, word) for word in role.argv)]
    with (jobs / f"{name}.log").open("ab") as log:
        cwd = workdir if workdir.is_dir() else None
        process = subprocess.Popen(argv, cwd=cwd, stdin=subprocess.PIPE, stdout=log, stderr=log)
    with contextlib.ExitStack() as stack:
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"" if is_head else key.encode())
        end_at = 0.0
        while (code := process.poll()) is None:
            if not end_at and is_done():
                grace_s = _text(order) or (_END_S if exit_code.exists() else "inf")
                end_at = time.monotonic() + float(grace_s)
                process.terminate()
            has_moved = (
                not is_head and (now := _text(role.key) or key) != key and _addresses(now) != _addresses(key)
            )
            if has_moved or 0 < end_at < time.monotonic():
                process.kill()  # it waits for a head that is gone, or does not end
            time.sleep(_POLL_S)
    while code == 0 and not is_head and _text(role.key) == key and not is_done(code):
        time.sleep(_POLL_S)  # this head has said goodbye: until another one, or none, is there
    is_resumable = not is_head or code < 0 or code == EXIT_RESUMABLE
    if is_resumable and not (end_at or is_done(code) or code in _WRONG):
        return False
    if is_head and not (is_resumable and ends()):
        write_text(exit_code, str(code if code >= 0 else EXIT_RESUMABLE))
    elif code in _WRONG:
        end(jobs, "head", _END_S)
    return True


def end(jobs: Path, name: str, grace_s: float) -> None:
    """Ask a host to end its process, and to kill it after some seconds."""
    write_text(jobs / f"{name}.end", str(grace_s))


def forget(jobs: Path) -> None:
    """Remove what an earlier head has left, but for its keys and ports, which the next one takes."""
    for name in (*_JOIN_FILES, EXIT_CODE, "head.end"):
        (jobs / name).unlink(missing_ok=True)


class Hosted(Engine):
    """An engine whose processes have hosts, which meet in the run's directory."""

    @abstractmethod
    def submit(self, role: Role, places: Sequence[int]) -> str:
        """Start hosts at these places. Return a name for people."""

    def withdraw(self, role: Role, places: Collection[int]) -> None:
        """Take back hosts that have not begun."""

    def name(self, role: Role, place: int) -> str:
        """Return the name of a host."""
        return ("head" if role.name == "head" else f"{role.name}-{place}") + self.mark

    def places(self, role: Role, names: Iterable[str]) -> set[int]:
        """Return the places of those of the named hosts that are of a role."""
        own = re.compile(rf"{role.name}-?(\d*){re.escape(self.mark)}")
        return {int(found[1] or 0) for found in map(own.fullmatch, names) if found}

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Start hosts."""
        places = places or range(role.count)
        make_directories(role.key.parent, mode=0o700)
        if role.name == "head":
            forget(role.key.parent)
        for place in places:
            role.key.with_name(f"{self.name(role, place)}.end").unlink(missing_ok=True)
        return self.submit(role, places)

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """Ask hosts to end."""
        for place in places:
            end(role.key.parent, self.name(role, place), grace_s)
        while set(places).intersection(self.living(role)):
            self.withdraw(role, places)
            time.sleep(_POLL_S)


def _main(name: str, key: str, cpus: str, address: str, over: str, limit: str, *argv: str) -> int:
    """Repeat `host` until the run is over, or SIGTERM or SIGUSR1 comes.

    Args:
        name: Of the host.
        key, cpus, argv: Of its role.
        address: See `host`.
        over: A shell command that fails as long as the run goes on; ``$1`` is the exit code of the process, if any.
        limit: A shell command after SIGUSR1: the time of this host is over, but the run goes on.
    """
    role = Role(name=re.split("[-@]", name)[0], argv=argv, key=Path(key), cpus=int(cpus))
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: signals.append(number))
    polls = itertools.count()

    def is_over(code: int | None) -> bool:
        is_asked = code is not None or next(polls) % _ASK_EVERY == 0
        return is_asked and subprocess.call(["sh", "-c", over, "sh", str(code)]) == 0

    while not host(role, name, address, ends=lambda: bool(signals), is_over=is_over):
        time.sleep(_RESTART_S)
    exit_code = _text(role.key.with_name(EXIT_CODE))
    if signal.SIGUSR1 in signals and not exit_code:
        subprocess.call(["sh", "-c", limit])
    return int(exit_code or EXIT_RESUMABLE) if role.name == "head" else 0


def _addresses(text: str) -> Mapping[str, str]:
    """Return where the head of a join file is."""
    return JoinFile.from_text(text).addresses


def _text(path: Path) -> str:
    """Return the text of a file; "" if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
