"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second (or a long wait) ends at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupt"]


class Interrupt:
    """While the block runs, the first SIGINT or SIGTERM only sets `is_set`.

    A second one, or `drain_s` seconds after the first, raises KeyboardInterrupt.

    Args:
        drain_s: How long the work at hand may take to end by itself.

    Attributes:
        is_set: Whether a signal came.
        signal_number: Which; 0 before.
    """

    def __init__(self, *, drain_s: float) -> None:
        self.is_set = False
        self.signal_number = 0
        self._drain_s = drain_s
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._on_signal)
        if hasattr(signal, "SIGALRM"):
            self._former[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set_alarm(0)
        for number, handler in self._former.items():
            signal.signal(number, handler)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """The block is the orderly end itself: the drain's alarm is off, only a further signal raises."""
        self._set_alarm(0)
        yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        self.signal_number = number
        self._set_alarm(self._drain_s)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def _set_alarm(self, seconds: float) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, seconds)
