"""Execution of one actor's methods: blocking ones on the actor's thread, coroutines on the loop; their answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rlzmq.actors.messages import (
    ActorMessage,
    Answer,
    Failure,
    encode_message,
    pack,
    pack_error,
    pack_snapshot,
)
from rlzmq.core.errors import ClosedError, ProtocolError
from rlzmq.core.tracebacks import is_interrupt, run_error
from rlzmq.core.trust import CALLER, find_code

__all__ = ["ActorHost", "ActorThread", "CallServer", "awaited", "constructed"]

T = TypeVar("T")


def constructed(actor_class: type | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an instance of a class, which is imported here if it is given as "package.module:Class"."""
    made: Any = find_code(actor_class, CALLER, object) if isinstance(actor_class, str) else actor_class
    return made(*args, **kwargs)


async def awaited(work: Awaitable[T]) -> T:
    """Await the user's coroutine; what it raises becomes an error, unless it interrupts or cancels this task."""
    try:
        return await work
    except GeneratorExit:  # this coroutine is closed
        raise
    except BaseException as error:
        explained = error if _is_cancelled(error) or is_interrupt(error) else run_error(error)
        if explained is error:
            raise
        raise explained from error


def _is_cancelled(error: BaseException) -> bool:
    """Return whether an error is the cancellation of the current task, rather than a CancelledError of user code."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    return task is not None and task.cancelling() > 0


class ActorThread:
    """One daemon thread that runs functions one at a time, in the order of submission.

    A function that is cancelled before its turn never runs. One that is running is not interrupted;
    its result is dropped.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run ``function()`` on the thread.

        Raises:
            ClosedError: The thread was closed.
            ExitRaisedError: The function raised something that is no error, such as SystemExit or StopIteration.
            Exception: Whatever else the function raised.
        """
        if self._is_closed:
            raise ClosedError("the actor has stopped")
        future: concurrent.futures.Future[tuple[Any, BaseException | None]] = concurrent.futures.Future()
        self._jobs.put((future, function))
        result, error = await asyncio.wrap_future(future)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Stop the thread after the current job and cancel the waiting ones. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            # An exception travels as a value: as an exception, a future would change or refuse some.
            try:
                outcome: tuple[Any, BaseException | None] = (function(), None)
            except BaseException as raised:
                outcome = (None, run_error(raised))
            future.set_result(outcome)
            del job, future, function, outcome  # do not keep the result alive until the next call


class ActorHost:
    """One instance and its thread, within one event loop.

    Blocking methods run one at a time on the thread; ``async def`` methods run on the loop, any number
    at a time, even while a blocking one runs.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.instance: Any = None
        self._thread = ActorThread(role)

    async def construct(self, make: Callable[[], Any]) -> None:
        """Construct the instance on the actor's thread.

        If the instance has a method ``use_actor_thread(run)``, it is called with a coroutine function
        ``run(function)`` that runs a function on the actor's thread, between its blocking methods.
        ``async def`` methods use it for blocking work.
        """
        self.instance = await self._thread.run(make)
        use_thread = getattr(self.instance, "use_actor_thread", None)
        if use_thread is not None:
            use_thread(self._thread.run)

    async def call(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        convert: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """Run a method.

        Args:
            method: Its name; dotted names and names with a leading underscore are refused.
            args: Positional arguments.
            kwargs: Keyword arguments.
            convert: Applied to the result, on the thread for blocking methods.
        """
        return await self.apply(self._method(method), args, kwargs, convert)

    async def apply(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        convert: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """Run any function as if it were a method."""
        if inspect.iscoroutinefunction(function):
            return convert(await function(*args, **kwargs))

        def run() -> Any:
            result = function(*args, **kwargs)
            return result if inspect.isawaitable(result) else convert(result)

        result = await self._thread.run(run)
        # A plain function may return a coroutine.
        return convert(await result) if inspect.isawaitable(result) else result

    async def answer(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Run a method; return its packed result, for a caller in another process. "": a beat, answered at once."""
        if not method:
            return pack(None, "beat")
        packed: list[Any] = await self.call(
            method, args, kwargs, lambda result: pack_snapshot(result, f"{method}() result")
        )
        return packed

    async def stop(self) -> None:
        """Call the instance's ``stop()`` if it has one without required arguments."""
        function = getattr(self.instance, "stop", None)
        if callable(function) and _needs_no_arguments(function):
            await self.apply(function, (), {})

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._thread.close()

    def _method(self, name: str) -> Callable[..., Any]:
        function = None if name.startswith("_") else getattr(self.instance, name)
        if not callable(function):
            raise AttributeError(f"{type(self.instance).__name__}.{name} is not a public method")
        return function  # type: ignore[no-any-return]


def _needs_no_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


class CallServer:
    """Awaits calls as tasks, and sends one answer to each that the caller has not cancelled.

    Args:
        role: Name of this process, for errors.
        send: Sends frames to the caller.
    """

    def __init__(self, role: str, send: Callable[[list[Any]], Any]) -> None:
        self._role = role
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, call_id: int, work: Coroutine[Any, Any, list[Any]]) -> None:
        """Start a call, which returns the packed result."""
        task = asyncio.create_task(self._answer(call_id, work), name=f"call {call_id}")
        self._tasks[call_id] = task

        def forget(_: asyncio.Task[None]) -> None:
            work.close()  # it has not begun if the task was cancelled before its first step
            del self._tasks[call_id]

        task.add_done_callback(forget)

    def cancel(self, call_id: int) -> None:
        """Cancel a call, if it still runs. No answer follows."""
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()

    def cancel_all(self) -> None:
        """Cancel all calls."""
        for task in self._tasks.values():
            task.cancel()

    def send(self, message: ActorMessage, value: Sequence[Any] = ()) -> None:
        """Send an answer; if it is larger than the channel carries, send this error."""
        try:
            self._send(encode_message(message, value))
        except ProtocolError as error:
            self._send(encode_message(Failure(message.call_id, pack_error(error, self._role))))

    def fail(self, call_id: int, error: BaseException) -> None:
        """Send the error of a call."""
        self.send(Failure(call_id, pack_error(error, self._role)))

    async def _answer(self, call_id: int, work: Coroutine[Any, Any, list[Any]]) -> None:
        try:
            self.send(Answer(call_id), await work)
        except BaseException as error:
            if not _is_cancelled(error):
                self.fail(call_id, run_error(error))
