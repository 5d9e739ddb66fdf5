"""ActorHandle: call and await the methods of an actor."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlzmq.actors.forkserver import ForkedChild
from rlzmq.actors.host import ActorHost
from rlzmq.actors.messages import (
    ActorMessage,
    Answer,
    Call,
    Cancel,
    Failure,
    Shutdown,
    encode_message,
    pack,
    send_privately,
    unpack_error,
)
from rlzmq.actors.process_state import ActorLostError, ExitStatus
from rlzmq.core import by_value
from rlzmq.core.errors import DeadlineError, PeerLostError, ProtocolError
from rlzmq.core.process import STACKS_TO_STDERR
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tracebacks import shorten

__all__ = ["ActorHandle", "Exited", "LocalLink", "ProcessLink", "short_name"]


_log = logging.getLogger("rlzmq.actors")

# Delay before outstanding calls fail: a child's last answers may still be in the socket when its end is reported.
_LAST_ANSWERS_S = 0.02
_DUMP_S = 0.2  # time for stacks to be written; nothing signals their end


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
            await self._send_privately([settings], [bytes(8), payload])
            await self._value_of(answer, 0)
        self.has_started = True

    async def beat(self) -> None:
        """Return once the process's event loop has answered, or the process has ended."""
        with contextlib.suppress(PeerLostError):
            await self.call("", (), {})

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        frames = pack((args, kwargs), f"argument of {method}()")
        call_id = next(self._call_ids)
        with self._expect(call_id, method) as answer:
            self._send_to_actor(Call(call_id, method), frames)
            return await self._value_of(answer, call_id)

    async def apply(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        data = by_value.dumps((function, args, kwargs), f"the function for {self.role}")
        call_id = next(self._call_ids)
        with self._expect(call_id, getattr(function, "__name__", "apply")) as answer:
            await self._send_privately([call_id.to_bytes(8, "little"), data])
            return await self._value_of(answer, call_id)

    async def stop(self, timeout_s: float = 5.0) -> ExitStatus:
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

    def on_message(self, message: ActorMessage, value: object) -> None:
        """Deliver an answer to its call; drop it if the call is no longer outstanding."""
        if not isinstance(message, Answer | Failure):
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

    async def _value_of(self, answer: asyncio.Future[Any], call_id: int) -> object:
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

    async def _send_privately(self, *messages: list[bytes]) -> None:
        async def send() -> None:
            async with self._pipe_lock:
                with contextlib.suppress(OSError):  # it died: the exit status explains it
                    for message in messages:
                        await send_privately(self._child.channel, *message)

        # Shielded: a message cut short by a cancellation would garble the next one.
        await asyncio.shield(asyncio.ensure_future(send()))

    def _send_to_actor(self, message: ActorMessage, value: Sequence[Any] = ()) -> None:
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

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._unless_exited(self._host.call(method, args, kwargs), method)

    async def apply(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        work = self._host.apply(function, (self._host.instance, *args), kwargs)
        return await self._unless_exited(work, getattr(function, "__name__", "apply"))

    async def stop(self, timeout_s: float = 5.0) -> ExitStatus:
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

    close = kill

    async def _unless_exited(self, work: Coroutine[Any, Any, Any], method: str) -> object:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.exited), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        status = self.exited.result()
        raise ActorLostError.describe(self.role, self.class_name, self.pid, status, f"a call of {method}()")


class Exited:
    """An actor's end: await it for the :class:`ExitStatus`, any number of times, from any task."""

    def __init__(self, future: asyncio.Future[ExitStatus]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether the actor has ended."""
        return self._future.done()

    def result(self) -> ExitStatus:
        """Return the exit status.

        Raises:
            asyncio.InvalidStateError: The actor still runs.
        """
        return self._future.result()

    def __await__(self) -> Generator[Any, None, ExitStatus]:
        return asyncio.shield(self._future).__await__()

    def __repr__(self) -> str:
        return f"<Exited: {self._future.result() if self.done() else 'running'}>"


class ActorHandle:
    """Calls the methods of one actor: ``await handle.method(*args, **kwargs)``.

    Made by :meth:`ActorSystem.spawn`. A call runs when it is awaited. Guarantees:

    * Order: blocking methods run one at a time in the order in which their calls were awaited; ``async
      def`` methods run at once, beside them.
    * Cancellation: cancelling the awaiting task cancels an ``async def`` method; a blocking method that
      has not started never runs, one that has started completes and its result is dropped.
    * Loss: a call whose actor ends gets :class:`~rlzmq.actors.process_state.ActorLostError` (a
      PeerLostError) with exit status, pid, name and last stderr lines, at most 0.1 s after the end.
    * Errors: an exception of the method arrives as the same builtin or rlzmq type, a RemoteError
      otherwise, with the remote traceback as a note and ``remote_origin`` set.

    Arguments and results are what ``rlzmq.wire.payloads`` carries: plain values, arrays, tensors,
    episodes, spaces. Functions go through :meth:`apply`.

    Example:
        >>> runner = await system.spawn(SingleAgentEnvRunner, config=config)  # doctest: +SKIP
        >>> episodes = await runner.sample(num_episodes=3)  # doctest: +SKIP
    """

    def __init__(self, link: ProcessLink | LocalLink, actor_class: type | str) -> None:
        self._link = link
        self._class = actor_class
        self._exited = Exited(link.exited)

    @property
    def name(self) -> str:
        """The actor's name within its system."""
        return self._link.role

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._link.pid

    @property
    def exited(self) -> Exited:
        """The actor's end: ``await handle.exited`` returns the exit status, ``handle.exited.done()`` tests for it."""
        return self._exited

    async def call(self, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method like ``await handle.method(*args, **kwargs)``, with a deadline.

        Args:
            method: The method's name.
            args, kwargs: Its arguments.
            deadline_s: Seconds after which DeadlineError is raised and the call is cancelled. None: no limit, because
                what ``sample`` or ``update`` takes has no natural bound and a dead actor is noticed anyway.

        Raises:
            AttributeError: The class has no such public method (found before anything is sent).
            TypeError: An argument cannot be sent.
            DeadlineError: No answer in time.
            PeerLostError: The actor ended.
        """
        self._check_method(method)
        return await self._within(deadline_s, method, self._link.call(method, args, kwargs))

    async def apply(
        self, function: Callable[..., Any], /, *args: Any, deadline_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Run ``function(instance, *args, **kwargs)`` in the actor, queued with its blocking methods.

        The function and its arguments travel by value from this process to its own child; the result
        comes back like a method's.

        Raises:
            TypeError: The function refers to something that cannot be sent.
            Exception: As :meth:`call` otherwise.
        """
        name = getattr(function, "__name__", "apply")
        return await self._within(deadline_s, name, self._link.apply(function, args, kwargs))

    async def stop(self, timeout_s: float = 5.0) -> ExitStatus:
        """Stop the actor: cancel outstanding calls and run its ``stop()`` method if it has one.

        An actor that takes longer than ``timeout_s`` is killed. Idempotent.

        Returns:
            The exit status.

        Raises:
            Exception: The actor's ``stop()`` raised; the actor has ended all the same.
        """
        return await self._link.stop(timeout_s)

    def kill(self, why: str = "") -> None:
        """Kill the actor's process and the processes that it started. Idempotent.

        Args:
            why: Follows the actor's name in errors, e.g. "was replaced".
        """
        self._link.kill(why)

    def kill_hanging(self, why: str) -> None:
        """Kill a process that hangs, once it has written its stacks to stderr; they are among its ``stderr_lines``.

        Args:
            why: How it hangs, for the log and errors.
        """
        self._link.kill_hanging(why)

    @property
    def why_killed(self) -> str:
        """Why this process killed the actor, as far as that was said, or ""."""
        return self._link.why_killed

    @property
    def is_ending(self) -> bool:
        """Whether the actor was killed here, or has ended."""
        return self._link.is_ending

    def send_signal(self, number: int) -> None:
        """Send a signal to the actor's process; do nothing if it has ended."""
        self._link.signal(number)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        self._check_method(name)
        return functools.partial(self.call, name)

    def __dir__(self) -> list[str]:
        methods = [] if isinstance(self._class, str) else _public_methods(self._class)
        return sorted({*object.__dir__(self), *methods})

    def __repr__(self) -> str:
        return f"<ActorHandle {self.name!r}: {short_name(self._class)}, pid {self.pid}, {self._exited!r}>"

    async def _within(self, deadline_s: float | None, method: str, work: Coroutine[Any, Any, Any]) -> object:
        try:
            if deadline_s is None:
                return await work
            async with asyncio.timeout(deadline_s) as scope:
                return await work
        except BaseException as error:
            shorten(error)
            if deadline_s is None or not (isinstance(error, TimeoutError) and scope.expired()):
                raise  # raised by the method
            raise DeadlineError(
                f"actor {self.name!r} ({short_name(self._class)}, pid {self.pid}) gave no answer to {method}() "
                f"within {deadline_s:g} s; a blocking method continues there until it returns"
            ) from error

    def _check_method(self, name: str) -> None:
        if isinstance(self._class, str):
            return  # the class is not imported here: the actor decides
        found = inspect.getattr_static(self._class, name, None)
        if found is None and hasattr(self._class, "__getattr__"):
            return  # methods may be generated on demand: the actor decides
        if name.startswith("_") or not callable(getattr(self._class, name, None)):
            if isinstance(found, property) or (found is not None and not callable(found)):
                hint = f" It is not a method: await handle.apply(lambda actor: actor.{name})."
            else:
                hint = did_you_mean(name, _public_methods(self._class))
            raise AttributeError(f"actor class {short_name(self._class)} has no method {name!r}.{hint}")


def short_name(actor_class: type | str) -> str:
    """Return the name of a class, which may be given as "package.module:Class"."""
    return actor_class.rpartition(":")[2] if isinstance(actor_class, str) else actor_class.__name__


def _public_methods(actor_class: type) -> list[str]:
    public = (name for name in dir(actor_class) if not name.startswith("_"))
    return [name for name in public if callable(getattr(actor_class, name, None))]
