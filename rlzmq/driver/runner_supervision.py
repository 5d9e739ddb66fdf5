"""RunnerSupervisor: replaces runner processes that end, with back-off and within the restart budget.

| consumes                    | produces                 | waits for          | unblocked by            |
|-----------------------------|--------------------------|--------------------|-------------------------|
| a process's end (pidfd)     | a new one, one incarnation later | the back-off | time                 |

A runner whose environments hang ends by itself (`roles.hang_watch`); one that is stopped, or whose event loop is
blocked, is killed by the actor system (`actors.system`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rlzmq.actors.process_state import ActorLostError
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import DeadlineError
from rlzmq.core.patience import RestartPolicy, Supervision
from rlzmq.driver.supervision import (
    Supervisor,
    all_started,
    first_line,
    lost_error,
    restarted,
    start_first,
)

__all__ = ["RunnerSupervisor"]

_log = logging.getLogger("rlzmq.driver")

_MAX_DELAY_S = 30.0
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

    Attributes:
        prepare: ``await prepare(index, handle, incarnation)`` functions, awaited in order before a new runner is
            used, e.g. to load weights.
        recreated: Indices of the places replaced since the last `take_recreated`.
        downtimes_s: For each replacement, seconds from noticing the death to the new runner's readiness.
    """

    def __init__(
        self,
        config: BaseConfig,
        spawn: Callable[[int, Supervision], Awaitable[Any]],
        handles: list[Any],
        *,
        what: str = "",
    ) -> None:
        super().__init__()
        self._config = config
        self._spawn = spawn
        self._handles = handles
        self._what = what or "env runner"
        self._policy = RestartPolicy(
            max_restarts=config.num_consecutive_env_runner_failures_tolerance,
            window_s=math.inf,
            first_delay_s=max(config.delay_between_env_runner_restarts_s, 1e-3),
            max_delay_s=max(_MAX_DELAY_S, config.delay_between_env_runner_restarts_s),
        )
        self._places: list[_Place] = []
        self.prepare: list[Callable[[int, Any, int], Awaitable[None]]] = []
        self.recreated: list[int] = []
        self.downtimes_s: list[float] = []

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

    def take_recreated(self) -> list[int]:
        """Return the places replaced since the last call."""
        taken, self.recreated = self.recreated, []
        return taken

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
            noticed_at = time.monotonic()
            place.up.clear()
            error = lost_error(place.handle)
            if not await restarted(
                functools.partial(self._restart, place), functools.partial(self._decide, place), error
            ):
                return
            self.downtimes_s.append(time.monotonic() - noticed_at)

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
        self.recreated.append(place.index)
        place.up.set()
        return True
