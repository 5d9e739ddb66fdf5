"""Supervisor: starts, restarts and attends the run's processes of any role.

| consumes                     | produces                  | waits for       | unblocked by                        |
|------------------------------|---------------------------|-----------------|-------------------------------------|
| a spawn                      | a handle, or the error    | the constructor | its end, SIGSTOP seen, the deadline |
| a process's end              | a new one, or the run's end | the back-off  | time                                |

Who is stopped or hangs is killed by the actor system (`rlzmq.actors.system`), and so has simply ended here.

The roles differ in their decisions: `RunnerSupervisor` restarts a runner at its place, `LearnerSupervisor` forms a
group of the survivors and lets replacements join it, `BrokerSupervisor` restarts the broker on the same addresses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.core.errors import ClosedError, DeadlineError, PeerLostError, first_error
from rlzmq.core.patience import Supervision
from rlzmq.roles.hang_watch import EXIT_HANGS

__all__ = [
    "Supervisor",
    "all_started",
    "first_line",
    "lost_error",
    "restarted",
    "spawn_within",
    "start_first",
]

T = TypeVar("T")

_log = logging.getLogger("rlzmq.driver")

_MAX_FIRST_STARTS = 6


class Supervisor:
    """Base class of the supervisors: their tasks, and the failure that ends the run.

    Attributes:
        failed: A future with an exception once the run cannot continue.
        num_restarts: Number of restarts of this role's processes.
    """

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_restarts = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def fail(self, error: BaseException) -> None:
        """End the run with this error, unless it has failed already."""
        if not self.failed.done():
            self.failed.set_exception(error)
        self.failed.exception()  # mark as retrieved: there may be no waiter

    async def wait_for(self, event: asyncio.Event) -> None:
        """Wait for an event.

        Raises:
            Exception: The run has failed, and the event has not occurred.
        """
        while not event.is_set():  # it may have been cleared again before this task went on
            if self.failed.done():
                self.failed.result()
            waiting = asyncio.ensure_future(event.wait())
            try:
                await asyncio.wait((waiting, self.failed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()

    async def stop(self) -> None:
        """Stop the supervision. The processes stay alive."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.fail(ClosedError("the run was stopped"))

    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def restarted(
    start: Callable[[], Awaitable[T]],
    decide: Callable[[BaseException], float | None],
    error: BaseException | None = None,
) -> T | None:
    """Start a process, repeatedly if needed, until it has started.

    Args:
        start: Starts it, and makes it ready for work.
        decide: Returns the number of seconds until the next start after an error; None: no further start. May raise
            an error.
        error: The error with which the process ended; None: the process is started for the first time.

    Returns:
        The result of `start`; None if there is no further start.
    """
    while True:
        if error is not None:
            delay_s = decide(error)
            if delay_s is None:
                return None
            text = first_line(error).removesuffix(".")
            _log.warning("%s. Restarted in %g s.", text, delay_s, extra={"error": error})
            await asyncio.sleep(delay_s)
        try:
            return await start()
        except Exception as failure:
            error = failure


async def start_first(
    spawn: Callable[[], Awaitable[Any]], machine: Supervision, name: str, *, is_replaced: bool
) -> Any:
    """Start a process for the first time. Repeat it if the process is killed or stopped during the start.

    Args:
        spawn: Starts the process and returns its handle.
        machine: Counts its deaths, also after the start.
        name: Name of the process, for messages.
        is_replaced: Whether the process may be replaced at all.

    Raises:
        PeerLostError: It ended in each of several attempts; this is the first of these errors.
        Exception: Its constructor raised an error, or it hangs; another attempt would end in the same way.
    """
    failures: list[BaseException] = []

    def decide(error: BaseException) -> float:
        status = error.exit_status if isinstance(error, ActorLostError) else None
        has_hung = status is not None and status.exit_code == EXIT_HANGS
        if not isinstance(error, PeerLostError) or not is_replaced or has_hung:
            raise error
        failures.append(error)
        delay_s = machine.failed(time.monotonic())
        if delay_s is None or len(failures) == _MAX_FIRST_STARTS:
            failures[0].add_note(f"{name} was started {len(failures)} times and ended during each start.")
            raise failures[0] from None
        return delay_s

    return await restarted(spawn, decide)


async def all_started(starts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all starts concurrently. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(start) for start in starts]
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return [start.result() for start in started]


async def spawn_within(timeout_s: float, setting: str, spawn: Awaitable[Any]) -> Any:
    """Await a spawn with this deadline. On timeout, raise an error that names the setting.

    Raises:
        DeadlineError: The spawn took longer.
    """
    try:
        return await spawn
    except DeadlineError as error:
        raise DeadlineError(
            f"{error}\nIf its constructor really takes longer than {timeout_s:g} s, raise {setting} "
            "(config.fault_tolerance)."
        ) from None


def lost_error(handle: ActorHandle) -> ActorLostError:
    """Return the error for an actor that ended unexpectedly."""
    status = handle.exited.result()
    text = f"{handle.name} (pid {handle.pid}) {handle.why_killed or status}.{status.explanation}"
    return ActorLostError(text, role=handle.name, pid=handle.pid, exit_status=status)


def first_line(error: BaseException) -> str:
    """Return an error's text for a log line, with a summary of the process's last words, if there are any.

    The process's output on stderr has been forwarded already.
    """
    text = str(error).partition("\n")[0]
    status = error.exit_status if isinstance(error, ActorLostError) else None
    if status is None or status.last_words is None:
        return text
    return f"{text.removesuffix('.')}: {status.last_words.summary.removesuffix('.')}."
