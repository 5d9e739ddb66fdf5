"""Watchdog: ends a run that makes no progress, with a report on what each process waits for.

| consumes                  | produces                                  | waits for | unblocked by |
|---------------------------|-------------------------------------------|-----------|--------------|
| the broker's PROGRESS     | a report, stacks, one re-forming of all; then an error | time | –       |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from rlzmq.core.errors import StandstillError
from rlzmq.core.patience import FairClock, Patience
from rlzmq.wire.messages import Progress

__all__ = ["Watchdog"]

_log = logging.getLogger("rlzmq.driver")

_LOOK_EVERY_S = 1.0
_STATUS_DEADLINE_S = 3.0
_LEAST_S = 60.0


class Watchdog:
    """Watches the updates of one pipeline for progress.

    Args:
        progress: Returns the broker's newest PROGRESS; None before the first.
        patience_s: Returns the time that the driver's current work (starting processes, forming the group) may take.
        status: Returns the broker's status, for the report.
        handles: Returns all processes of the run, whose stacks are written.
        form_anew: Re-forms broker and learner group, once.
        give_up: Ends the run with an error.
    """

    def __init__(
        self,
        *,
        progress: Callable[[], Progress | None],
        patience_s: Callable[[], float],
        status: Callable[[], Awaitable[dict[str, Any]]],
        handles: Callable[[], Iterable[Any]],
        form_anew: Callable[[], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self._progress = progress
        self._patience_s = patience_s
        self._status = status
        self._handles = handles
        self._form_anew = form_anew
        self._give_up = give_up
        self._clock = FairClock(_LOOK_EVERY_S)
        self._patience = Patience(_LEAST_S)
        self._num_moves = -1
        self._has_tried = False

    @contextlib.asynccontextmanager
    async def update(self) -> Any:
        """Watch for progress in the block, in which an update is awaited."""
        self._patience.begin(self._clock.now())
        task = asyncio.create_task(self._run(), name="watchdog")
        try:
            yield
            self._has_tried = False
        finally:
            task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            progress, now = self._progress(), self._clock.now()
            num_moves = progress.num_moves if progress is not None else 0
            if num_moves != self._num_moves:
                self._num_moves = num_moves
                self._patience.moved(now)
            # Processes at work are replaced first.
            others_s = max(self._patience_s(), progress.patience_s if progress is not None else 0.0)
            silent_s = self._patience.silent_s(now)
            if self._patience.is_over(now) and silent_s >= 2 * others_s:
                self._patience.begin(now)
                await self._act(silent_s)

    async def _act(self, still_s: float) -> None:
        report = await self._report()
        _log.error("No training progress for %.0f s.\n%s", still_s, report)
        for handle in self._handles():
            if not handle.exited.done():
                with contextlib.suppress(NotImplementedError):  # local actors have no stacks
                    handle.dump_stacks()
        if not self._has_tried:
            self._has_tried = True
            _log.error("Re-forming broker and learner group, once.")
            self._form_anew()
            return
        self._give_up(
            StandstillError(
                f"Training stands still: nothing has moved for {still_s:.0f} s, for the second time in one update, "
                f"although broker and learner group were re-formed. Waiting:\n{report}\n"
                "The stacks of all processes are on stderr. The run can be resumed from its newest checkpoint."
            )
        )

    async def _report(self) -> str:
        try:
            async with asyncio.timeout(_STATUS_DEADLINE_S):
                status = await self._status()
        except Exception as error:
            return f"  the broker did not answer: {error!r}"
        return "\n".join(f"  {line}" for line in status["waits"])
