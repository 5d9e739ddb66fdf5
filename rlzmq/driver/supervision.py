"""Supervisor: starts, restarts and attends the run's processes of any role.

| consumes                     | produces                  | waits for       | unblocked by                        |
|------------------------------|---------------------------|-----------------|-------------------------------------|
| a spawn                      | a handle, or the error    | the constructor | its end, SIGSTOP seen, the deadline |
| a process's end              | a new one, or the run's end | the back-off  | time                                |

Who is stopped or hangs is killed by the actor system (`rlzmq.actors.system`), or ends by itself if its environments
hang (`core.call_watch`), and so has simply ended here. Peers of a new broker reconnect, notice its incarnation and
send it what they hold, so no accepted data is lost (`rlzmq.protocol.broker.core`).

The roles differ in their decisions: `RunnerSupervisor` restarts a runner at its place, `LearnerSupervisor` forms a
group of the survivors and lets replacements join it, `BrokerSupervisor` restarts the broker on the same addresses.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.actors.system import ActorSystem
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import EXIT_HANGS
from rlzmq.core.errors import ClosedError, DeadlineError, PeerLostError, first_error
from rlzmq.core.patience import RestartPolicy, Supervision
from rlzmq.driver.join_files import JoinKeys, at_host, keys_file, listen_addresses, write_join_files
from rlzmq.roles.broker_role import BrokerRole

__all__ = [
    "BrokerSupervisor",
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


_BROKER_POLICY = RestartPolicy(max_restarts=5, window_s=60.0)


class BrokerSupervisor(Supervisor):
    """Starts and restarts the broker's process.

    Args:
        system: The ActorSystem; the sockets are in its private directory.
        run_id: Id of the run.
        config: Source of the fault-tolerance settings.
        keys: Keys for external peers; None: no such peers.
        control_address: Address for external learners; None: no such learners.

    Attributes:
        addresses: ``{"data": …, "weights": …}``, the same for every incarnation.
        remote_addresses: Addresses for external peers, once the broker listens for them; {} before.
        join_files: Role → the join file; {} if no peer may join.
    """

    def __init__(
        self,
        system: ActorSystem,
        run_id: str,
        config: BaseConfig,
        keys: JoinKeys | None = None,
        control_address: str | None = None,
    ) -> None:
        super().__init__()
        self._system = system
        self._run_id = run_id
        self._config = config
        self._machine = Supervision(_BROKER_POLICY)
        self._handle: Any = None
        self._incarnation = 0
        directory = system.run_directory
        self.addresses: dict[str, Any] = {name: directory.address(name) for name in ("data", "weights")}
        self._keys = keys
        self._control_address = control_address
        self._listen: dict[str, str] | None = None
        if keys is not None and config.listen is not None:
            wanted = listen_addresses(config.listen)
            self._listen = {name: keys.former(name, address) for name, address in wanted.items()}
        self.remote_addresses: dict[str, str] = {}
        self.join_files: dict[str, Path] = {}

    @property
    def handle(self) -> Any:
        """The broker's actor handle."""
        return self._handle

    async def start(self) -> None:
        """Start the broker and its supervision.

        Raises:
            ConfigurationError: `config.listen` is not available, or the join file cannot be written.
        """
        await start_first(
            self._spawn,
            self._machine,
            "the broker",
            is_replaced=self._config.restart_failed_broker,
        )
        self.num_restarts: int = self._machine.incarnation
        if self._keys is not None:
            self._write_join_files(self._keys)
        self._start(self._supervise(), "supervise the broker")

    def note_work(self) -> None:
        """Reset the failure count, after an update was committed."""
        self._machine.note_work()

    async def stop(self) -> None:
        """Stop the supervision, then the broker."""
        await super().stop()
        if self._handle is not None:
            await asyncio.gather(self._handle.stop(), return_exceptions=True)
        if self._config.join_file is not None:
            keys_file(self._config.join_file).unlink(missing_ok=True)
        for file in self.join_files.values():
            file.unlink(missing_ok=True)  # the keys in it are now useless

    def _write_join_files(self, keys: JoinKeys) -> None:
        config = self._config
        path = config.join_file or self._system.run_directory.path / "join.toml"
        addresses = {
            name: at_host(address, config.advertise) for name, address in self.remote_addresses.items()
        }
        if self._control_address is not None:
            addresses["control"] = self._control_address
        self.join_files = write_join_files(
            keys, path, addresses, self._run_id, keeps=config.join_file is not None
        )
        print(f"env runners may join:  rlzmq runner --join {self.join_files['runner']}", file=sys.stderr)
        if self._control_address is not None:
            print(
                f"waiting for learners:  rlzmq learner --join {self.join_files['learner']}", file=sys.stderr
            )

    async def _spawn(self) -> None:
        # Peers order brokers by this number, so it must rise even if the wall clock is set back.
        self._incarnation = max(self._incarnation + 1, int(time.time() * 1000))
        timeout_s = self._config.process_start_timeout_s
        spawn = self._system.spawn(
            BrokerRole,
            self._run_id,
            {},
            addresses=self.addresses,
            incarnation=self._incarnation,
            quarantine_dir=self._config.quarantine_dir,
            listen=self._listen,
            curve=self._keys.curve if self._keys is not None else None,
            roles=self._keys.roles if self._keys is not None else None,
            trace_path=self._config.trace,
            memory_limit_bytes=self._config.broker_memory_limit_bytes,
            name="broker",
            deadline_s=timeout_s,
            patience=self._machine.patience,
        )
        handle = await spawn_within(timeout_s, "process_start_timeout_s", spawn)
        try:
            addresses = await handle.start()
            if self._listen is not None:  # later brokers use the ports of this one
                self._listen = {name: addresses[f"remote_{name}"] for name in ("data", "weights")}
                self.remote_addresses = self._listen
        except BaseException:
            handle.kill()
            await handle.exited  # until then its name and its addresses are taken
            raise
        self._handle = handle
        self._machine.started(time.monotonic())

    async def _supervise(self) -> None:
        while not self.failed.done():
            await restarted(self._restart, self._decide, await self._failure(self._handle))

    async def _failure(self, handle: ActorHandle) -> BaseException:
        """Wait for the broker's end, or for an internal error of it, which ends it."""
        try:
            await handle.call("run_until_failure")
        except ActorLostError:
            await handle.exited
            return lost_error(handle)
        except Exception as error:
            handle.kill()
            await handle.exited
            return error
        await handle.exited
        return lost_error(handle)

    def _decide(self, error: BaseException) -> float | None:
        delay_s = self._machine.failed(time.monotonic())
        if not self._config.restart_failed_broker or delay_s is None:
            self.fail(error)
            return None
        return delay_s

    async def _restart(self) -> None:
        await self._spawn()
        self.num_restarts += 1


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
