"""Supervisor: starts the processes of a role, and starts each that ends again.

| consumes             | produces                    | waits for       | unblocked by                        |
|----------------------|-----------------------------|-----------------|-------------------------------------|
| a spawn              | a handle, or the error      | the constructor | its end, SIGSTOP seen, the deadline |
| a process's end      | a new one, or the run's end | the back-off    | time                                |

A process that is stopped or hangs is killed by the actor system (`rlzmq.actors.system`), or ends by itself if its
environments hang (`core.call_watch`), and so has simply ended here. The rule of restarts is `core.patience.Restarts`.
Peers of a new broker reconnect, notice its incarnation and send it what they hold, so no accepted data is lost
(`rlzmq.protocol.broker.core`). The broker forgets a runner that is silent for longer than its pace
allows, and leases its steps to others; when it speaks again, it registers again.

A runner's death, in order::

    its process ends, which the fork server reports (ActorHandle.exited); if the broker expelled it,
    BrokerPipeline._watch kills it
    Supervisor._supervise    waits for the back-off, starts a process at its place; calls `prepare`:
        AsyncEnvRunnerGroup._bring_up_to_date    env config, weights and connector state of its predecessor
        BrokerPipeline._connect_runner           addresses and keys; the runner says HELLO
    broker: Registration.hello     fences the old one and ends its leases; Grants.progress grants to the new one

A learner's replacement is connected in the same way, and then waits until the group takes it in (`driver.formation`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import EXIT_HANGS
from rlzmq.core.errors import ClosedError, PeerLostError, first_error
from rlzmq.core.patience import ANSWER_S, Restarts

__all__ = [
    "Place",
    "RunTasks",
    "Supervisor",
    "env_runner_supervisor",
    "first_line",
    "lost_error",
]

T = TypeVar("T")

_log = logging.getLogger("rlzmq.driver")

_CRASH_ADVICE = (
    " Code that ran in it (an environment, a model, a native library) ended it. To debug that in your own process, "
    "set num_env_runners=0 and num_learners=0, and start python -X faulthandler."
)


class RunTasks:
    """Tasks of a part of the run, and the error with which they end the run.

    Attributes:
        failed: A future with an exception once the run cannot continue.
    """

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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
            await self.unless_failed(event.wait())

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of this work.

        Raises:
            Exception: The work raised it, or the run has failed meanwhile.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.failed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.failed.result()
            return task.result()
        finally:
            task.cancel()

    async def stop(self) -> None:
        """End the tasks. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.fail(ClosedError("the run was stopped"))

    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Place(Restarts):
    """One process of a role through all its incarnations.

    Attributes:
        index: Its number in the role, from 0.
        handle: The actor handle of the current process, also while it is being prepared; None before the first.
        up: Set while the process can be used, and once the run goes on without it.
        is_given_up: Whether it is not started again: the run has ended, or goes on without it.
    """

    def __init__(self, index: int, least_s: float) -> None:
        super().__init__(least_s)
        self.index = index
        self.handle: Any = None
        self.up: asyncio.Event = asyncio.Event()
        self.is_given_up: bool = False
        self.first_failure: BaseException | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its process can be used."""
        return self.up.is_set() and not self.is_given_up and not self.handle.exited.done()


class Supervisor(RunTasks):
    """Starts the processes of one role, and starts each that ends again, by the rule of `Restarts`.

    If a place is given up, the run ends with the first of its failures in a row, or goes on without it.

    Args:
        spawn: ``await spawn(place)`` starts a process and returns its handle.
        setting: Name of the setting that says whether processes of this role are restarted.
        is_on: Its value.
        may_go_on: Whether the run may go on without places that are given up, as long as others are left.
        least_s: Seconds for which the event loop of a process may be blocked, at least.

    Attributes:
        places: All places, by index.
        prepare: ``await prepare(place)`` functions, awaited in order before a new process is used, e.g. to load
            weights.
        on_end: Called with the place of each process that has ended.
    """

    def __init__(
        self,
        spawn: Callable[[Place], Awaitable[Any]],
        *,
        setting: str,
        is_on: bool,
        may_go_on: bool = False,
        least_s: float = ANSWER_S,
    ) -> None:
        super().__init__()
        self._spawn = spawn
        self._setting = setting
        self._is_on = is_on
        self._may_go_on = may_go_on
        self._least_s = least_s
        self.places: list[Place] = []
        self.prepare: list[Callable[[Place], Awaitable[None]]] = []
        self.on_end: Callable[[Place], None] = lambda place: None

    async def start(self, num: int) -> None:
        """Start all processes concurrently, and supervise them from then on.

        Raises:
            PeerLostError: One of them died in each of several attempts.
            DeadlineError: One of them did not start in time.
            Exception: A constructor raised an error.
        """
        self.places[:] = [Place(index, self._least_s) for index in range(num)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for place in self.places:
                    tasks.create_task(self._bring_up(place))
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        for place in self.places:
            self._start(self._supervise(place), f"supervise {place.handle}")

    async def prepare_all(self, prepare: Callable[[Place], Awaitable[None]]) -> None:
        """Prepare the existing processes, and from then on each new one.

        Raises:
            Exception: `prepare` raised an error for another reason than the end of a process, whose replacement is
                prepared, too.
        """
        self.prepare.append(prepare)
        await asyncio.gather(*(self._prepare(place, prepare) for place in self.places))

    async def _prepare(self, place: Place, prepare: Callable[[Place], Awaitable[None]]) -> None:
        if place.up.is_set() and not place.is_given_up:
            await self._unless_lost(place, prepare(place))
        await self.wait_for(place.up)

    async def end(self) -> None:
        """Stop the supervision, and end the processes."""
        await self.stop()
        handles = self.handles
        for place in self.places:
            place.handle = None
        await asyncio.gather(*(handle.stop() for handle in handles))

    # -- facts ----------------------------------------------------------------------------------

    @property
    def handles(self) -> list[Any]:
        """The processes' actor handles, by place."""
        return [place.handle for place in self.places if place.handle is not None]

    @property
    def num_healthy(self) -> int:
        """Number of processes that are up."""
        return sum(place.up.is_set() and not place.is_given_up for place in self.places)

    @property
    def num_restarts(self) -> int:
        """Number of restarts of this role's processes."""
        return sum(place.incarnation for place in self.places)

    # -- use ------------------------------------------------------------------------------------

    async def call(self, index: int, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Await ``call(handle)`` for a place. Repeat it on the replacement if the process dies during the call.

        Returns:
            The result; None if the place was given up.

        Raises:
            Exception: The call raised an error, or the place may not be replaced.
        """
        place = self.places[index]
        while True:
            await self.wait_for(place.up)
            if place.is_given_up:
                return None
            is_done, result = await self._unless_lost(place, call(place.handle))
            if is_done:
                self.note_work(index)
                return result

    async def _unless_lost(self, place: Place, work: Awaitable[T]) -> tuple[bool, T | None]:
        """Return (True, the result of a call of a place's process), or (False, None) if the process has ended."""
        handle = place.handle
        try:
            return True, await work
        except ActorLostError:
            await handle.exited
            if place.handle is handle:
                place.up.clear()  # its supervising task may not have run yet
            return False, None

    def note_work(self, index: int) -> None:
        """Reset the failure count, after the process has delivered useful work."""
        place = self.places[index]
        if place.up.is_set() and not place.is_given_up:
            place.note_work()
            place.first_failure = None

    # -- the loop of one place ------------------------------------------------------------------

    async def _supervise(self, place: Place) -> None:
        try:
            while not place.is_given_up:
                await place.handle.exited
                place.up.clear()
                self.on_end(place)
                await self._bring_up(place, lost_error(place.handle))
        except Exception as error:
            self.fail(error)

    async def _bring_up(self, place: Place, error: BaseException | None = None) -> None:
        """Start a place's process, again and again if it dies during its start, until it is up or given up.

        Args:
            place: The place.
            error: The error with which its process ended; None: it is started for the first time, and an error that
                another attempt would raise, too, is raised at once.
        """
        is_first = error is None
        while True:
            if error is not None:
                place.first_failure = place.first_failure or error
                delay_s = place.failed(is_crash=_is_crash(error)) if self._is_on else None
                if delay_s is None:
                    self._give_up(place, error, is_first=is_first)
                    return
                text = first_line(error).removesuffix(".")
                _log.warning("%s. Restarted in %g s.", text, delay_s, extra={"error": error})
                await asyncio.sleep(delay_s)
            try:
                place.handle = await self._spawn(place)
                for prepare in self.prepare:
                    await prepare(place)
            except Exception as failure:
                if is_first and (not self._is_on or not _may_go_away(failure)):
                    raise
                if place.handle is not None:
                    place.handle.kill()
                    await place.handle.exited  # until then its name is taken
                error = failure
            else:
                place.up.set()
                return

    def _give_up(self, place: Place, error: BaseException, *, is_first: bool) -> None:
        reason = f"{place.num_failures} failures in a row" if self._is_on else f"{self._setting} is off"
        place.is_given_up = True
        if is_first or not self._may_go_on or all(other.is_given_up for other in self.places):
            assert place.first_failure is not None
            advice = _CRASH_ADVICE if _is_crash(place.first_failure) else ""
            place.first_failure.add_note(f"It is not restarted: {reason}.{advice}")
            raise place.first_failure from None
        _log.warning(
            "%s The run continues without it (%s).", first_line(error), reason, extra={"error": error}
        )
        place.up.set()  # wake its waiters


def env_runner_supervisor(config: BaseConfig, spawn: Callable[[Place], Awaitable[Any]]) -> Supervisor:
    """Return the supervisor of a group of env runners."""
    return Supervisor(
        spawn,
        setting="restart_failed_env_runners",
        is_on=config.restart_failed_env_runners,
        may_go_on=config.ignore_env_runner_failures,
        least_s=config.env_step_timeout_s or ANSWER_S,
    )


def _may_go_away(error: BaseException) -> bool:
    """Return whether another attempt to start may succeed: the process died, but not because its envs hang."""
    status = error.exit_status if isinstance(error, ActorLostError) else None
    return isinstance(error, PeerLostError) and not (status and status.exit_code == EXIT_HANGS)


def _is_crash(error: BaseException) -> bool:
    status = error.exit_status if isinstance(error, ActorLostError) else None
    return status is not None and status.is_crash


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
