"""Watched: whether one process of this machine still works; the actor system kills those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rlzmq.actors.links import ProcessLink
from rlzmq.actors.process_state import is_stopped
from rlzmq.core.patience import FACTOR, CoreWait, Patience

__all__ = ["Watched"]


class Watched:
    """The beats of a process: a call that its event loop answers at once, again and again.

    Args:
        link: Its link.
        patience: How long an answer may take; None: it is only watched for being stopped while it starts.
        is_spared: Whether the process has what nobody else has: it is then continued if it was stopped, and gets
            `FACTOR` times the time.
    """

    def __init__(self, link: ProcessLink, patience: Patience | None, is_spared: Callable[[], bool]) -> None:
        self.link: ProcessLink = link
        self._patience = patience
        self._is_spared = is_spared
        self._core_wait = CoreWait()
        self._answer: asyncio.Future[Any] | None = None
        self._num_looks = 0  # since the last beat was sent
        self._was_stopped = False

    def look(self, now: float) -> str:
        """Return why the process hangs, "stopped" if it is to be continued, or ""; to be called regularly.

        Args:
            now: Seconds of a `FairClock`.
        """
        link, patience = self.link, self._patience
        if patience is None and link.has_started:
            return ""
        # Twice in a row, since a process may be continued at once.
        was_stopped, self._was_stopped = self._was_stopped, link.pid > 0 and is_stopped(link.pid)
        if self._was_stopped:
            if not was_stopped:
                return ""
            return "stopped" if self._is_spared() else "a signal (SIGSTOP) has stopped it"
        # Before its constructor has returned, it need not answer.
        return self._listen(now, patience) if link.has_started and patience is not None else ""

    def close(self) -> None:
        """Wait for no answer any more. Idempotent."""
        if self._answer is not None:
            self._answer.cancel()

    def _listen(self, now: float, patience: Patience) -> str:
        self._num_looks += 1
        if self._answer is None or self._answer.done():
            if self._answer is not None:
                patience.moved(now)
                self._answer = None
            elif self._num_looks > 1:
                self._answer, self._num_looks = asyncio.ensure_future(self.link.beat()), 0
                patience.begin(now)
            return ""
        if self._num_looks == 1:
            self._core_wait.begin(self.link.pid)
            return ""
        patience.begin(min(now, now - patience.silent_s(now) + self._core_wait.take_s()))
        silent_s = patience.silent_s(now)
        if not patience.is_over(now) or (self._is_spared() and silent_s < FACTOR * patience.limit_s):
            return ""
        patience.killed()
        return f"no answer for {silent_s:.1f} s"
