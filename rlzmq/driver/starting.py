"""Starts processes of the run: one that is killed or stopped meanwhile is replaced, one that hangs ends the run.

| consumes                     | produces                | waits for       | unblocked by                        |
|------------------------------|-------------------------|-----------------|-------------------------------------|
| a spawn                      | a handle, or the error  | the constructor | its end, SIGSTOP seen, the deadline |
| a call to a new process      | its answer              | the answer      | its end, SIGSTOP seen, a late beat  |
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
"""Seconds to wait for a process of which nothing else is known: an import may hold the GIL."""

_LOOK_S = 1.0
_MAX_FIRST_STARTS = 6


async def start_first(
    spawn: Callable[[int], Awaitable[Any]], machine: Supervision, name: str, *, is_replaced: bool
) -> Any:
    """Start a process for the first time; repeat it if the process is killed or stopped meanwhile.

    Args:
        spawn: ``await spawn(incarnation)`` starts the process and returns its handle.
        machine: Counts its deaths, also after the start.
        name: Name of the process, for messages.
        is_replaced: Whether the process may be replaced at all.

    Raises:
        PeerLostError: It ended in each of several attempts: the first of these errors.
        Exception: Its constructor raised, or it hangs: another attempt would end likewise.
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
                first.add_note(f"{name} was started {number} times and ended during each start.")
                raise first from None
            reason = first_line(error).removesuffix(".")
            _log.warning("%s. Restarted in %g s.", reason, decision.delay_s)
            await asyncio.sleep(decision.delay_s)
    raise AssertionError("the last attempt returns or raises")


async def all_started(starts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all starts concurrently; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(start) for start in starts]
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return [start.result() for start in started]


async def spawn_within(timeout_s: float, setting: str, spawn: Awaitable[Any]) -> Any:
    """Await a spawn with this deadline; on timeout, raise an error that names the setting.

    Args:
        timeout_s: The spawn's deadline, for the message.
        setting: The setting that determines it.
        spawn: A spawn of `ActorSystem` with this deadline.

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
    """Await an answer of a process that is not supervised yet; kill the process if it is stopped or hangs.

    Args:
        handle: The process.
        work: One or several calls of this handle.

    Raises:
        PeerLostError: The process ended, killed for hanging or otherwise.
        Exception: The call raised.
    """
    answer = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((answer,), timeout=_LOOK_S))[0]:
            why = await why_hanging(handle, deadline_s=BEAT_DEADLINE_S)
            if why and not answer.done():
                _log.warning(
                    "%s (pid %d) hangs while it starts: %s. Killing it.", handle.name, handle.pid, why
                )
                await handle.kill_hanging()
        return answer.result()
    finally:
        answer.cancel()
