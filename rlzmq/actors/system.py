"""ActorSystem: run any class in its own process and await its methods."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlzmq.actors.child import local_options
from rlzmq.actors.forkserver import ForkServer, get_fork_server
from rlzmq.actors.handle import ActorHandle, LocalLink, ProcessLink, short_name
from rlzmq.actors.host import constructed
from rlzmq.actors.messages import decode_message
from rlzmq.actors.process_state import is_stopped
from rlzmq.core import by_value, faults
from rlzmq.core.addresses import SocketDirectory, process_directory
from rlzmq.core.errors import ClosedError, ConfigurationError, DeadlineError, PeerLostError
from rlzmq.core.patience import FACTOR, HEARTBEAT_S, CoreWait, FairClock, Patience
from rlzmq.core.tracebacks import shorten
from rlzmq.net.context import Context
from rlzmq.net.socket import DrainSocket

__all__ = ["ActorHandle", "ActorSystem", "Watched"]


class Watched:
    """The beats of a process: a call that its event loop answers at once, again and again.

    Args:
        link: Its link.
        patience: How long an answer may take; None: it is only watched for being stopped while it starts.
        is_spared: Whether the process has what nobody else has: it is then continued if it was stopped, and gets
            `FACTOR` times the time.
    """

    def __init__(self, link: ProcessLink, patience: Patience | None, is_spared: Callable[[], bool]) -> None:
        self.link: ProcessLink = link
        self._patience = patience
        self._is_spared = is_spared
        self._core_wait = CoreWait()
        self._answer: asyncio.Future[Any] | None = None
        self._num_looks = 0  # since the last beat was sent
        self._was_stopped = False

    def look(self, now: float) -> str:
        """Return why the process hangs, "stopped" if it is to be continued, or ""; to be called regularly.

        Args:
            now: Seconds of a `FairClock`.
        """
        link, patience = self.link, self._patience
        if patience is None and link.has_started:
            return ""
        # Twice in a row, since a process may be continued at once.
        was_stopped, self._was_stopped = self._was_stopped, link.pid > 0 and is_stopped(link.pid)
        if self._was_stopped:
            if not was_stopped:
                return ""
            return "stopped" if self._is_spared() else "a signal (SIGSTOP) has stopped it"
        # Before its constructor has returned, it need not answer.
        return self._listen(now, patience) if link.has_started and patience is not None else ""

    def close(self) -> None:
        """Wait for no answer any more. Idempotent."""
        if self._answer is not None:
            self._answer.cancel()

    def _listen(self, now: float, patience: Patience) -> str:
        self._num_looks += 1
        if self._answer is None or self._answer.done():
            if self._answer is not None:
                patience.moved(now)
                self._answer = None
            elif self._num_looks > 1:
                self._answer, self._num_looks = asyncio.ensure_future(self.link.beat()), 0
                patience.begin(now)
            return ""
        if self._num_looks == 1:
            self._core_wait.begin(self.link.pid)
            return ""
        patience.begin(min(now, now - patience.silent_s(now) + self._core_wait.take_s()))
        silent_s = patience.silent_s(now)
        if not patience.is_over(now) or (self._is_spared() and silent_s < FACTOR * patience.limit_s):
            return ""
        patience.killed()
        return f"no answer for {silent_s:.1f} s"


_log = logging.getLogger("rlzmq.actors")

_FORGET_AFTER_S = 1.0
_MAX_MESSAGE_BYTES = 512 * 1024 * 1024  # peers are this process's own children: room for large weights


class ActorSystem:
    """Starts actors and stops them all with itself; an async context manager.

    Processes are forks of a server that has torch, numpy and gymnasium imported (a few hundredths of a
    second each once it is warm). They die with this process, however it ends. User classes may be
    defined anywhere, ``__main__`` and notebooks included, without an ``if __name__`` guard. Actors write to this
    process's stdout; lines on their stderr are passed on with their name in front.

    The system belongs to the event loop on which it is started; use its methods and handles there only.

    Args:
        max_message_bytes: Largest single array of an argument or result.

    Example:
        >>> async with ActorSystem() as system:  # doctest: +SKIP
        ...     runners = [await system.spawn(SingleAgentEnvRunner, config=config) for _ in range(2)]
        ...     batches = await asyncio.gather(*(r.sample(num_episodes=3) for r in runners))
    """

    def __init__(self, *, max_message_bytes: int = _MAX_MESSAGE_BYTES) -> None:
        self._max_message_bytes = max_message_bytes
        self._links: dict[str, ProcessLink] = {}  # by routing id
        self._watched: list[Watched] = []
        self._local_links: list[LocalLink] = []
        self._routing_ids = itertools.count(1)
        self._name_counts: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: Context | None = None
        self._directory: SocketDirectory | None = None
        self._router: DrainSocket | None = None
        self._server: ForkServer | None = None
        self._address = ""
        self._stopping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> ActorSystem:
        """Bind the system to the running event loop and start the fork server. Idempotent.

        Raises:
            ClosedError: The system was stopped.
            ConfigurationError: No directory can hold its sockets.
        """
        if self._stopping is not None:
            raise ClosedError("this actor system was stopped: make a new one")
        if self._loop is not None:
            return self
        self._loop = asyncio.get_running_loop()
        server = get_fork_server()
        self._context = Context()
        self._directory = SocketDirectory(before=lambda path: self._let_own(server, path))
        self._router = DrainSocket(
            self._context,
            "ROUTER",
            self._on_message,
            options=local_options(self._max_message_bytes),
            packs=True,
            name="actor system",
        )
        self._address = self._router.bind(self._directory.address("actors"))
        self._watching = asyncio.create_task(self._watch(), name="watch the processes")
        return self

    async def stop(self) -> None:
        """Stop all actors concurrently and remove every process, socket and file. Idempotent.

        Raises:
            Exception: The first exception from an actor's ``stop()``; everything has ended all the same.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="stop actor system")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        links: list[ProcessLink | LocalLink] = [*self._links.values(), *self._local_links]
        try:
            results = await asyncio.gather(*(link.stop() for link in links), return_exceptions=True)
        finally:
            if self._watching is not None:
                self._watching.cancel()
            for watched in self._watched:
                watched.close()
            self._watched.clear()
            for link in links:
                link.close()
            if self._router is not None:
                self._router.close(linger_ms=0)
            if self._context is not None:
                self._context.close()
            if self._directory is not None:
                self._directory.close()
                if self._server is not None and self._server.is_usable:
                    self._server.disown_directory(self._directory.path)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def __aenter__(self) -> ActorSystem:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.stop()
        except Exception as stop_error:
            if error is None:
                raise
            error.add_note(f"stopping the actors also failed: {stop_error!r}")  # the first failure counts

    @property
    def run_directory(self) -> SocketDirectory:
        """The system's private directory; it is removed with the system.

        Raises:
            ClosedError: The system has not been started.
        """
        if self._directory is None:
            raise ClosedError("the actor system has not been started")
        return self._directory

    # -- actors ----------------------------------------------------------------------------------------

    def preload(self, modules: Sequence[str]) -> None:
        """Import these modules once for all actors that are spawned later; return at once.

        Use it for modules that each actor would need seconds to import. Missing ones are skipped.
        """
        get_fork_server().preload(modules)

    async def spawn(
        self,
        actor_class: type | str,
        *args: Any,
        name: str | None = None,
        in_process: bool = False,
        deadline_s: float = 120.0,
        patience: Patience | None = None,
        is_spared: Callable[[], bool] = lambda: False,
        **kwargs: Any,
    ) -> ActorHandle:
        """Start an actor: construct ``actor_class(*args, **kwargs)`` in its own process.

        Args:
            actor_class: Any class. Class and arguments travel by value, from this process to its own
                child only. Or a class's name, "package.module:Class": only the actor's process imports it.
            args, kwargs: The constructor's arguments.
            name: Shown in error texts, in front of stderr lines and as the thread's name; made from the
                class's name if None. Must be unique among the actors that run.
            in_process: Run it on its own thread of this process, with the same handle: for debugging.
                Arguments and results are then shared objects, not copies.
            deadline_s: Bound of process, imports and constructor. 0: none.
            patience: How long its event loop may be blocked before it counts as hanging and is killed, with the
                stacks of its threads on stderr; likewise at once if a signal stops it. None: no limit. May be used
                again for the process that replaces it.
            is_spared: See `Watched`.

        Returns:
            The handle, once the constructor has returned.

        Raises:
            Exception: The constructor raised (ActorHandle describes how it arrives).
            PeerLostError: The process ended in the constructor, or was stopped by a signal and therefore killed.
            DeadlineError: It took longer than ``deadline_s``; the text has the stacks of its threads.
            TypeError: ``actor_class`` is not a class, or an argument cannot be sent to another process.
        """
        if not isinstance(actor_class, type | str):
            raise TypeError(f"spawn needs a class, got {actor_class!r}: spawn(MyClass, arguments…)")
        await self.start()
        class_name = short_name(actor_class)
        role = self._take_name(class_name, name)
        if in_process:
            local = LocalLink(role, class_name)
            self._local_links.append(local)
            local.exited.add_done_callback(lambda _: self._local_links.remove(local))
            construct = local.construct(lambda: constructed(actor_class, args, kwargs))
            await self._construct(local, construct, deadline_s)
            return ActorHandle(local, actor_class)
        payload = by_value.dumps((actor_class, args, kwargs), f"{class_name} or its arguments")
        while True:
            server = get_fork_server()
            try:
                link = self._fork(server, role, class_name, patience, is_spared)
                await self._construct(link, link.construct(self._settings(link), payload), deadline_s)
            except PeerLostError as error:  # if the fork server died, that is no failure of the actor's
                if (delay_s := await server.restart_delay_s(error)) is None:
                    raise
                await asyncio.sleep(delay_s)
            else:
                server.note_work()
                return ActorHandle(link, actor_class)

    def watch(self, handle: ActorHandle, patience: Patience, is_spared: Callable[[], bool]) -> None:
        """Watch a process that joined from elsewhere like those that were spawned here; see `spawn`."""
        link: Any = handle._link
        self._watched.append(Watched(link, patience, is_spared))

    async def _construct(
        self, link: ProcessLink | LocalLink, work: Coroutine[Any, Any, None], deadline_s: float
    ) -> None:
        """Wait for a constructor; kill the actor if its constructor fails, hangs or is stopped."""
        constructed = asyncio.ensure_future(work)
        # Checks are counted instead of reading the clock: time for which this process slept must not count.
        left_s = deadline_s or math.inf
        try:
            while not (await asyncio.wait((constructed,), timeout=min(HEARTBEAT_S, left_s)))[0]:
                left_s -= HEARTBEAT_S
                if left_s <= 0:
                    raise await self._overdue(link, deadline_s)
            constructed.result()
        except BaseException as error:
            shorten(error)
            constructed.cancel()
            link.kill()
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.shield(link.exited)
            raise

    async def _overdue(self, link: ProcessLink | LocalLink, deadline_s: float) -> DeadlineError:
        """Kill an actor whose constructor does not return; return the error with the stacks of its threads."""
        text = (
            f"actor {link.role!r} ({link.class_name}, pid {link.pid}) was not ready within {deadline_s:g} s and was "
            "killed; if its constructor really takes longer, raise deadline_s (in a config's fault_tolerance: "
            "process_start_timeout_s, or env_reset_timeout_s)"
        )
        link.kill_hanging("")
        lines = (await asyncio.shield(link.exited)).stderr_lines
        stacks = "".join(["; its last stderr lines:", *(f"\n  {line}" for line in lines)]) if lines else ""
        return DeadlineError(text + stacks)

    async def _watch(self) -> None:
        """Kill processes that hang. Continue the fork server: without it no process starts or ends."""
        clock = FairClock(HEARTBEAT_S)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._look(clock.now())

    def _look(self, now: float) -> None:
        server = self._server
        if server is not None and server.is_usable and is_stopped(server.pid):
            _log.warning("The fork server (pid %d) was stopped; continuing it.", server.pid)
            server.send_signal(signal.SIGCONT)
        for watched in [watched for watched in self._watched if watched.link.exited.done()]:
            watched.close()
            self._watched.remove(watched)
        for watched in self._watched:
            link = watched.link
            why = "" if link.is_ending else watched.look(now)
            if why == "stopped":
                _log.warning(
                    "%s (pid %d) was stopped; resuming it: it holds the only copy of its state.",
                    link.role,
                    link.pid,
                )
                link.signal(signal.SIGCONT)
            elif why:
                link.kill_hanging(why)

    def _fork(
        self,
        server: ForkServer,
        role: str,
        class_name: str,
        patience: Patience | None,
        is_spared: Callable[[], bool],
    ) -> ProcessLink:
        if server is not self._server:  # the previous one died
            assert self._directory is not None
            self._let_own(server, self._directory.path)
        routing_id = f"{role}#{next(self._routing_ids)}"
        child = server.spawn(role)
        router = self._router
        assert router is not None

        def send(frames: list[Any]) -> None:
            router.send([routing_id.encode(), *frames])

        link = ProcessLink(child, role, class_name, routing_id, send)
        self._links[routing_id] = link
        self._watched.append(Watched(link, patience, is_spared))
        link.exited.add_done_callback(
            lambda _: self._loop and self._loop.call_later(_FORGET_AFTER_S, self._forget, routing_id)
        )
        link.exited.add_done_callback(lambda _: self._remove_directory(link.pid))
        link.exited.add_done_callback(lambda _: faults.record("ended", place=role, pid=link.pid))
        return link

    def _forget(self, routing_id: str) -> None:
        self._links.pop(routing_id, None)

    def _remove_directory(self, pid: int) -> None:
        """Remove multiprocessing's directory of a process that has ended with all that it had started."""
        shutil.rmtree(process_directory(self.run_directory.path, pid), ignore_errors=True)

    def _let_own(self, server: ForkServer, directory: Path) -> None:
        with contextlib.suppress(PeerLostError):  # it has died: the next one owns the directory
            server.own_directory(directory)
            self._server = server

    def _settings(self, link: ProcessLink) -> bytes:
        """Return what a child adopts from this process; it was forked from the server."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:  # it was removed: the process stays in the fork server's
            directory = ""
        settings = {
            "sys_path": sys.path,
            "cwd": directory,
            "environ": dict(os.environ),
            "address": self._address,
            "run_directory": str(self.run_directory.path),
            "routing_id": link.routing_id,
            "max_message_bytes": self._max_message_bytes,
        }
        return json.dumps(settings).encode()

    def _take_name(self, class_name: str, name: str | None) -> str:
        if name is None:
            number = self._name_counts.get(class_name, 0)
            self._name_counts[class_name] = number + 1
            return f"{class_name}-{number}"
        if not name or "/" in name or len(name) > 100 or not name.isprintable():
            raise ConfigurationError(
                f"{name!r} cannot name an actor: expected 1 to 100 printable characters, no '/'"
            )
        links: list[ProcessLink | LocalLink] = [*self._links.values(), *self._local_links]
        if any(link.role == name and not link.exited.done() for link in links):
            raise ConfigurationError(f"an actor named {name!r} runs already: choose another name")
        return name

    def _on_message(self, frames: list[Any]) -> None:
        link = self._links.get(bytes(frames[0]).decode("utf-8", "replace"))
        if link is not None:  # otherwise the last message of an abandoned process
            link.on_message(*decode_message(frames[1:]))
