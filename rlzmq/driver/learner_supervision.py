"""Keeps a learner group training: survivors of a dead rank come together anew, its replacement joins later.

    a rank dies ──► survivors: rejoin, generation + 1, the newest state among them ──► they train on
            └────► a replacement starts meanwhile ──► joins between two updates, generation + 1

| consumes                             | produces              | waits for         | unblocked by          |
|--------------------------------------|-----------------------|-------------------|-----------------------|
| a process's end, a lost collective   | a new generation      | all living ranks  | their `rejoin`, or their deaths |
| the broker's "hung", "silent", "lost" | SIGKILL of a hanging rank | its answer    | its deadline         |
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

from rlzmq.actors.exit_status import ActorLostError
from rlzmq.actors.process_state import is_stopped
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ClosedError, PeerLostError
from rlzmq.driver.process_health import ANSWER_DEADLINE_S, first_line, lost_error, wake, why_hanging
from rlzmq.driver.starting import BEAT_DEADLINE_S, all_started, attended, start_first
from rlzmq.protocol.supervision import GiveUp, Patience, RestartPolicy, Supervision
from rlzmq.roles.learner.formation import connecting_timeout_s

__all__ = ["LearnerSupervisor"]

_log = logging.getLogger("rlzmq.driver")

# Failures in a row, without an update between them, before a rank is not replaced any more.
_POLICY = RestartPolicy(max_restarts=5, window_s=math.inf, first_delay_s=0.1, max_delay_s=30.0)
# After a peer was lost every rank's collective has failed, and so has an attempt to connect that was called off:
# whoever does not answer by then hangs.
_ANSWER_SPARE_S = 1.0
# After so long without an answer to a call, and again, the ranks' processes are looked at.
_LOOK_S = 2.0
# How often in a row ranks that all live may fail to come together.
_MAX_FAILED_FORMINGS = 5
# A rank's connection ended because this run, or its broker, ends.
_ORDERLY = frozenset({"closed", "goodbye", "left"})


class LearnerSupervisor:
    """Watches the ranks of one learner group and forms the group anew when it must be.

    Args:
        config: Whose fault-tolerance settings count.
        handles: An empty list, for the ranks in rank order; it always holds those of the current generation.
        spawn: ``await spawn(place, incarnation)`` starts a learner that is in no group yet; its handle.
        form: ``await form(handles)`` brings these ranks together as the next generation.

    Attributes:
        prepare: ``await prepare(handle)`` before a rank is in a group, e.g. to connect it; None: nothing to do.
        on_group: Called with the ranks of a group that stands, and with [] while it is formed anew.
        is_untouched: Nothing was trained or loaded yet: a replacement has the weights of any other rank.
        last_resort: The learner state to go back to where no rank is left, e.g. of the last checkpoint; or None.
        begin_lineage: ``await begin_lineage(handles)`` after going back to it: everybody forgets what was under
            way; False if a rank died meanwhile.
        failed: Has an exception once the group cannot go on.
        num_restarts: Replacements that joined.
        num_rollbacks: How often all went back to `last_resort`.
        num_reforms: How often survivors came together anew.
        recovery_times_s: Per reform, from the notice of the loss to the new generation.
    """

    def __init__(
        self,
        config: BaseConfig,
        handles: list[Any],
        spawn: Callable[[int, int], Awaitable[Any]],
        form: Callable[[list[Any]], Awaitable[None]],
    ) -> None:
        self._config = config
        self._handles = handles
        self._spawn = spawn
        self._form = form
        self._machines: list[Supervision] = []
        self._patience = Patience()
        self._lock = asyncio.Lock()
        self._is_lost = asyncio.Event()
        self._formed = asyncio.Event()
        self._formed.set()
        self._ready: list[Any] = []
        self._num_replacing = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._prepared: set[Any] = set()
        self._ending: set[Any] = set()
        self._watches_training = False
        self.prepare: Callable[[Any], Awaitable[None]] | None = None
        self.on_group: Callable[[list[Any]], None] = lambda handles: None
        self.is_untouched = True
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_restarts = 0
        self.num_reforms = 0
        self.num_rollbacks = 0
        self.last_resort: Any = None
        self.begin_lineage: Callable[[list[Any]], Awaitable[bool]] | None = None
        self.recovery_times_s: list[float] = []

    # -- use ------------------------------------------------------------------------------------

    async def begin(self, num_ranks: int) -> None:
        """Start all ranks and form the first generation; who dies meanwhile is replaced.

        Raises:
            PeerLostError: Too many died, or they cannot reach each other.
            DeadlineError: One of them did not get ready.
            Exception: What the user's code raised in one of them.
        """
        self._machines = [Supervision(_POLICY) for _ in range(num_ranks)]
        self._handles[:] = await all_started(map(self._start_first, range(num_ranks)))
        self.num_restarts = sum(machine.num_restarts for machine in self._machines)
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

    async def _start_first(self, place: int) -> Any:
        return await start_first(
            lambda incarnation: self._spawn(place, incarnation),
            self._machines[place],
            f"learner-{place}",
            is_replaced=self._config.restart_failed_learners,
        )

    def watch_failures(self) -> None:
        """From now on (they are connected) also hear of ranks whose training fails."""
        self._watches_training = True
        for handle in self._handles:
            self._start(self._watch_training(handle), f"failures of {handle.name}")

    async def admit(self) -> None:
        """Between two updates: replacements that are ready join. Returns at once where there are none."""
        if self._ready:
            async with self._lock:
                await self._reform()

    async def wait_formed(self) -> None:
        """Wait until the group stands.

        Raises:
            Exception: It cannot be formed any more.
        """
        waiting = asyncio.ensure_future(self._formed.wait())
        try:
            await asyncio.wait((waiting, self.failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not self._formed.is_set():
            self.failed.result()

    async def call(self, call: Callable[[list[Any]], Awaitable[Any]]) -> Any:
        """``call(handles)`` with the ranks of a group that stands; again if a rank dies meanwhile.

        Raises:
            Exception: What the call raised, or why the group cannot be formed any more.
        """
        while True:
            await self.wait_formed()
            handles = list(self._handles)
            try:
                return await self.attended(handles, call(handles))
            except PeerLostError:
                self.notice()  # the watchers may hear of it later than the caller

    async def attended(self, handles: list[Any], work: Awaitable[Any]) -> Any:
        """Await what these ranks are to answer; who is stopped, or whose event loop does not turn, is ended.

        Raises:
            Exception: What the call raised.
        """
        answer = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((answer,), timeout=_LOOK_S))[0]:
                beats = (
                    self.end_if_hanging(handle, "a call", deadline_s=BEAT_DEADLINE_S) for handle in handles
                )
                await asyncio.gather(*beats)
            return answer.result()
        finally:
            answer.cancel()

    @contextlib.asynccontextmanager
    async def steady(self) -> AsyncIterator[list[Any]]:
        """Within the block nobody joins and no generation is formed; the ranks of the group."""
        while True:
            await self.wait_formed()
            async with self._lock:
                if self._formed.is_set():
                    yield list(self._handles)
                    return

    async def prepare_all(self, handles: list[Any]) -> None:
        """Call `prepare` for whoever of these it was not called for.

        Raises:
            PeerLostError: One of them died.
        """
        if self.prepare is None:
            return
        for handle in [handle for handle in handles if handle not in self._prepared]:
            await self.attended([handle], self.prepare(handle))
            self._prepared.add(handle)

    def worked(self) -> None:
        """An update was committed: failures in a row are over."""
        self.is_untouched = False
        self._patience.worked()
        for handle in self._handles:
            self._machines[_place(handle)].worked()

    async def suspect(self, name: str, event: str, why: str) -> None:
        """The broker misses this rank: end it if it hangs or its process was stopped.

        Args:
            name: Of the rank.
            event: "hung": the other ranks wait for it; "silent": it was at work and does not answer; "lost":
                neither is known.
            why: In words.
        """
        for handle in [handle for handle in self._handles if handle.name == name]:
            if event == "silent":
                await self.end_if_hanging(handle, "its work", deadline_s=self._patience.seconds)
            elif event == "hung":
                await self.end_if_hanging(handle, f"an update: {why}", is_certain=True)
            elif is_stopped(handle.pid):
                await self.end_if_hanging(handle, f"its work ({why})")

    async def end_if_hanging(
        self,
        handle: Any,
        what: str,
        *,
        method: str = "beat",
        deadline_s: float = ANSWER_DEADLINE_S,
        is_certain: bool = False,
    ) -> bool:
        """Kill a rank that is stopped, or does not answer. The only one left has the only weights of now: it is
        continued where it was stopped, and gets more time.

        Args:
            handle: Of the rank.
            what: What it holds up, for the log.
            method, deadline_s: See `processes.why_hanging`.
            is_certain: It hangs, whatever it answers.

        Returns:
            Whether it hung, or has ended meanwhile.
        """
        why = "it takes too long" if is_certain else await why_hanging(handle, method, deadline_s)
        if why and not handle.exited.done() and not self._others(handle):
            if is_stopped(handle.pid):
                _log.warning(
                    "%s (pid %d) was stopped, and holds the only weights: it is continued.",
                    handle.name,
                    handle.pid,
                )
                await wake(handle)
                is_certain = False
            if not is_certain:
                why = await why_hanging(handle, method, self._config.learner_timeout_s)
        if not why or handle.exited.done():
            return bool(handle.exited.done())
        self._ending.add(handle)  # before anything is awaited: of two that hang one is spared
        _log.warning("%s (pid %d) hangs in %s: %s. It is killed.", handle.name, handle.pid, what, why)
        await handle.kill_hanging()
        self._patience.killed()
        return True

    def _others(self, handle: Any) -> list[Any]:
        """Ranks of the group beside this one that hold its weights, too."""
        return [
            other
            for other in self._handles
            if other is not handle and not other.exited.done() and other not in self._ending
        ]

    def waits(self) -> list[str]:
        """What the group waits for, in words; [] where it stands."""
        if self._formed.is_set():
            return []
        names = ", ".join(handle.name for handle in self._handles) or "nobody"
        return [
            f"waits for the learner group to be formed of {names}; {self._num_replacing} are being replaced"
        ]

    async def stop(self) -> None:
        """End the supervision; replacements that have not joined are ended, too."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(handle.stop() for handle in self._ready), return_exceptions=True)
        if not self.failed.done():
            self.failed.set_exception(ClosedError("the run was stopped"))
        self.failed.exception()  # seen

    # -- noticing -------------------------------------------------------------------------------

    def _start(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self, handle: Any) -> None:
        self._start(self._watch_end(handle), f"end of {handle.name}")

    async def _watch_end(self, handle: Any) -> None:
        await handle.exited
        self.notice()

    async def _watch_training(self, handle: Any) -> None:
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
                self._fail(error)
                return
            else:
                _log.warning("%s: the connection to the broker has ended: %s", handle.name, reason)
                if reason[0] not in _ORDERLY:  # it will not train any more: another takes its place
                    handle.kill()
                return

    def notice(self) -> None:
        """A rank was lost, or a collective of theirs: the group is formed anew."""
        self._formed.clear()
        self._is_lost.set()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # those who wait raise it; nobody needs to

    # -- forming --------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._is_lost.wait()
                async with self._lock:
                    if self._is_lost.is_set():
                        start = time.monotonic()
                        await self._reform()
                        self.num_reforms += 1
                        self.recovery_times_s.append(time.monotonic() - start)
        except Exception as error:
            self._fail(error)

    async def _reform(self) -> None:
        """One generation after the other until one stands; everybody who lives and is ready is in it."""
        went_back = False
        num_failed = 0
        while True:
            self._formed.clear()
            self._is_lost.clear()
            self.on_group([])
            await self._end_hanging()
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
            try:
                await self.prepare_all(members)
                await self._form(members)
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
                self.on_group(self._handles)
                self._formed.set()
                return

    def _take_ready(self) -> list[Any]:
        """Replacements that are alive; those that died are replaced in turn."""
        ready, self._ready[:] = list(self._ready), []
        for handle in [handle for handle in ready if handle.exited.done()]:
            ready.remove(handle)
            self._bury(handle)
        return ready

    def _check_attempts(self, num_failed: int, error: PeerLostError) -> None:
        if num_failed >= _MAX_FAILED_FORMINGS:
            raise PeerLostError(
                f"The learners live and do not come together: {num_failed} attempts in a row have failed, the last "
                f"one with: {error} Check that they reach each other (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name "
                "the network interface; a firewall between them?). A checkpoint can be restored in a new run."
            ) from error

    def _may_start_over(self) -> bool:
        return self._config.restart_failed_learners and (self.last_resort is not None or self.is_untouched)

    async def _start_over(self) -> None:
        """No rank is left: replacements take over `last_resort`, unless there was nothing to lose yet."""
        if not self._ready and not self.is_untouched:
            _log.warning("All learners have died: going back to the last state that the driver has.")
            self.num_rollbacks += 1
        await self._wait_for_replacement()
        if self.last_resort is not None:
            for handle in self._ready:
                with contextlib.suppress(PeerLostError):
                    await attended(handle, handle.set_state(self.last_resort))

    async def _wait_for_replacement(self) -> None:
        while not self._ready and self._num_replacing:  # noqa: ASYNC110 (two facts, seldom)
            await asyncio.sleep(0.02)

    async def _end_hanging(self) -> None:
        """Whoever does not answer although its collective has failed hangs: it is killed."""
        deadline_s = max(ANSWER_DEADLINE_S, connecting_timeout_s(self._config) + _ANSWER_SPARE_S)
        await asyncio.gather(
            *(
                self.end_if_hanging(handle, "an update", method="ping", deadline_s=deadline_s)
                for handle in self._handles
            )
        )

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

    def _bury(self, handle: Any) -> None:
        """A rank is gone: its replacement starts, if there is to be one."""
        _log.warning("%s", first_line(lost_error(handle)))
        if not self._config.restart_failed_learners:
            return
        self._num_replacing += 1
        self._start(self._replace(_place(handle)), f"replace {handle.name}")

    async def _replace(self, place: int) -> None:
        try:
            await self._start_replacement(place)
        finally:
            self._num_replacing -= 1

    async def _start_replacement(self, place: int) -> None:
        machine = self._machines[place]
        while True:
            decision = machine.failed(time.monotonic())
            if isinstance(decision, GiveUp):
                _log.error("learner-%d died %d times in a row: not replaced.", place, decision.num_failures)
                return
            await asyncio.sleep(decision.delay_s)
            try:
                self._ready.append(await self._spawn(place, decision.incarnation))
            except Exception as failure:
                _log.warning("learner-%d could not be replaced: %r", place, failure)
                continue
            return


def _place(handle: Any) -> int:
    return int(handle.name.rpartition("-")[2])
