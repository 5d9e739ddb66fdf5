"""Fault injection at named places, and a history of each process's events, for recovery tests.

``RLZMQ_FAULT=NAME[@PLACE]:ACTION:N[,…]`` makes a process fail when it reaches NAME for the N-th time (from 1), in its
first incarnation only. PLACE limits it to one process, e.g. ``learner-1``. Actions: ``kill`` (SIGKILL), ``stop``
(SIGSTOP), ``exit`` (exit code 3), ``hang`` (a Python loop that never ends), ``enospc`` and ``eio`` (the OSError of a
full, or of a broken disk). A fault first appends ``NAME PLACE ACTION N`` to the file ``RLZMQ_FAULT_LOG``, so that tests
can see it, and never fires again in that run.

``RLZMQ_HISTORY=DIRECTORY`` makes every process append its events to its own file in that directory.

Without these variables, `at` and `record` do nothing.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["FAULT_ACTIONS", "arm", "at", "is_armed", "is_recording", "parse_faults", "record"]

FAULT_ACTIONS = ("kill", "stop", "exit", "hang", "enospc", "eio")

is_armed: bool = False
"""Whether this process has faults, for callers that would have to build a name first."""

is_recording: bool = False
"""Whether this process records its history, for callers that would have to collect facts first."""


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass


at: Callable[[str], None] = _do_nothing
"""``faults.at("learner.vote")``: report that this process has reached a named place."""

record: Callable[..., None] = _do_nothing
"""``faults.record("trained", update=3)``: record an event with plain facts. It is on disk when the call returns."""


def arm(place: str, incarnation: int = 0) -> None:
    """Set up faults and history. Each role's process calls this once, with the run's environment variables.

    Args:
        place: Name of this process, e.g. "runner-0".
        incarnation: Number of its restarts. Faults fire only in incarnation 0.
    """
    global at, record, is_armed, is_recording
    at, record, is_armed, is_recording = _do_nothing, _do_nothing, False, False
    faults = parse_faults(os.environ.get("RLZMQ_FAULT", ""))
    mine = {
        (name, n): action for name, where, action, n in faults if where in ("", place) and incarnation == 0
    }
    if mine:
        at, is_armed = _Faults(place, mine), True
    if directory := os.environ.get("RLZMQ_HISTORY"):
        record, is_recording = _History(Path(directory) / f"{place}.{os.getpid()}.jsonl"), True


def parse_faults(text: str) -> list[tuple[str, str, str, int]]:
    """Parse ``RLZMQ_FAULT`` into (name, place or "", action, n).

    Raises:
        ValueError: The text does not have this form; the message shows the expected one.
    """
    faults = []
    for item in filter(None, text.split(",")):
        parts = item.strip().split(":")
        if len(parts) != 3 or parts[1] not in FAULT_ACTIONS or not parts[2].isdigit() or parts[2] == "0":
            raise ValueError(
                f"RLZMQ_FAULT: expected NAME[@PLACE]:ACTION:N with ACTION of {', '.join(FAULT_ACTIONS)} and "
                f"N from 1, got {item!r}."
            )
        name, _, place = parts[0].partition("@")
        faults.append((name, place, parts[1], int(parts[2])))
    return faults


class _Faults:
    def __init__(self, place: str, faults: dict[tuple[str, int], str]) -> None:
        self._place = place
        self._faults = faults
        self._counts: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        self._counts[name] += 1
        action = self._faults.get((name, self._counts[name]))
        if action is not None:
            line = f"{name} {self._place} {action} {self._counts[name]}"
            log = os.environ.get("RLZMQ_FAULT_LOG")
            if log is not None:
                if os.path.exists(log) and line in Path(log).read_text().splitlines():
                    return  # logged by an earlier incarnation
                with open(log, "a", opener=_private) as file:
                    file.write(f"{line}\n")
            _act(action)


def _act(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "exit":
        os._exit(3)
    elif action in ("enospc", "eio"):
        number = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number))
    else:
        while True:
            pass


class _History:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that written events survive a SIGKILL.
        self._fd = _private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, event: str, **facts: Any) -> None:
        os.write(self._fd, (json.dumps({"event": event, **facts}) + "\n").encode())


def _private(path: str | Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
