"""Keeps one actor alive: restarts it with back-off until its budget is spent.

Consumes the actor's exit status; produces a new actor and ``on_restart``. Waits for the actor's end,
then for the back-off delay; unblocked by the fork server's report, or by ``stop()``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from rlzmq.actors.exit_status import ActorLostError
from rlzmq.actors.handle import ActorHandle
from rlzmq.core.errors import ClosedError
from rlzmq.protocol.supervision import FAIL_FAST, GiveUp, RestartPolicy, Supervision

__all__ = ["Supervisor"]

Spawn = Callable[[int], Awaitable[ActorHandle]]


class Supervisor:
    """Runs one actor through its incarnations.

    Args:
        spawn: Starts the actor; its argument is the incarnation, 0 for the first start.
        policy: When to restart. The default fails fast: the first death is raised.
        on_lost: Called with the error of each death, before the restart.
        on_restart: Awaited with each new handle, before :attr:`handle` shows it, e.g. to restore
            state. An exception of it counts as a failure of that incarnation.

    Attributes:
        first_failure: The first death, kept: what came later is often only its consequence.

    Example:
        >>> supervisor = Supervisor(lambda n: system.spawn(Worker, incarnation=n), policy=RestartPolicy())
        ... # doctest: +SKIP
        >>> await supervisor.start()  # doctest: +SKIP
        >>> await supervisor.run()  # doctest: +SKIP
    """

    def __init__(
        self,
        spawn: Spawn,
        *,
        policy: RestartPolicy = FAIL_FAST,
        on_lost: Callable[[BaseException], None] | None = None,
        on_restart: Callable[[ActorHandle], Awaitable[None]] | None = None,
    ) -> None:
        self._spawn = spawn
        self._on_lost = on_lost
        self._on_restart = on_restart
        self._machine = Supervision(policy)
        self._handle: ActorHandle | None = None
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self.first_failure: Exception | None = None

    @property
    def handle(self) -> ActorHandle | None:
        """The actor that runs now; None before the first start and between two incarnations."""
        return self._handle

    @property
    def num_restarts(self) -> int:
        """Restarts so far."""
        return self._machine.num_restarts

    async def start(self) -> ActorHandle:
        """Starts the first incarnation. A failure here is raised at once, whatever the policy.

        Raises:
            ClosedError: It was stopped.
            Exception: Whatever ``spawn`` raised.
        """
        if self._stopping.is_set():
            raise ClosedError("this supervisor was stopped")
        if self._handle is None:
            self._take(await self._spawn(0))
        assert self._handle is not None
        return self._handle

    async def ready(self) -> ActorHandle:
        """The running actor, waiting for a restart that is under way; ends with :meth:`run`'s error.

        Raises:
            ClosedError: The supervisor was stopped or has given up.
        """
        stopping = asyncio.ensure_future(self._stopping.wait())
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            stopping.cancel()
        if self._handle is None:
            raise ClosedError("the supervised actor was stopped or given up") from self.first_failure
        return self._handle

    async def run(self) -> None:
        """Supervises until :meth:`stop`; run it as a task. Cancelling it stops nothing but itself.

        Raises:
            Exception: The first failure, when the budget is spent; with later ones as its cause.
        """
        latest: Exception | None = None
        incarnation = 0
        while not self._stopping.is_set():
            try:
                handle = self._handle
                if handle is None:
                    handle = await self._spawn(incarnation)
                    try:
                        if self._on_restart is not None:
                            await self._on_restart(handle)
                    except BaseException:
                        handle.kill()
                        raise
                    self._take(handle)
                status = await self._wait_for_end(handle)
                if status is None:
                    return
                latest = status
            except Exception as error:
                latest = error
            self._handle = None
            self._ready.clear()
            if self.first_failure is None:
                self.first_failure = latest
            if self._on_lost is not None:
                self._on_lost(latest)
            decision = self._machine.failed(time.monotonic())
            if isinstance(decision, GiveUp):
                self._stopping.set()
                raise self._final_error(decision, latest)
            incarnation = decision.incarnation
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), decision.delay_s)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the supervision and the actor. Idempotent."""
        self._stopping.set()
        if self._handle is not None:
            await self._handle.stop(timeout_s)

    def _take(self, handle: ActorHandle) -> None:
        self._handle = handle
        self._machine.started(time.monotonic())
        self._ready.set()

    async def _wait_for_end(self, handle: ActorHandle) -> Exception | None:
        """The actor's death as an error; None when it was asked to stop."""
        status = await handle.exited
        if self._stopping.is_set():
            return None
        text = f"actor {handle.name!r} (pid {handle.pid}) {status} while it was supervised"
        if status.stderr_lines:
            text += "\nits last stderr lines:\n" + "\n".join(f"  {line}" for line in status.stderr_lines)
        return ActorLostError(text, role=handle.name, pid=handle.pid, exit_status=status)

    def _final_error(self, decision: GiveUp, latest: Exception) -> Exception:
        first = self.first_failure
        assert first is not None
        if self._machine.policy.max_restarts:
            first.add_note(
                f"given up after {decision.num_failures} failures within {decision.window_s:g} s; "
                "this was the first one"
            )
        if latest is not first:
            first.__cause__ = latest  # shown above it: the first failure comes last
        return first
