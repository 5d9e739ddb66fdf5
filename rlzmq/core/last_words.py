"""LastWords: the reason why a process ended itself, on a channel that nothing else writes to.

Child processes write to the same stderr, even after the process has ended, so stderr is not reliable. The parent
creates the channel, a file in memory, and reads it when the process has ended. A process without a channel writes
only to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from typing import NoReturn

from rlzmq.core.printable import cut, printable
from rlzmq.core.tracebacks import origin_parts

__all__ = ["LastWords", "end_process", "leave", "make_channel", "open_channel", "read_channel"]

_MAX_TEXT_BYTES = 4 * 1024
_MAX_TRACEBACK_BYTES = 16 * 1024
_MAX_BYTES = 256 * 1024
_LINES = "\n\t"


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why a process ended itself.

    Attributes:
        kind: Type of the exception that ended it; "" if there was none.
        text: The exception's text, or the reason.
        traceback_text: The frames that raised it and its causes, or the stack at the end; may be "".
    """

    kind: str
    text: str
    traceback_text: str = ""

    @classmethod
    def of(cls, error: BaseException) -> LastWords:
        """Return the words for an exception that ends the process."""
        try:
            text = str(error)
        except Exception:
            text = "(the exception's own __str__ raised)"
        return cls(type(error).__name__, text, "".join(origin_parts(error)))

    @property
    def summary(self) -> str:
        """Return the type and the first line of the text."""
        return ": ".join(part for part in (self.kind, self.text.partition("\n")[0]) if part)

    def __str__(self) -> str:
        """Return the traceback, then type and text."""
        last = ": ".join(part for part in (self.kind, self.text) if part)
        return f"{self.traceback_text.rstrip()}\n{last}" if self.traceback_text else last


_lock = threading.Lock()
_channel: tuple[int, int] | None = None  # its descriptor, and the pid of its process


def make_channel() -> int:
    """Return the descriptor of a new channel. Executed processes do not inherit it."""
    return os.memfd_create("rlzmq-last-words", os.MFD_CLOEXEC)


def open_channel(fd: int) -> None:
    """Use this as the channel of this process."""
    global _channel
    _channel = (fd, os.getpid())


def leave(words: LastWords) -> None:
    """Write the last words of this process. Only the first ones count. A fork of the process has no channel."""
    with _lock:
        if _channel is None or _channel[1] != os.getpid() or os.fstat(_channel[0]).st_size:
            return
        short = LastWords(
            words.kind,
            cut(words.text, _MAX_TEXT_BYTES),
            words.traceback_text.encode(errors="replace")[-_MAX_TRACEBACK_BYTES:].decode(errors="ignore"),
        )
        with contextlib.suppress(OSError):
            os.pwrite(_channel[0], json.dumps(asdict(short)).encode(), 0)


def end_process(exit_code: int, words: LastWords) -> NoReturn:
    """Write last words, print them to stderr, and end this process at once, from any thread."""
    try:
        leave(words)
        print(words.text, file=sys.__stderr__, flush=True)
    finally:
        os._exit(exit_code)


def read_channel(fd: int) -> LastWords | None:
    """Return the last words in the channel of an ended process; None if it left none."""
    data = os.pread(fd, _MAX_BYTES, 0)
    try:
        found = json.loads(data)
        return LastWords(*(printable(str(found[name]), keep=_LINES) for name in LastWords.__slots__))
    except (
        ValueError,
        KeyError,
        TypeError,
    ):  # the process was killed during the write, or wrote something else
        return None
