"""Formation of the learner group: its ranks, from the death of one to the next generation.

    a rank dies ──► survivors: rejoin, generation + 1, the newest state among them ──► training continues
            └────► a replacement starts in parallel ──► joins between two updates, generation + 1

    driver ──rejoin──► every rank ──► rendezvous in the store ──► connect ──► adopt the newest state ──► done
       └── a rank died, hangs or failed: the attempt is cancelled, and repeated without it

| consumes                        | produces         | waits for        | unblocked by                            |
|---------------------------------|------------------|------------------|-----------------------------------------|
| a rank's end, a lost collective | a new generation | all living ranks | their `rejoin`, a death, or the deadline |
| a replacement that is ready     | a new generation | the update's end | `admit`                                 |

The processes are a `Supervisor`'s. The store of the rendezvous is a file, or the driver's TCP store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.driver.supervision import Place, RunTasks, Supervisor

__all__ = ["LEARNER_ROLE", "LearnerFormation", "StoreServer", "form_group"]

_log = logging.getLogger("rlzmq.driver")

# Name of the actor class of a rank: only the rank imports it, since it imports torch.
LEARNER_ROLE = "rlzmq.roles.learner_role:LearnerRole"

# Number of consecutive failed attempts to form a group of ranks that are all alive.
_MAX_FAILED_FORMINGS = 5


class LearnerFormation(RunTasks):
    """Forms the group of the ranks that are alive, and forms it again after losses.

    Args:
        config: Source of the fault-tolerance settings.
        supervisor: Starts the ranks, and starts those again that end.
        form: ``await form(handles, registers)`` forms the next generation of these ranks.

    Attributes:
        handles: The ranks of the current generation in rank order.
        is_untouched: Whether nothing has been trained or loaded yet, so that a replacement has the others' weights.
        last_resort: The learner state to restore if no rank is left, e.g. from the last checkpoint; or None.
        begin_lineage: ``await begin_lineage(handles)``, called after a restoration: all peers discard work in
            progress. Returns False if a rank died in the meantime.
        num_rollbacks: Number of times that all ranks were rolled back to `last_resort`.
        num_reforms: Number of times that survivors were re-formed.
    """

    def __init__(
        self,
        config: BaseConfig,
        supervisor: Supervisor,
        form: Callable[[list[Any], bool], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._config = config
        self._supervisor = supervisor
        self._form = form
        self._lock = asyncio.Lock()
        self._is_lost = asyncio.Event()
        self._formed = asyncio.Event()
        self._formed.set()
        self.handles: list[Any] = []
        self.is_untouched: bool = True
        self.num_reforms: int = 0
        self.num_rollbacks: int = 0
        self.last_resort: Any = None
        self._remembered_s = 0.0
        self.begin_lineage: Callable[[list[Any]], Awaitable[bool]] | None = None

    # -- use ------------------------------------------------------------------------------------

    async def begin(self, num_ranks: int) -> None:
        """Start all ranks and form the first generation. Ranks that die in the meantime are replaced.

        Raises:
            PeerLostError: Too many ranks died, or they cannot reach each other.
            DeadlineError: A rank did not start in time.
            Exception: An error raised by the user's code in one of them.
        """
        supervisor = self._supervisor
        supervisor.on_end = self._on_end
        await supervisor.start(num_ranks)
        self.handles[:] = supervisor.handles
        if any(handle.exited.done() for handle in self.handles):
            self.notice()
        self._start(self._run(), "form the learner group")
        if num_ranks == 1:
            return
        async with self._lock:
            await self._reform()
        while len(self.handles) < num_ranks and (self._ready() or self._is_replacing()):
            await self._wait_for_replacement()
            await self.admit()

    async def admit(self) -> None:
        """Let ready replacements join, between two updates. Return at once if there are none."""
        if self._ready():
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
            handles = list(self.handles)
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
                    yield list(self.handles)
                    return

    def remember(self, state: Any) -> None:
        """Keep a learner state as `last_resort`."""
        self.last_resort, self._remembered_s = state, time.monotonic()

    def note_work(self) -> None:
        """Reset the failure counts, after an update was committed."""
        self.is_untouched = False
        for handle in self.handles:
            self._supervisor.note_work(int(handle.name.rpartition("-")[2]))

    def has_only_weights(self, name: str) -> bool:
        """Return whether this rank, by name, is the last of the group, so that nobody else has its weights."""
        others = (handle for handle in self.handles if handle.name != name)
        return any(handle.name == name for handle in self.handles) and all(
            other.is_ending for other in others
        )

    def waits(self) -> list[str]:
        """Return descriptions of what the group waits for; [] if it is formed."""
        if self._formed.is_set():
            return []
        names = ", ".join(handle.name for handle in self.handles) or "nobody"
        num_replacing = sum(map(_is_pending, self._supervisor.places))
        return [f"waits for the learner group to be formed of {names}; {num_replacing} are being replaced"]

    # -- noticing -------------------------------------------------------------------------------

    def _on_end(self, place: Place) -> None:
        if place.handle in self.handles:
            self.notice()

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
            for handle in [handle for handle in self.handles if handle.exited.done()]:
                self.handles.remove(handle)
                num_failed = 0
            has_state = self.last_resort is not None or self.is_untouched
            if not self.handles and has_state and self._config.restart_failed_learners:
                if not went_back and not self.is_untouched:
                    age_s = time.monotonic() - self._remembered_s
                    _log.warning(
                        "All learners have died: restoring a copy of their state, %.0f s old.", age_s
                    )
                    self.num_rollbacks += 1
                await self._start_over()
                went_back = True
            self._check_enough(len(self.handles) + (len(self._ready()) if went_back else 0))
            ready = self._ready()
            members = [*self.handles, *ready]
            if not members:
                continue  # the only replacement has died in the meantime
            try:
                # Ranks that received another state train nothing before the broker knows the new lineage.
                await self._form(members, not (went_back and self.begin_lineage is not None))
            except PeerLostError as error:
                _log.warning("The learner group could not be formed (%s); trying again.", error)
                if not any(handle.exited.done() for handle in members):
                    num_failed += 1
                    self._check_attempts(num_failed, error)
                continue
            self.handles.extend(ready)
            if any(handle.exited.done() for handle in ready):
                self.notice()  # `_on_end` did not know it as a member
            if went_back and self.begin_lineage is not None and not await self.begin_lineage(members):
                continue
            went_back = False
            if not self._is_lost.is_set():
                self._formed.set()
                return

    def _ready(self) -> list[Any]:
        """Return the living replacements, which have not joined yet."""
        places = self._supervisor.places
        return [place.handle for place in places if place.is_alive and place.handle not in self.handles]

    def _is_replacing(self) -> bool:
        return any(map(_is_pending, self._supervisor.places))

    def _check_attempts(self, num_failed: int, error: PeerLostError) -> None:
        if num_failed >= _MAX_FAILED_FORMINGS:
            raise PeerLostError(
                f"The learners are alive but cannot form a group: {num_failed} attempts in a row failed, the last "
                f"with: {error} Check that they reach each other (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name "
                "the network interface; a firewall between them?). A checkpoint can be restored in a new run."
            ) from error

    async def _start_over(self) -> None:
        """Load `last_resort` on replacements, since no rank is left. Skip it if there is nothing to lose yet."""
        while True:
            await self._wait_for_replacement()
            ready = self._ready()
            if self.last_resort is not None:
                for handle in ready:
                    with contextlib.suppress(PeerLostError):
                        await handle.set_state(self.last_resort)
            if not ready or any(handle in ready for handle in self._ready()):
                return  # otherwise all of them have died in the meantime

    async def _wait_for_replacement(self) -> None:
        while not self._ready() and self._is_replacing():  # noqa: ASYNC110 (two facts, seldom)
            await asyncio.sleep(0.02)

    def _check_enough(self, num: int) -> None:
        for failed in (self.failed, self._supervisor.failed):
            if failed.done():
                failed.result()
        if num == 0:
            raise PeerLostError(
                "All learners have died, and with them the weights of the updates since the last checkpoint. "
                "Restore one with restore_from_path(), or from_checkpoint() in a new run."
            )
        if num < self._config.min_learners:
            raise PeerLostError(
                f"{num} learners are left, fewer than min_learners={self._config.min_learners}."
            )


def _is_pending(place: Place) -> bool:
    """Return whether a place's process is being started."""
    return not place.is_given_up and not place.is_alive


async def form_group(
    handles: Sequence[Any],
    store: str,
    generation: int,
    *,
    deadline_s: float,
    registers: bool = True,
) -> None:
    """Form a group of these ranks, all with the newest state among them.

    Ranks without an answer at the deadline are killed, unless all have none.

    Args:
        handles: The ranks in rank order.
        store: The rendezvous store; see `LearnerRole.rejoin`.
        generation: Higher than all earlier ones.
        deadline_s: Seconds for the whole attempt.
        registers: See `LearnerRole.rejoin`.

    Raises:
        PeerLostError: A rank died, hung, or could not reach the others; the live ranks can try again.
        Exception: The user's code failed in a rank.
    """
    calls = {
        asyncio.ensure_future(handle.call("rejoin", rank, len(handles), store, generation, registers)): handle
        for rank, handle in enumerate(handles)
    }
    pending = set(calls)
    try:
        done, pending = await asyncio.wait(pending, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for call in done if (error := call.exception()) is not None]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, PeerLostError)):
            raise failure  # an error of the user's code before its consequences
        if pending:
            late = [handle for call, handle in calls.items() if call in pending]
            for handle in late if done else late[1:]:
                handle.kill_hanging(f"the group was not formed within {deadline_s:g} s")
            names = ", ".join(handle.name for handle in late)
            raise PeerLostError(f"{names} did not answer while the learner group was formed")
    finally:
        for call in pending:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


class StoreServer:
    """A torch TCPStore served by the driver, which outlives every rank, on one interface only.

    It has no authentication: like all of torch.distributed it requires a trusted network.

    Args:
        host: Host of the interface to listen on.
        port: Port to listen on; 0: any free one.

    Raises:
        ConfigurationError: The address cannot be used.
    """

    def __init__(self, host: str, port: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(1024)
        except OSError as error:
            raise ConfigurationError(f"cannot serve learners at {host}:{port}: {error.strerror}") from error
        self.port: int = int(self._socket.getsockname()[1])
        # A TCPStore would listen on every interface, so it is given a bound socket.
        self._store: Any = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach()
        )

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._store = None
