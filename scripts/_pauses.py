"""Records the events of each long pause between two updates of a storm: faults, waits, replacements, log lines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

from rlzmq.actors.process_state import is_stopped

__all__ = ["Pauses"]

_BEFORE_S = 4.0  # the time before a pause that may contain its cause
_LOOK_S = 0.2
_ASK_AFTER_S = 1.0
_ASK_S = 1.0


class Pauses(logging.Handler):
    """Records events, and prints those of a long pause; an async context manager.

    Args:
        session: The run's session.
        long_s: Pauses of at least this length are printed.
    """

    def __init__(self, session: Any, long_s: float) -> None:
        super().__init__(logging.INFO)
        self._long_s = long_s
        self._session = session
        self._events: deque[tuple[float, str]] = deque(maxlen=4000)
        self._seen: dict[str, str] = {}
        self._updated_at = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pauses:
        self._logger = logging.getLogger("rlzmq")
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        self._tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._ask())]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def note(self, text: str) -> None:
        """Record an event."""
        self._events.append((time.monotonic(), text))

    def emit(self, record: logging.LogRecord) -> None:
        """Record a log line of the driver."""
        first = record.getMessage().partition("\n")[0]
        self.note(f"log    {first[:240]}")

    def updated(self, now: float) -> float:
        """Record the end of an update; return the seconds since the one before. Print the events of a long pause."""
        gap_s, begin = now - self._updated_at, self._updated_at
        self._updated_at = now
        if gap_s >= self._long_s:
            lines = [
                f"  {at - begin:7.2f}  {text}" for at, text in list(self._events) if at >= begin - _BEFORE_S
            ]
            print(
                f"PAUSE of {gap_s:.1f} s:", *lines, f"  {gap_s:7.2f}  the next update", sep="\n", flush=True
            )
        return gap_s

    async def _look(self) -> None:
        """Record which processes start and end."""
        late_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now - late_at > 1.0 + _LOOK_S:
                self.note(f"driver's event loop was {now - late_at - _LOOK_S:.1f} s late")
            late_at = now
            for name, state in self._states().items():
                if self._seen.get(name) != state:
                    self._seen[name] = state
                    self.note(f"state  {name}: {state}")
            await asyncio.sleep(_LOOK_S)

    def _states(self) -> dict[str, str]:
        session = self._session
        handles = [
            *session.env_runner_group.handles,
            *session.learner_group.handles,
            session.pipeline._broker.handle,
        ]
        states = {handle.name: _state(handle) for handle in handles if handle is not None}
        formation = session.learner_group.formation
        states["group"] = ", ".join(formation.waits()) or f"formed of {len(formation.handles)}"
        gone = dict.fromkeys(self._seen.keys() - {"waits"}, "has left its group")
        return {**gone, **states}

    async def _ask(self) -> None:
        """Record, during a pause, which process waits for which."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() - self._updated_at < _ASK_AFTER_S:
                continue
            try:
                async with asyncio.timeout(_ASK_S):
                    waits = (await self._session.pipeline.status())["waits"]
            except Exception as error:
                waits = [f"broker: no answer ({type(error).__name__})"]
            text = "; ".join(waits)
            if self._seen.get("waits") != text:
                self._seen["waits"] = text
                self.note(f"waits  {text}")


def _state(handle: Any) -> str:
    if handle.exited.done():
        return f"pid {handle.pid} {handle.exited.result()}"
    return f"pid {handle.pid} {'is stopped' if is_stopped(handle.pid) else 'lives'}"
