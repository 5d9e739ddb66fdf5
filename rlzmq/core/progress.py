"""Progress: how many of several things are done, for a person who waits."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Progress"]

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
