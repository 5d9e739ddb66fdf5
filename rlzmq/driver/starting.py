"""Starting a process of the run: who is killed or stopped meanwhile is replaced, who hangs ends the run.

| consumes                     | produces                | waits for       | unblocked by                        |
|------------------------------|-------------------------|-----------------|-------------------------------------|
| a spawn                      | a handle, or the error  | the constructor | its end, SIGSTOP seen, the deadline |
| a call to who has just come  | its answer              | the answer      | its end, SIGSTOP seen, a late beat  |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from rlzmq.actors.exit_status import ActorLostError
from rlzmq.core.errors import DeadlineError, PeerLostError, first_error
from rlzmq.driver.process_health import first_line, why_hanging
from rlzmq.protocol.supervision import GiveUp, Supervision
from rlzmq.roles.runner.env_watchdog import EXIT_ENV_HANGS

__all__ = ["BEAT_DEADLINE_S", "all_started", "attended", "spawn_within", "start_first"]

T = TypeVar("T")

_log = logging.getLogger("rlzmq.driver")

BEAT_DEADLINE_S = 30.0
"""Seconds for the event loop of a process of which nothing else is known: an import may hold the GIL."""

_LOOK_S = 1.0
_MAX_FIRST_STARTS = 6


async def start_first(
    spawn: Callable[[int], Awaitable[Any]], machine: Supervision, name: str, *, is_replaced: bool
) -> Any:
    """Start a process for the first time, again if it is killed or stopped meanwhile.

    Args:
        spawn: ``await spawn(incarnation)`` starts it; its handle.
        machine: Counts its deaths, and goes on to do so.
        name: Of the process, for texts.
        is_replaced: Whether its death may be survived at all.

    Raises:
        PeerLostError: It ended in each of several attempts: the first of these errors.
        Exception: What its constructor raised, or that it hangs: another attempt would end likewise.
    """
    first: PeerLostError | None = None
    for number in range(1, _MAX_FIRST_STARTS + 1):
        try:
            return await spawn(machine.incarnation)
        except PeerLostError as error:
            first = first or error
            status = error.exit_status if isinstance(error, ActorLostError) else None
            if not is_replaced or (status is not None and status.exit_code == EXIT_ENV_HANGS):
                raise
            decision = machine.failed(time.monotonic())
            if isinstance(decision, GiveUp) or number == _MAX_FIRST_STARTS:
                first.add_note(f"{name} was started {number} times and ended while it started, each time.")
                raise first from None
            reason = first_line(error).removesuffix(".")
            _log.warning("%s. Started again in %g s.", reason, decision.delay_s)
            await asyncio.sleep(decision.delay_s)
    raise AssertionError("the last attempt returns or raises")


async def all_started(starts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all starts at once; the first error ends those that are under way."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(start) for start in starts]
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return [start.result() for start in started]


async def spawn_within(timeout_s: float, setting: str, spawn: Awaitable[Any]) -> Any:
    """Await a spawn that has this deadline; its error names the setting.

    Args:
        timeout_s: The spawn's own deadline, for the text.
        setting: What it follows from.
        spawn: Of `ActorSystem`, with this deadline.

    Raises:
        DeadlineError: It took longer.
    """
    try:
        return await spawn
    except DeadlineError as error:
        raise DeadlineError(
            f"{error}\nIf its constructor really takes longer than {timeout_s:g} s, raise {setting} "
            "(config.fault_tolerance)."
        ) from None


async def attended(handle: Any, work: Awaitable[Any]) -> Any:
    """Await an answer of a process that nobody else watches yet; it is killed where it is stopped or hangs.

    Args:
        handle: Of the process.
        work: A call, or several, of this handle.

    Raises:
        PeerLostError: The process ended, killed for hanging or otherwise.
        Exception: What the call raised.
    """
    answer = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((answer,), timeout=_LOOK_S))[0]:
            why = await why_hanging(handle, deadline_s=BEAT_DEADLINE_S)
            if why and not answer.done():
                _log.warning(
                    "%s (pid %d) hangs while it starts: %s. It is killed.", handle.name, handle.pid, why
                )
                await handle.kill_hanging()
        return answer.result()
    finally:
        answer.cancel()
