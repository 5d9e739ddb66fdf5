"""LearnerSupervisor: re-forms the group of the survivors of a dead rank; its replacement joins later.

    a rank dies ──► survivors: rejoin, generation + 1, the newest state among them ──► training continues
            └────► a replacement starts in parallel ──► joins between two updates, generation + 1

| consumes                             | produces              | waits for         | unblocked by          |
|--------------------------------------|-----------------------|-------------------|-----------------------|
| a process's end, a lost collective   | a new generation      | all living ranks  | their `rejoin`, or their deaths |
| a replacement that is ready          | a new generation      | the update's end  | `admit`               |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import PeerLostError
from rlzmq.core.patience import RestartPolicy, Supervision
from rlzmq.driver.supervision import (
    Supervisor,
    all_started,
    first_line,
    lost_error,
    restarted,
    start_first,
)

__all__ = ["LearnerSupervisor"]

_log = logging.getLogger("rlzmq.driver")

# Number of consecutive failures, without an update in between, after which a rank is no longer replaced.
_POLICY = RestartPolicy(max_restarts=5, window_s=math.inf)
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
        self._machines = [Supervision(_POLICY) for _ in range(num_ranks)]
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
