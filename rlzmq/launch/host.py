"""The host of one process of a role, on its node: it starts the process when the key is there, and ends it in order.

Every engine runs one for each process; those that can repeat `host`, the others let `stay` do it. Hosts meet in the
directory of the role's key, ``RUN/jobs``: the head writes its join files there, its host the exit code, which is the
end of the run; ``NAME.end`` asks the host of this name to end. A process gets its key by its standard input.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rlzmq.launch.engine import EXIT_CODE, EXIT_RESUMABLE, LISTEN, Role
from rlzmq.net.join_file import JoinFile

__all__ = ["end", "forget", "host", "stay"]

_END_S = 30.0  # for the end in order of a process whose run is over
_WRONG = (2, 78, 126, 127)  # wrong arguments or configuration, no such program: no restart mends them
_POLL_S = 1.0
_RESTART_S = 2.0
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

    while not ((key := _text(role.key)) or is_head or is_done()):
        time.sleep(_POLL_S)
    if is_done():
        return True
    if is_head:
        forget(jobs)
    words = {LISTEN: f"tcp://{address}:0"} if is_head else {str(role.key): "-"}
    argv = [*_BOUND, f"OMP_NUM_THREADS={role.resources.cpus}", *(words.get(word, word) for word in role.argv)]
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
            has_moved = not is_head and _addresses(_text(role.key) or key) != _addresses(key)
            if has_moved or 0 < end_at < time.monotonic():
                process.kill()  # it waits for a head that is gone, or does not end
            time.sleep(_POLL_S)
    while code == 0 and not is_head and _text(role.key) == key and not is_done(code):
        time.sleep(_POLL_S)  # this head has said goodbye: until another one, or none, is there
    if not (end_at or is_done(code) or code in _WRONG) and (
        not is_head or code < 0 or code == EXIT_RESUMABLE
    ):
        return False
    if is_head and not ends():
        exit_code.write_text(str(code if code >= 0 else EXIT_RESUMABLE))
    elif code in _WRONG:
        end(jobs, "head", _END_S)
    return True


def stay(role: Role, name: str, address: str, is_over: Callable[[int | None], bool]) -> bool:
    """Repeat `host` with these arguments until the run is over, or SIGTERM or SIGUSR1 comes.

    Returns:
        Whether SIGUSR1 came: this node's time is over, and the run goes on elsewhere.
    """
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: signals.append(number))
    while not host(role, name, address, ends=lambda: bool(signals), is_over=is_over):
        time.sleep(_RESTART_S)
    return signal.SIGUSR1 in signals


def end(jobs: Path, name: str, grace_s: float) -> None:
    """Ask a host to end its process, and to kill it after some seconds."""
    (jobs / f"{name}.end").write_text(str(grace_s))


def forget(jobs: Path) -> None:
    """Remove what an earlier head has left, but for its keys and ports, which the next one takes."""
    for name in (*_JOIN_FILES, EXIT_CODE, "head.end"):
        (jobs / name).unlink(missing_ok=True)


def _addresses(text: str) -> Mapping[str, str]:
    """Return where the head of a join file is."""
    return JoinFile.from_text(text).addresses


def _text(path: Path) -> str:
    """Return the text of a file; "" if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""
