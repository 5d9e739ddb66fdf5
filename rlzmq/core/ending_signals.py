"""Signals that end a run: its driver alone handles them; the processes that it starts ignore them while it lives."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["ENDING_SIGNALS", "blocked", "default_in_forks", "ignore_ending_signals"]

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What a person, a closed terminal, systemd, Kubernetes and Slurm send, often to all processes of a run."""


_masks = threading.local()  # of threads that fork


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block these signals in this thread, so that processes started in the block begin with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ending_signals() -> None:
    """Ignore them in this process and its forks, and unblock them; not in programs that it starts and may terminate."""
    for number in ENDING_SIGNALS:
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


def default_in_forks() -> None:
    """Give the forks of this process the default again: those of `multiprocessing`, for `Process.terminate`."""
    # Blocked meanwhile: what arrives before the child has the default again would be ignored.
    os.register_at_fork(before=_block, after_in_parent=_restore, after_in_child=_default)


def _default() -> None:
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)
    _restore()


def _block() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)


def _restore() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _ignore(number: int, frame: FrameType | None) -> None:
    # A handler, because programs inherit SIG_IGN.
    pass
