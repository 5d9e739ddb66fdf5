"""Signals that end a command: SIGINT, SIGTERM, SIGHUP and SIGUSR1, in any number and at any moment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rlzmq.core.errors import Interrupted
from rlzmq.core.process import ENDING_SIGNALS

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

__all__ = [
    "DRAIN_S",
    "EXIT_INTERRUPTED",
    "EXIT_RESUMABLE",
    "Interrupt",
    "SignalEchoes",
    "exit_code_of_signal",
    "exit_on_signals",
    "handled_signals",
    "ignore_signals",
    "on_signals",
]

DRAIN_S: Mapping[int, float] = {**dict.fromkeys(ENDING_SIGNALS, 6.0), signal.SIGINT: 2.5}
"""Seconds until the current update is cancelled: Ctrl-C ends a run within 5 s, other signals within 10 s."""

EXIT_RESUMABLE, EXIT_INTERRUPTED = 75, 130
_ECHO_S = 0.25  # nobody presses Ctrl-C twice in this time
_PATIENCE_S = 10.0  # for an end in order; from then on Ctrl-C ends the process


def exit_code_of_signal(number: int) -> int:
    """Return the exit code after this signal: 130 for Ctrl-C, 75 (resumable) for the others."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_RESUMABLE


def handled_signals() -> list[signal.Signals]:
    """Return the signals that end a command; without SIGHUP if it was started to ignore it (``nohup``)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in ENDING_SIGNALS if number != signal.SIGHUP or not is_ignored]


def exit_on_signals(code: int | None = None) -> None:
    """Let the signals end this process at once, while nothing needs an orderly end: in its imports, and after its end.

    Args:
        code: The exit code; None: that of the signal.
    """
    for number in handled_signals():
        signal.signal(
            number, lambda number, _: os._exit(exit_code_of_signal(number) if code is None else code)
        )


def ignore_signals() -> None:
    """Keep the exit code while the interpreter ends: it resets handlers then, but not what is ignored."""
    for number in handled_signals():
        signal.signal(number, signal.SIG_IGN)


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


@contextlib.contextmanager
def on_signals(loop: AbstractEventLoop, call: Callable[[int], None]) -> Iterator[None]:
    """Call ``call(number)`` on the first signal in the block; a second one ends the process at once."""
    former = {number: signal.getsignal(number) for number in handled_signals()}
    seen: list[int] = []
    echoes = SignalEchoes()

    def handle(number: int) -> None:
        if echoes.is_echo(number):
            return
        if seen:
            os._exit(exit_code_of_signal(seen[0]))
        seen.append(number)
        call(number)

    for number in former:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number, handler in former.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


class Interrupt:
    """While the block runs, the first signal only sets `is_set` and calls `on_first`.

    `drain_s` seconds later, or at a second Ctrl-C (no echo, see `SignalEchoes`), Interrupted is raised, once.
    Other signals have no effect: the end in order is on its way, however often they arrive. Only Ctrl-C more than 10 s
    after the first signal ends the process and its children immediately.

    SIGUSR1 (Slurm's ``--signal=USR1@60``) and SIGHUP (a closed terminal) count as SIGTERM.

    Args:
        drain_s: For each signal, the time that the current work has to finish by itself.

    Attributes:
        is_set: Whether a signal has arrived.
        signal_number: The first signal; 0 before it.
        ends_at_once: Whether the first signal ends the process immediately, because nothing that needs an orderly end
            has started yet. Initially True.
        on_first: Called on the first signal, in the main thread between two bytecodes. Must be fast and take no locks.
        last_words: Printed if the process is ended immediately.
    """

    def __init__(self, *, drain_s: Mapping[int, float]) -> None:
        self.is_set: bool = False
        self.signal_number: int = 0
        self.on_first: Callable[[], None] | None = None
        self.ends_at_once = True
        self.last_words = "interrupted before it began\n"
        self._drain_s = dict(drain_s)
        self._is_shielded = False
        self._has_raised = False
        self._arrived_at = 0.0
        self._former: dict[int, Any] = {}
        self._echoes = SignalEchoes()

    @property
    def exit_code(self) -> int:
        """The exit code after this interrupt: 130 for Ctrl-C, 75 (resumable) for the others, 0 if there was none."""
        return exit_code_of_signal(self.signal_number) if self.is_set else 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only it can
            for number in handled_signals():
                self._former[number] = signal.signal(number, self._on_signal)
            self._former[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._former:
            self._set_alarm(0)
        for number, handler in self._former.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def shielded(self, limit_s: float = 0.0) -> Iterator[None]:
        """Protect the orderly end in this block: Interrupted is not raised.

        Args:
            limit_s: After a signal, the process ends immediately if the block takes longer; 0: no limit.
        """
        self._is_shielded = True
        self._set_alarm(limit_s if self.is_set else 0)
        try:
            yield
        finally:
            self._set_alarm(0)
            self._is_shielded = False

    def raise_now(self) -> None:
        """Raise Interrupted, unless it was raised before; as `on_first`, without waiting for any work."""
        if not self._has_raised:
            self._has_raised = True
            raise Interrupted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._echoes.is_echo(number):
            return
        if not self.is_set:
            self.is_set, self.signal_number, self._arrived_at = True, number, now
            if self.ends_at_once:
                self._exit_now()
            if not self._is_shielded:
                self._set_alarm(self._drain_s.get(number, 0.0))
            if self.on_first is not None:
                self.on_first()
        elif number == signal.SIGINT:
            if now - self._arrived_at > _PATIENCE_S:
                self._exit_now()
            if not self._is_shielded:
                self.raise_now()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._is_shielded:
            self._exit_now()
        self.raise_now()

    def _exit_now(self) -> NoReturn:
        # No locks and no clean-up: the children end with this process, and their directories are removed later.
        with contextlib.suppress(RuntimeError, OSError):  # the signal arrived during a print; nobody reads it
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(1, self.last_words.encode())
        os._exit(self.exit_code)

    def _set_alarm(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
