"""A background thread with an event loop: how synchronous callers await things.

Works in scripts and in notebooks, where the caller's own thread may have a running loop already.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlzmq.actors.event_loop import new_event_loop
from rlzmq.core.errors import ClosedError

__all__ = ["LoopThread", "get_loop_thread"]

T = TypeVar("T")

_CLEAN_UP_S = 10.0


class LoopThread:
    """Runs coroutines of synchronous callers on one loop (uvloop where there is one).

    Any thread may call :meth:`run`, several at a time. A KeyboardInterrupt in the waiting caller
    cancels its coroutine, waits up to 10 s for its clean-up and is then raised; a second one is raised
    at once.
    """

    def __init__(self, name: str = "rlzmq-loop") -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Awaits ``coroutine`` on the loop and returns its result.

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
            raise ClosedError("the loop's thread has ended")
        finished = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(lambda _: finished.set())

        self._loop.call_soon_threadsafe(start)
        try:
            finished.wait()
        except BaseException:  # KeyboardInterrupt
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            finished.wait(_CLEAN_UP_S)
            if finished.is_set() and not tasks[0].cancelled():
                tasks[0].exception()  # seen: the interrupt is what counts
            raise
        return tasks[0].result()

    def close(self) -> None:
        """Cancels what runs and ends the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLEAN_UP_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
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
    """This process's shared loop thread, started when first asked for."""
    global _thread, _owner_pid
    with _lock:
        if _thread is None or _owner_pid != os.getpid() or not _thread._thread.is_alive():
            if _thread is None:
                atexit.register(_close)
            _thread, _owner_pid = LoopThread(), os.getpid()
        return _thread


def _close() -> None:
    if _thread is not None and _owner_pid == os.getpid():
        _thread.close()
