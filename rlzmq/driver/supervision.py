"""Supervisor: starts, restarts and attends the run's processes of any role.

| consumes                     | produces                  | waits for       | unblocked by                        |
|------------------------------|---------------------------|-----------------|-------------------------------------|
| a spawn                      | a handle, or the error    | the constructor | its end, SIGSTOP seen, the deadline |
| a process's end              | a new one, or the run's end | the back-off  | time                                |
| a rank's end, a lost collective | a new generation       | all living ranks | their `rejoin`, or their deaths  |
| a replacement that is ready  | a new generation          | the update's end | `admit`                            |

A process that is stopped or hangs is killed by the actor system (`rlzmq.actors.system`), or ends by itself if its
environments hang (`core.call_watch`), and so has simply ended here. Peers of a new broker reconnect, notice its
incarnation and send it what they hold, so no accepted data is lost (`rlzmq.protocol.broker.core`).

A runner's death, in order::

    its process ends (ActorHandle.exited); silent towards the broker alone: BrokerPipeline._watch kills it
    RunnerSupervisor._supervise    decides, waits for the back-off
    RunnerSupervisor._restart      starts a process at its place, with the next incarnation; calls `prepare`:
        AsyncEnvRunnerGroup._bring_up_to_date    custom calls and states that the others have
        BrokerPipeline._connect_runner           addresses and keys; the runner says HELLO
    broker: Registration.hello     gives back what the old one held; Grants.progress leases to the new one

The roles differ in their decisions: `RunnerSupervisor` restarts a runner at its place, `LearnerSupervisor` forms a
group of the survivors and lets replacements join it, `BrokerSupervisor` (of the broker's pipeline) restarts the broker
on the same addresses::

    a rank dies ──► survivors: rejoin, generation + 1, the newest state among them ──► training continues
            └────► a replacement starts in parallel ──► joins between two updates, generation + 1
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import EXIT_HANGS
from rlzmq.core.errors import ClosedError, DeadlineError, PeerLostError, first_error
from rlzmq.core.patience import RestartPolicy, Supervision

__all__ = [
    "LearnerSupervisor",
    "RunnerSupervisor",
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


_MAX_BAD_FRAGMENTS = 3
# A runner that never worked does not get the whole budget, since its machine or env is broken.
_MAX_FAILURES_BEFORE_ANY_WORK = 5


@dataclass(slots=True)
class _Place:
    """One runner of the group through all its incarnations."""

    index: int
    handle: Any
    machine: Supervision
    up: asyncio.Event = field(default_factory=asyncio.Event)
    has_worked: bool = False
    num_bad: int = 0
    is_given_up: bool = False
    first_failure: BaseException | None = None


class RunnerSupervisor(Supervisor):
    """Replaces runner processes after any kind of end.

    Args:
        config: Source of the fault-tolerance settings.
        spawn: ``await spawn(index, supervision)`` starts a runner and returns its handle.
        handles: An empty list, filled with the current runners by place.
        recreated: A list, extended by the 1-based index of each runner that was replaced.

    Attributes:
        prepare: ``await prepare(index, handle, incarnation)`` functions, awaited in order before a new runner is
            used, e.g. to load weights.
    """

    def __init__(
        self,
        config: BaseConfig,
        spawn: Callable[[int, Supervision], Awaitable[Any]],
        handles: list[Any],
        recreated: list[int] | None = None,
        *,
        what: str = "",
    ) -> None:
        super().__init__()
        self._config = config
        self._spawn = spawn
        self._handles = handles
        self._recreated = [] if recreated is None else recreated
        self._what = what or "env runner"
        self._policy = RestartPolicy(
            max_restarts=config.num_consecutive_env_runner_failures_tolerance,
            window_s=math.inf,
            first_delay_s=max(config.delay_between_env_runner_restarts_s, 1e-3),
        )
        self._places: list[_Place] = []
        self.prepare: list[Callable[[int, Any, int], Awaitable[None]]] = []

    async def start(self, num_runners: int) -> None:
        """Start all runners concurrently, and supervise them from then on.

        Raises:
            PeerLostError: One of them died in each of several attempts.
            DeadlineError: One of them did not start in time.
            Exception: A constructor raised an error.
        """
        self._places = places = await all_started(map(self._start_first, range(num_runners)))
        self._handles[:] = [place.handle for place in places]
        self.num_restarts: int = sum(place.machine.incarnation for place in places)
        for place in places:
            self._start(self._supervise(place), f"supervise {place.handle}")

    async def _start_first(self, index: int) -> _Place:
        config = self._config
        machine = Supervision(self._policy, float(config.env_step_timeout_s or 0.0))
        handle = await start_first(
            lambda: self._spawn(index, machine),
            machine,
            f"{self._what} {index}",
            is_replaced=config.restart_failed_env_runners and config.max_num_env_runner_restarts > 0,
        )
        machine.started(time.monotonic())
        place = _Place(index, handle, machine)
        place.up.set()
        return place

    async def prepare_all(self, prepare: Callable[[int, Any, int], Awaitable[None]]) -> None:
        """Prepare the existing runners, and from then on each new one.

        Raises:
            Exception: `prepare` raised an error for another reason than the end of a runner, whose replacement is
                prepared, too.
        """
        self.prepare.append(prepare)
        await asyncio.gather(*(self._prepare(place, prepare) for place in self._places))

    async def _prepare(self, place: _Place, prepare: Callable[[int, Any, int], Awaitable[None]]) -> None:
        handle = place.handle
        if place.up.is_set() and not place.is_given_up:
            try:
                await prepare(place.index, handle, place.machine.incarnation)
            except ActorLostError:
                await handle.exited
                if place.handle is handle:
                    place.up.clear()  # the supervising task may not have run yet
        await self.wait_for(place.up)

    # -- facts ----------------------------------------------------------------------------------

    @property
    def num_healthy(self) -> int:
        """Number of runners that are up."""
        return sum(place.up.is_set() and not place.is_given_up for place in self._places)

    def incarnation(self, index: int) -> int:
        """Return the number of restarts of this place."""
        return self._places[index].machine.incarnation

    # -- use ------------------------------------------------------------------------------------

    async def call(self, index: int, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Await ``call(handle)`` for a place. Repeat it on the replacement if the runner dies during the call.

        Returns:
            The result; None if the place was given up (``ignore_env_runner_failures``).

        Raises:
            Exception: The call raised an error, or the place may not be replaced.
        """
        place = self._places[index]
        while True:
            await self.wait_for(place.up)
            if place.is_given_up:
                return None
            handle = place.handle
            try:
                result = await call(handle)
            except ActorLostError:
                await handle.exited
                if place.handle is handle:
                    place.up.clear()  # its supervising task may not have run yet
                continue
            self.note_work(index)
            return result

    def note_work(self, index: int) -> None:
        """Reset the failure count, after the runner has delivered useful work."""
        place = self._places[index]
        if place.up.is_set() and not place.is_given_up:
            place.machine.note_work()
            place.has_worked = True

    def blame(self, index: int, why: str) -> None:
        """Count an unusable fragment of this runner. After several, restart it with new envs."""
        place = self._places[index]
        if place.handle.is_ending:
            return  # it is already being replaced
        place.num_bad += 1
        if place.num_bad >= _MAX_BAD_FRAGMENTS:
            place.handle.kill(f"was restarted after {place.num_bad} unusable fragments, the last one: {why}")

    # -- the loop of one place ------------------------------------------------------------------

    async def _supervise(self, place: _Place) -> None:
        while True:
            await place.handle.exited
            place.up.clear()
            error = lost_error(place.handle)
            if not await restarted(
                functools.partial(self._restart, place), functools.partial(self._decide, place), error
            ):
                return

    def _decide(self, place: _Place, error: BaseException) -> float | None:
        """Return the number of seconds until the restart; None: no restart."""
        config = self._config
        place.first_failure = place.first_failure or error
        machine = place.machine
        delay_s = machine.failed(time.monotonic())
        reason = ""
        if not config.restart_failed_env_runners:
            reason = "restart_failed_env_runners is off"
        elif delay_s is None:
            reason = f"{machine.num_failures} failures in a row"
        elif not place.has_worked and machine.incarnation > _MAX_FAILURES_BEFORE_ANY_WORK:
            reason = f"{machine.incarnation} failures and no work done"
        elif self.num_restarts >= config.max_num_env_runner_restarts:
            reason = f"max_num_env_runner_restarts={config.max_num_env_runner_restarts} is spent"
        if not reason:
            return delay_s
        others = [other for other in self._places if other is not place and not other.is_given_up]
        if config.ignore_env_runner_failures and others:
            text = "%s The run continues without it (%s)."
            _log.warning(text, first_line(error), reason, extra={"error": error})
            place.is_given_up = True
            place.up.set()  # wake its waiters, since the place is given up
            return None
        first = place.first_failure
        first.add_note(f"{self._what} {place.index} is not restarted: {reason}.")
        self.fail(first)
        return None

    async def _restart(self, place: _Place) -> bool:
        self.num_restarts += 1
        place.num_bad = 0
        restore_s = self._config.env_runner_restore_timeout_s
        incarnation = place.machine.incarnation
        try:
            async with asyncio.timeout(restore_s or None) as scope:
                handle = await self._spawn(place.index, place.machine)
                try:
                    for prepare in self.prepare:
                        await prepare(place.index, handle, incarnation)
                except BaseException:
                    handle.kill()
                    await handle.exited  # until then its name is taken
                    raise
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineError(
                f"{self._what} {place.index} was not ready again within {restore_s:g} s "
                "(env_runner_restore_timeout_s)."
            ) from error
        place.handle = self._handles[place.index] = handle
        place.machine.started(time.monotonic())
        self._recreated.append(place.index + 1)
        place.up.set()
        return True


# Number of consecutive failures, without an update in between, after which a rank is no longer replaced.
_LEARNER_POLICY = RestartPolicy(max_restarts=5, window_s=math.inf)
# Number of consecutive failed attempts to form a group of ranks that are all alive.
_MAX_FAILED_FORMINGS = 5
# Reasons for the end of a rank's connection because the run or its broker ends.
_ORDERLY = frozenset({"closed", "goodbye", "left"})


class LearnerSupervisor(Supervisor):
    """Supervises the ranks of a learner group and re-forms the group after losses.

    Args:
        config: Source of the fault-tolerance settings.
        handles: An empty list, filled with the ranks of the current generation in rank order.
        spawn: ``await spawn(place, supervision)`` starts a learner outside of any group, and returns its handle.
        form: ``await form(handles, registers)`` forms the next generation of these ranks.

    Attributes:
        prepare: ``await prepare(handle)``, called before a rank joins a group, e.g. to connect it; None: no
            preparation.
        is_untouched: Whether nothing has been trained or loaded yet, so that a replacement has the others' weights.
        last_resort: The learner state to restore if no rank is left, e.g. from the last checkpoint; or None.
        begin_lineage: ``await begin_lineage(handles)``, called after a restoration: all peers discard work in
            progress. Returns False if a rank died in the meantime.
        num_restarts: Number of replacements that joined.
        num_rollbacks: Number of times that all ranks were rolled back to `last_resort`.
        num_reforms: Number of times that survivors were re-formed.
    """

    def __init__(
        self,
        config: BaseConfig,
        handles: list[Any],
        spawn: Callable[[int, Supervision], Awaitable[Any]],
        form: Callable[[list[Any], bool], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._config = config
        self._handles = handles
        self._spawn = spawn
        self._form = form
        self._machines: list[Supervision] = []
        self._lock = asyncio.Lock()
        self._is_lost = asyncio.Event()
        self._formed = asyncio.Event()
        self._formed.set()
        self._ready: list[Any] = []
        self._num_replacing = 0
        self._prepared: set[Any] = set()
        self._watches_training = False
        self.prepare: Callable[[Any], Awaitable[None]] | None = None
        self.is_untouched: bool = True
        self.num_reforms: int = 0
        self.num_rollbacks: int = 0
        self.last_resort: Any = None
        self.begin_lineage: Callable[[list[Any]], Awaitable[bool]] | None = None

    # -- use ------------------------------------------------------------------------------------

    async def begin(self, num_ranks: int) -> None:
        """Start all ranks and form the first generation. Ranks that die in the meantime are replaced.

        Raises:
            PeerLostError: Too many ranks died, or they cannot reach each other.
            DeadlineError: A rank did not start in time.
            Exception: An error raised by the user's code in one of them.
        """
        self._machines = [Supervision(_LEARNER_POLICY) for _ in range(num_ranks)]
        self._handles[:] = await all_started(map(self._start_first, range(num_ranks)))
        self.num_restarts: int = sum(machine.incarnation for machine in self._machines)
        for handle in self._handles:
            self._watch(handle)
        self._start(self._run(), "supervise learners")
        if num_ranks == 1:
            return
        async with self._lock:
            await self._reform()
        while len(self._handles) < len(self._machines) and (self._ready or self._num_replacing):
            await self._wait_for_replacement()
            await self.admit()

    async def _start_first(self, place: int) -> object:
        return await start_first(
            lambda: self._spawn(place, self._machines[place]),
            self._machines[place],
            f"learner-{place}",
            is_replaced=self._config.restart_failed_learners,
        )

    def watch_failures(self) -> None:
        """Also watch for ranks whose training fails, once they are connected."""
        self._watches_training = True
        for handle in self._handles:
            self._start(self._watch_training(handle), f"failures of {handle.name}")

    async def admit(self) -> None:
        """Let ready replacements join, between two updates. Return at once if there are none."""
        if self._ready:
            async with self._lock:
                await self._reform()

    async def wait_formed(self) -> None:
        """Wait until the group is formed.

        Raises:
            Exception: The group cannot be formed any more.
        """
        await self.wait_for(self._formed)

    async def call(self, call: Callable[[list[Any]], Awaitable[Any]]) -> Any:
        """Await ``call(handles)`` with the ranks of a formed group. Repeat it if a rank dies in the meantime.

        Raises:
            Exception: The call raised an error, or the group cannot be formed any more.
        """
        while True:
            await self.wait_formed()
            handles = list(self._handles)
            try:
                return await call(handles)
            except PeerLostError:
                self.notice()  # the watchers may notice later than the caller

    @contextlib.asynccontextmanager
    async def steady(self) -> AsyncIterator[list[Any]]:
        """Block joins and new generations in the block; yield the ranks of the group."""
        while True:
            await self.wait_formed()
            async with self._lock:
                if self._formed.is_set():
                    yield list(self._handles)
                    return

    async def prepare_all(self, handles: list[Any]) -> None:
        """Call `prepare` for those of these ranks that were not prepared yet.

        Raises:
            PeerLostError: One of them died.
        """
        if self.prepare is None:
            return
        for handle in [handle for handle in handles if handle not in self._prepared]:
            await self.prepare(handle)
            self._prepared.add(handle)

    def note_work(self) -> None:
        """Reset the failure counts, after an update was committed."""
        self.is_untouched = False
        for handle in self._handles:
            self._machines[_place(handle)].note_work()

    def has_only_weights(self, name: str) -> bool:
        """Return whether this rank, by name, is the last of the group, so that nobody else has its weights."""
        others = (handle for handle in self._handles if handle.name != name)
        return any(handle.name == name for handle in self._handles) and all(
            other.is_ending for other in others
        )

    def waits(self) -> list[str]:
        """Return descriptions of what the group waits for; [] if it is formed."""
        if self._formed.is_set():
            return []
        names = ", ".join(handle.name for handle in self._handles) or "nobody"
        return [
            f"waits for the learner group to be formed of {names}; {self._num_replacing} are being replaced"
        ]

    async def stop(self) -> None:
        """Stop the supervision, and end replacements that have not joined."""
        await super().stop()
        await asyncio.gather(*(handle.stop() for handle in self._ready), return_exceptions=True)

    # -- noticing -------------------------------------------------------------------------------

    def _watch(self, handle: ActorHandle) -> None:
        self._start(self._watch_end(handle), f"end of {handle.name}")

    async def _watch_end(self, handle: ActorHandle) -> None:
        await handle.exited
        self.notice()

    async def _watch_training(self, handle: ActorHandle) -> None:
        while handle in self._handles:
            try:
                reason = await handle.call("run_until_failure")
            except ActorLostError:
                return
            except PeerLostError as error:
                _log.info("%s: %s", handle.name, error)
                self.notice()
                await self._formed.wait()
            except Exception as error:
                self.fail(error)
                return
            else:
                _log.warning("%s: the connection to the broker has ended: %s", handle.name, reason)
                if reason[0] not in _ORDERLY:  # it no longer trains, so replace it
                    handle.kill()
                return

    def notice(self) -> None:
        """Re-form the group after a rank or a collective was lost."""
        self._formed.clear()
        self._is_lost.set()

    # -- forming --------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._is_lost.wait()
                async with self._lock:
                    if self._is_lost.is_set():
                        await self._reform()
                        self.num_reforms += 1
        except Exception as error:
            self.fail(error)

    async def _reform(self) -> None:
        """Form generations until one succeeds; each includes all ranks that are alive and ready."""
        went_back = False
        num_failed = 0
        while True:
            self._formed.clear()
            self._is_lost.clear()
            for handle in [handle for handle in self._handles if handle.exited.done()]:
                self._handles.remove(handle)
                self._bury(handle)
                num_failed = 0
            if not self._handles and self._may_start_over():
                await self._start_over()
                went_back = True
            self._check_enough(len(self._handles) + (len(self._ready) if went_back else 0))
            ready = self._take_ready()
            members = [*self._handles, *ready]
            if not members:
                continue  # the only replacement has died in the meantime
            try:
                await self.prepare_all(members)
                # Ranks that received another state train nothing before the broker knows the new lineage.
                await self._form(members, not (went_back and self.begin_lineage is not None))
            except PeerLostError as error:
                _log.warning("The learner group could not be formed (%s); trying again.", error)
                self._ready.extend(ready)
                if not any(handle.exited.done() for handle in members):
                    num_failed += 1
                    self._check_attempts(num_failed, error)
                continue
            for handle in ready:
                self._handles.append(handle)
                self._watch(handle)
                if self._watches_training:
                    self._start(self._watch_training(handle), f"failures of {handle.name}")
                self.num_restarts += 1
            if went_back and self.begin_lineage is not None and not await self.begin_lineage(members):
                continue
            went_back = False
            if not self._is_lost.is_set():
                self._formed.set()
                return

    def _take_ready(self) -> list[Any]:
        """Return the living replacements. Those that died are replaced in turn."""
        ready, self._ready[:] = list(self._ready), []
        for handle in [handle for handle in ready if handle.exited.done()]:
            ready.remove(handle)
            self._bury(handle)
        return ready

    def _check_attempts(self, num_failed: int, error: PeerLostError) -> None:
        if num_failed >= _MAX_FAILED_FORMINGS:
            raise PeerLostError(
                f"The learners are alive but cannot form a group: {num_failed} attempts in a row failed, the last "
                f"with: {error} Check that they reach each other (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name "
                "the network interface; a firewall between them?). A checkpoint can be restored in a new run."
            ) from error

    def _may_start_over(self) -> bool:
        return self._config.restart_failed_learners and (self.last_resort is not None or self.is_untouched)

    async def _start_over(self) -> None:
        """Load `last_resort` on replacements, since no rank is left. Skip it if there is nothing to lose yet."""
        if not self._ready and not self.is_untouched:
            _log.warning("All learners have died: restoring the driver's last copy of their state.")
            self.num_rollbacks += 1
        await self._wait_for_replacement()
        if self.last_resort is not None:
            for handle in self._ready:
                with contextlib.suppress(PeerLostError):
                    await handle.set_state(self.last_resort)

    async def _wait_for_replacement(self) -> None:
        while not self._ready and self._num_replacing:  # noqa: ASYNC110 (two facts, seldom)
            await asyncio.sleep(0.02)

    def _check_enough(self, num: int) -> None:
        if self.failed.done():
            self.failed.result()
        if num == 0:
            raise PeerLostError(
                "All learners have died, and with them the weights of the updates since the last checkpoint. "
                "Restore one with restore_from_path(), or from_checkpoint() in a new run."
            )
        if num < self._config.min_learners:
            raise PeerLostError(
                f"{num} learners are left, fewer than min_learners={self._config.min_learners}."
            )

    def _bury(self, handle: ActorHandle) -> None:
        """Start the replacement of a rank that has ended, if it should be replaced."""
        error = lost_error(handle)
        if not self._config.restart_failed_learners:
            _log.warning("%s", first_line(error), extra={"error": error})
            return
        self._num_replacing += 1
        self._start(self._replace(_place(handle), error), f"replace {handle.name}")

    async def _replace(self, place: int, error: BaseException) -> None:
        machine = self._machines[place]

        def decide(error: BaseException) -> float | None:
            delay_s = machine.failed(time.monotonic())
            if delay_s is None:
                _log.error("%s", first_line(error), extra={"error": error})
                _log.error("learner-%d died %d times in a row: not replaced.", place, machine.num_failures)
            return delay_s

        try:
            started = await restarted(lambda: self._spawn(place, machine), decide, error)
            if started is not None:
                self._ready.append(started)
        finally:
            self._num_replacing -= 1


def _place(handle: ActorHandle) -> int:
    return int(handle.name.rpartition("-")[2])
