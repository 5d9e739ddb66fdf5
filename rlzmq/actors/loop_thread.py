"""A background thread with an event loop, on which synchronous callers run coroutines.

Works in scripts and in notebooks, where the caller's own thread may have a running loop already.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

from rlzmq.actors import forkserver  # noqa: F401  (imported first so that it stops last: see the end of this file)
from rlzmq.actors.host import awaited
from rlzmq.core.errors import ClosedError
from rlzmq.core.tracebacks import shorten, user_errors

__all__ = ["LoopThread", "get_loop_thread", "in_calling_thread", "new_event_loop"]


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's if it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


T = TypeVar("T")

_CLEAN_UP_S = 10.0
_SIGNAL_CHECK_S = 0.25

# Functions for the thread that waits in `LoopThread.run`; None ends its wait.
_Inbox = queue.SimpleQueue[Callable[[], None] | None]
_inbox: ContextVar[_Inbox | None] = ContextVar("_inbox", default=None)


async def in_calling_thread(function: Callable[[], Any]) -> Any:
    """Run a function of the user in the thread of the synchronous caller that waits for this coroutine.

    A user's callback can therefore use the synchronous API as it does elsewhere. Without such a caller (on a
    user's own loop, or in a serial run) the function is called directly. If it returns an awaitable, that is awaited.

    Raises:
        ExitRaisedError: It raised something that is no error, such as SystemExit.
    """
    inbox = _inbox.get()
    if inbox is None:
        with user_errors():
            result = function()
    else:
        result = await _in_thread_of(inbox, function)
    return await awaited(result) if inspect.isawaitable(result) else result


async def _in_thread_of(inbox: _Inbox, function: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def resolve(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def job() -> None:
        try:
            with user_errors():
                result = function()
        except Exception as error:
            loop.call_soon_threadsafe(resolve, None, error)
        else:
            loop.call_soon_threadsafe(resolve, result, None)

    inbox.put(job)
    return await done


class _Waiter(Generic[T]):
    """One coroutine in progress; ``start`` and ``cancel`` run on the loop, in this order if both are called."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self.inbox: _Inbox = queue.SimpleQueue()
        self.task: asyncio.Task[T] | None = None

    def start(self) -> None:
        context = copy_context()
        context.run(_inbox.set, self.inbox)
        self.task = self._loop.create_task(self._coroutine, context=context)
        self.task.add_done_callback(lambda _: self.inbox.put(None))

    def cancel(self) -> None:
        if self.task is None:  # interrupted before it could be started
            self._coroutine.close()
            self.inbox.put(None)
            return
        self.task.cancel()
        # Retrieve its exception, so that asyncio does not log it: the caller gets the interrupt.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def wait(self) -> None:
        """Wait for the coroutine to end; run the functions that :func:`in_calling_thread` submits."""
        while True:
            try:
                # A signal that arrives just before the wait, or in another thread, does not end it: wait in turns.
                job = self.inbox.get(timeout=_SIGNAL_CHECK_S)
            except queue.Empty:
                continue
            if job is None:
                return
            job()

    def wait_for_clean_up(self) -> None:
        """Wait for the cancelled coroutine to end, at most ``_CLEAN_UP_S``."""
        with contextlib.suppress(queue.Empty):
            while self.inbox.get(timeout=_CLEAN_UP_S) is not None:
                pass  # callbacks are no longer run


class _Executor(ThreadPoolExecutor):
    """An executor that also works while the interpreter exits, when Python closes all others before `atexit` callbacks.

    ``atexit.register(algo.stop)`` needs one.
    """

    def submit(self, function: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        """See ThreadPoolExecutor. At exit, the function runs at once, in the calling thread."""
        try:
            return super().submit(function, *args, **kwargs)
        except RuntimeError:
            if threading.main_thread().is_alive():
                raise
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class LoopThread:
    """Runs coroutines of synchronous callers on one event loop (uvloop if it is installed).

    Any thread may call :meth:`run`, several at a time. A KeyboardInterrupt in the waiting caller
    cancels its coroutine, waits up to 10 s for its clean-up and is then raised; a second one is raised
    at once.
    """

    def __init__(self, name: str = "rlzmq-loop") -> None:
        self._loop = new_event_loop()
        self._loop.set_default_executor(_Executor(thread_name_prefix=name))
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the loop and return its result.

        Raises:
            RuntimeError: Called on the loop's own thread, which would wait for itself.
            ClosedError: The loop was closed.
            BaseException: What the coroutine raised.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("called from the loop's own thread: await the coroutine instead")
        if self._loop.is_closed() or not self._thread.is_alive():
            coroutine.close()
            raise ClosedError(
                "the loop's thread has ended, or belongs to the process that this one was forked from. Build what "
                "you call in the process that calls it."
            )
        waiter = _Waiter(self._loop, coroutine)
        try:
            self._loop.call_soon_threadsafe(waiter.start)
            waiter.wait()
            assert waiter.task is not None
            return waiter.task.result()
        except BaseException as error:
            if waiter.task is None or not waiter.task.done():  # KeyboardInterrupt
                self._loop.call_soon_threadsafe(waiter.cancel)
                waiter.wait_for_clean_up()
            shorten(error)
            raise

    def close(self) -> None:
        """Cancel running coroutines and stop the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLEAN_UP_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_closing:
                # A task that raises one of these stops the loop; its caller gets the error.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CLEAN_UP_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


_thread: LoopThread | None = None
_owner_pid = 0
_lock = threading.Lock()


def get_loop_thread() -> LoopThread:
    """Return this process's shared loop thread; start it on first use."""
    global _thread, _owner_pid
    with _lock:
        if _thread is None or _owner_pid != os.getpid() or not _thread._thread.is_alive():
            _thread, _owner_pid = LoopThread(), os.getpid()
        return _thread


def _close() -> None:
    if _thread is not None and _owner_pid == os.getpid():
        _thread.close()


# If the user stopped nothing, this runs first at exit and ends all supervision on the loop. The fork server, which is
# imported above, stops last.
atexit.register(_close)
