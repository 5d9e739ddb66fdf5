"""The connection behind a handle: to an actor in another process, or to one in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from rlzmq.actors import by_value
from rlzmq.actors.exit_status import ActorLostError, ExitStatus
from rlzmq.actors.forkserver import ForkedChild
from rlzmq.actors.host import ActorHost
from rlzmq.actors.messages import (
    ActorMessage,
    Call,
    Cancel,
    Failure,
    Result,
    Shutdown,
    encode_message,
    pack,
)
from rlzmq.actors.remote_errors import unpack_error
from rlzmq.core.errors import PeerLostError, ProtocolError
from rlzmq.core.stack_channel import STACKS_TO_STDERR

__all__ = ["ActorLink", "LocalLink", "ProcessLink"]

_log = logging.getLogger("rlzmq.actors")

# Delay before outstanding calls fail: a child's last answers may still be in the socket when its end is reported.
_LAST_ANSWERS_S = 0.02
_DUMP_S = 0.2  # time for stacks to be written; nothing signals their end


class ActorLink(Protocol):
    """The interface between a handle and its actor. All methods are called on the system's event loop."""

    role: str
    class_name: str
    exited: asyncio.Future[ExitStatus]

    @property
    def pid(self) -> int: ...

    async def call(self, method: str, args: Any, kwargs: Any) -> Any: ...

    async def apply(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    async def stop(self, timeout_s: float) -> ExitStatus: ...

    why_killed: str

    @property
    def is_ending(self) -> bool: ...

    def kill(self, why: str = "") -> None: ...

    def kill_hanging(self, why: str) -> None: ...

    def signal(self, number: int) -> None: ...


class _Pending(NamedTuple):
    """An outstanding call; its answer is (message, value), or (None, error)."""

    method: str
    answer: asyncio.Future[tuple[ActorMessage | None, Any]]


class ProcessLink:
    """An actor in a forked process: calls over the system's ROUTER, functions over the private pipe.

    Args:
        child: The process.
        role: The actor's name.
        class_name: Its class, for error texts.
        routing_id: Its address on the system's ROUTER.
        send: Sends frames to it; raises PeerLostError when it is not connected.

    Attributes:
        has_started: Whether its constructor has returned.
        why_killed: Why it was killed here, as far as this was said.
        is_ending: Whether it was killed here, or has ended.
    """

    def __init__(
        self,
        child: ForkedChild,
        role: str,
        class_name: str,
        routing_id: str,
        send: Callable[[list[Any]], None],
    ) -> None:
        self.role = role
        self.routing_id = routing_id
        self.class_name = class_name
        self.exited: asyncio.Future[ExitStatus] = child.exited
        self._child = child
        self._send = send
        self._call_ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._pipe_lock = asyncio.Lock()
        self._is_lost = False
        self._was_killed = False
        self.has_started: bool = False
        self.why_killed: str = ""
        self.exited.add_done_callback(self._on_exit)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def construct(self, settings: bytes, payload: bytes) -> None:
        """Send settings, class and arguments, then wait for the constructor."""
        await self._child.started
        with self._expect(0, "its constructor") as answer:
            await self._send_privately(settings, bytes(8) + payload)
            await self._value_of(answer, 0)
        self.has_started = True

    async def beat(self) -> None:
        """Return once the process's event loop has answered, or the process has ended."""
        with contextlib.suppress(PeerLostError):
            await self.call("", (), {})

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        frames = pack((args, kwargs), f"argument of {method}()")
        call_id = next(self._call_ids)
        with self._expect(call_id, method) as answer:
            self._send_to_actor(Call(call_id, method), frames)
            return await self._value_of(answer, call_id)

    async def apply(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        data = by_value.dumps((function, args, kwargs), f"the function for {self.role}")
        call_id = next(self._call_ids)
        with self._expect(call_id, getattr(function, "__name__", "apply")) as answer:
            await self._send_privately(call_id.to_bytes(8, "little") + data)
            return await self._value_of(answer, call_id)

    async def stop(self, timeout_s: float) -> ExitStatus:
        if self.exited.done():
            return self.exited.result()
        failure: BaseException | None = None
        call_id = next(self._call_ids)
        try:
            async with asyncio.timeout(timeout_s):
                with self._expect(call_id, "stop") as answer:
                    self._send_to_actor(Shutdown(call_id))
                    try:
                        await self._value_of(answer, call_id)
                    except ActorLostError:
                        pass
                    except Exception as error:
                        failure = error
                await asyncio.shield(self.exited)
        except (TimeoutError, PeerLostError):
            pass
        finally:
            self.kill()
        status = await asyncio.shield(self.exited)
        if failure is not None:
            raise failure
        return status

    @property
    def is_ending(self) -> bool:
        return self._was_killed or self.exited.done()

    def kill(self, why: str = "") -> None:
        if why and not self.is_ending:
            self.why_killed = why
        self._was_killed = True
        self._child.kill()

    def kill_hanging(self, why: str) -> None:
        """Kill it once it has written the stacks of its threads to stderr."""
        if self.is_ending:
            return
        if why:
            _log.warning("%s (pid %d) hangs: %s. Killing it.", self.role, self.pid, why)
            self.why_killed = f"hung ({why}), and was killed"
        self._was_killed = True
        self.signal(STACKS_TO_STDERR)  # a stopped process writes none
        self.exited.get_loop().call_later(_DUMP_S, self._child.kill)

    def signal(self, number: int) -> None:
        self._child.signal(number)

    def close(self) -> None:
        """Kill the process if it still runs and close its sockets. Idempotent."""
        self._child.close()
        if not self.exited.done():
            self.exited.set_result(ExitStatus(None))

    def on_message(self, message: ActorMessage, value: Any) -> None:
        """Deliver an answer to its call; drop it if the call is no longer outstanding."""
        if not isinstance(message, Result | Failure):
            raise ProtocolError(f"{type(message).__name__} is not for an actor system")
        pending = self._pending.get(message.call_id)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result((message, value))

    @contextlib.contextmanager
    def _expect(self, call_id: int, method: str) -> Iterator[asyncio.Future[Any]]:
        if self._is_lost:
            raise self._lost_error(f"a time before {method}() was called")
        pending = self._pending[call_id] = _Pending(method, asyncio.get_running_loop().create_future())
        try:
            yield pending.answer
        finally:
            del self._pending[call_id]

    async def _value_of(self, answer: asyncio.Future[Any], call_id: int) -> Any:
        try:
            message, value = await answer
        except asyncio.CancelledError:
            if not self.exited.done():
                self._send_to_actor(Cancel(call_id))
            raise
        if isinstance(message, Failure):
            raise unpack_error(message.error)
        if message is None:
            raise value
        return value

    async def _send_privately(self, *messages: bytes) -> None:
        async def send() -> None:
            async with self._pipe_lock:
                with contextlib.suppress(OSError):  # it died: the exit status explains it
                    for message in messages:
                        await by_value.send(self._child.channel, message)

        # Shielded: a message cut short by a cancellation would garble the next one.
        await asyncio.shield(asyncio.ensure_future(send()))

    def _send_to_actor(self, message: ActorMessage, value: Any = ()) -> None:
        # If it has disconnected, its exit status is on its way to the pending call.
        with contextlib.suppress(PeerLostError):
            self._send(encode_message(message, value))

    def _on_exit(self, exited: asyncio.Future[ExitStatus]) -> None:
        self._child.close()
        exited.get_loop().call_later(_LAST_ANSWERS_S, self._fail_pending)

    def _fail_pending(self) -> None:
        self._is_lost = True
        for pending in self._pending.values():
            call = pending.method if pending.method.startswith("its ") else f"a call of {pending.method}()"
            if not pending.answer.done():
                pending.answer.set_result((None, self._lost_error(call)))

    def _lost_error(self, during: str) -> ActorLostError:
        status, why = self.exited.result(), self.why_killed
        return ActorLostError.describe(self.role, self.class_name, self.pid, status, during, why)


class LocalLink:
    """An actor in this process, on its own thread: for debugging and for sharing objects.

    Arguments and results are the same objects, not copies. Killing it only abandons its thread.
    """

    def __init__(self, role: str, class_name: str) -> None:
        self.role = role
        self.class_name = class_name
        self.exited: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self._host = ActorHost(role)

    @property
    def pid(self) -> int:
        return os.getpid()

    async def construct(self, make: Callable[[], Any]) -> None:
        """Construct the instance on the actor's thread."""
        try:
            await self._host.construct(make)
        except BaseException:
            self.kill()
            raise

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        return await self._unless_exited(self._host.call(method, args, kwargs), method)

    async def apply(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        work = self._host.apply(function, (self._host.instance, *args), kwargs)
        return await self._unless_exited(work, getattr(function, "__name__", "apply"))

    async def stop(self, timeout_s: float) -> ExitStatus:
        if not self.exited.done():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._host.stop()
            except TimeoutError:
                self.kill()
            finally:
                self._host.close()
                if not self.exited.done():
                    self.exited.set_result(ExitStatus(0))
        return self.exited.result()

    why_killed: str = ""

    @property
    def is_ending(self) -> bool:
        return self.exited.done()

    def kill_hanging(self, why: str) -> None:
        self.kill()

    def kill(self, why: str = "") -> None:
        self._host.close()
        if not self.exited.done():
            self.exited.set_result(ExitStatus(None, 9))

    def signal(self, number: int) -> None:
        raise NotImplementedError("an actor in this process has no separate process to signal")

    def close(self) -> None:
        """Abandon the thread. Idempotent."""
        self.kill()

    async def _unless_exited(self, work: Any, method: str) -> Any:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.exited), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        status = self.exited.result()
        raise ActorLostError.describe(self.role, self.class_name, self.pid, status, f"a call of {method}()")
