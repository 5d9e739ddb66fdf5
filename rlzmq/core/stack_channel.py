"""Stacks on request: a signal makes a process write the stacks of its threads into a file in memory.

The file is named after the process's role. Processes of the same user find it in ``/proc/PID/fd``, so the signal is
sent only to processes that handle it. The main thread answers, while the others stand still. If it does not, a signal
handler in C writes the stacks of the process that hangs; of threads that run, it may read what is no stack, and crash.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from types import FrameType

from rlzmq.core.opened_process import OpenedProcess

__all__ = ["STACKS_TO_STDERR", "find_stack_channel", "open_stack_channel", "read_stacks"]

STACKS_TO_STDERR = signal.SIGRTMIN + 1
"""Makes an actor's process that hangs write its stacks to stderr, by the handler in C."""

_ASK, _INSIST = signal.SIGUSR2, signal.SIGRTMIN
_ANSWER_S = 1.0
_PREFIX = "/memfd:rlzmq-stacks:"
_LOOK_S = 0.02
_NUM_QUIET_LOOKS = 5  # number of reads without new text that end the stacks
_MAX_WAIT_S = 4.0

_channel: tuple[int, int] | None = None  # its descriptor, and the pid of its process


def open_stack_channel(role: str) -> None:
    """Allow other processes to read the stacks of this one.

    Args:
        role: Name of the process, e.g. ``"runner-0"``.
    """
    global _channel
    if _channel is not None and _channel[1] == os.getpid():
        return
    signal.signal(_ASK, _answer)  # before others find the file
    fd = os.memfd_create(f"rlzmq-stacks:{role[:200]}", os.MFD_CLOEXEC)
    _channel = (fd, os.getpid())
    faulthandler.register(_INSIST, file=fd, all_threads=True)


def find_stack_channel(pid: int) -> tuple[str, Path] | None:
    """Return the role and file of a process's channel; None if it has none, has ended, or belongs to another user."""
    try:
        found = [(os.readlink(entry.path), Path(entry.path)) for entry in list(os.scandir(f"/proc/{pid}/fd"))]
    except OSError:
        return None
    for target, path in found:
        if target.startswith(_PREFIX):
            return target.removeprefix(_PREFIX).removesuffix(" (deleted)"), path
    return None


def read_stacks(pid: int, channel: Path) -> str:
    """Make a process write the stacks of its threads, and return them; "" if it does not answer.

    Raises:
        OSError: The process has ended.
    """
    with OpenedProcess(pid) as process, open(channel, "rb") as file:
        if not os.readlink(channel).startswith(_PREFIX):  # another process has its number
            raise ProcessLookupError(f"{channel} is no channel of stacks")
        begin = size = os.fstat(file.fileno()).st_size
        process.send_signal(_ASK)
        num_quiet, begun_at, insists = 0, time.monotonic(), False
        while num_quiet < _NUM_QUIET_LOOKS and (waited_s := time.monotonic() - begun_at) < _MAX_WAIT_S:
            if size == begin and waited_s > _ANSWER_S and not insists:
                insists = True
                process.send_signal(_INSIST)
            time.sleep(_LOOK_S)
            before, size = size, os.fstat(file.fileno()).st_size
            num_quiet = num_quiet + 1 if size == before > begin else 0
        file.seek(begin)
        return file.read().decode(errors="replace")


def _answer(number: int, frame: FrameType | None) -> None:
    if _channel is not None:
        faulthandler.dump_traceback(_channel[0], all_threads=True)
