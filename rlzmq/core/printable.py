"""What people read: texts and paths in a form that is safe, or short, to print, and the progress of what takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["MAX_ERROR_BYTES", "Progress", "cut", "printable", "short_path"]

# Maximum length of an exception's text when it is stored or sent.
MAX_ERROR_BYTES = 16 * 1024


def printable(text: str, *, keep: str = "") -> str:
    r"""Return `text` with control, format and other invisible characters as escapes, e.g. ``\x1b``.

    Args:
        text: Any text.
        keep: Characters to keep, e.g. ``"\n\t"`` if the text may have several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def short_path(path: str | Path) -> str:
    """Return a path as it is typed in the current directory: relative, if it lies below."""
    here, path = Path.cwd(), Path(path) if isinstance(path, str) else path
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def cut(text: str, max_bytes: int = MAX_ERROR_BYTES) -> str:
    """Return `text`, or its start and the length of the rest: `max_bytes` bytes of UTF-8 and a few words at most."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    kept = encoded[:max_bytes].decode(errors="ignore")
    return f"{kept} … ({len(text) - len(kept)} more characters)"


_FIRST_S, _EVERY_S = 2.0, 5.0  # until a person wonders, and between two lines of a log


class Progress:
    """Says how many of several things are done, if that takes seconds.

    Args:
        text: What it says, with %d for how many are done and for how many there are.
        num: Number of things.
        say: Called with a text; None: nobody listens.
    """

    def __init__(self, text: str, num: int, say: Callable[[str], object] | None) -> None:
        self._text, self._num, self._say = text, num, say
        self._num_done = 0
        self._begun_at = time.monotonic()
        self._due_at = self._begun_at + _FIRST_S

    def add(self, num: int = 1) -> None:
        """Count some more."""
        self._num_done += num
        now = time.monotonic()
        if self._say is not None and now >= self._due_at and self._num_done < self._num:
            self._due_at = now + _EVERY_S
            self._say(f"{self._text % (self._num_done, self._num)} in {now - self._begun_at:.0f} s")
