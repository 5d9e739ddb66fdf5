"""Handling of Ctrl-C, SIGTERM and SIGUSR1: the first signal asks for an orderly end, the second ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn, Self

__all__ = ["Interrupt", "SignalEchoes"]

_EXIT_RESUMABLE, _EXIT_INTERRUPTED = 75, 130
_ECHO_S = 0.25  # nobody presses Ctrl-C twice in this time


class SignalEchoes:
    """Recognizes the second arrival of one signal: ``uv run`` and ``timeout`` pass on what all processes get anyway."""

    def __init__(self) -> None:
        self._arrived_at: dict[int, float] = {}

    def is_echo(self, number: int) -> bool:
        """Return whether this arrival of a signal directly follows another one."""
        now = time.monotonic()
        before = self._arrived_at.get(number, -_ECHO_S)
        self._arrived_at[number] = now
        return now - before < _ECHO_S


class Interrupt:
    """While the block runs, the first SIGINT, SIGTERM or SIGUSR1 only sets `is_set` and calls `on_first`.

    Slurm sends SIGUSR1 before a time limit (``--signal=USR1@60``); it counts as SIGTERM. A second signal, or `drain_s`
    seconds after the first, raises KeyboardInterrupt. A third signal ends the process and its children immediately.
    Echoes do not count (`SignalEchoes`).

    Args:
        drain_s: For each signal, the time that the current work has to finish by itself.

    Attributes:
        is_set: Whether a signal has arrived.
        signal_number: The first signal; 0 before it.
        num_signals: Number of signals so far.
        ends_at_once: Whether the first signal ends the process immediately, because nothing that needs an orderly end
            has started yet. Initially True.
        on_first: Called on the first signal, in the main thread between two bytecodes. Must be fast and take no locks.
        last_words: Printed if the process is ended immediately.
    """

    def __init__(self, *, drain_s: Mapping[int, float]) -> None:
        self.is_set: bool = False
        self.signal_number: int = 0
        self.num_signals: int = 0
        self.on_first: Callable[[], None] | None = None
        self.ends_at_once = True
        self.last_words = "interrupted before it began\n"
        self._drain_s = dict(drain_s)
        self._deadline_exits = False
        self._former: dict[int, Any] = {}
        self._echoes = SignalEchoes()

    @property
    def exit_code(self) -> int:
        """The exit code after this interrupt: 130 for Ctrl-C, 75 (resumable) for the others, 0 if there was none."""
        if not self.is_set:
            return 0
        return _EXIT_INTERRUPTED if self.signal_number == signal.SIGINT else _EXIT_RESUMABLE

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)):
            self._former.setdefault(number, signal.signal(number, self._on_signal))
        if hasattr(signal, "SIGALRM"):
            self._former[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._set_alarm(0)
        for number, handler in self._former.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def shielded(self, limit_s: float = 0.0) -> Iterator[None]:
        """Protect the orderly end in this block: the drain's alarm is off, and only another signal raises an error.

        Args:
            limit_s: After a signal, the process ends immediately if the block takes longer; 0: no limit.
        """
        self._deadline_exits = True
        self._set_alarm(limit_s if self.is_set else 0)
        try:
            yield
        finally:
            self._set_alarm(0)
            self._deadline_exits = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._echoes.is_echo(number):
            return
        self.num_signals += 1
        if self.is_set:
            if self.num_signals > 2:
                self._exit_now()
            raise KeyboardInterrupt
        self.is_set = True
        self.signal_number = number
        if self.ends_at_once:
            self._exit_now()
        if not self._deadline_exits:
            self._set_alarm(self._drain_s.get(number, 0.0))
        if self.on_first is not None:
            self.on_first()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._deadline_exits:
            self._exit_now()
        raise KeyboardInterrupt

    def _exit_now(self) -> NoReturn:
        # No locks and no clean-up: the children end with this process, and their directories are removed later.
        with contextlib.suppress(RuntimeError):  # the signal arrived during a print
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(1, self.last_words.encode())
        os._exit(self.exit_code)

    def _set_alarm(self, seconds: float) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, seconds)
