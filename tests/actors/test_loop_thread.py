"""Synchronous callers: results, errors, interrupts, a running loop in the caller's own thread."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rlzmq.actors.loop_thread import LoopThread, in_calling_thread
from rlzmq.core.errors import ClosedError


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop")
    yield thread
    thread.close()
    assert "test-loop" not in {each.name for each in threading.enumerate()}


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_its_own_thread_is_told_to_await(thread: LoopThread) -> None:
    async def nested() -> None:
        thread.run(double(1))

    with pytest.raises(RuntimeError, match="await the coroutine instead"):
        thread.run(nested())


def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_clean_up(thread: LoopThread) -> None:
    events = []
    main_thread = threading.get_ident()

    async def work() -> None:
        try:
            signal.pthread_kill(main_thread, signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)
            events.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    assert events == ["cleaned up"]
    assert thread.run(double(1)) == 2


def test_an_exit_in_a_coroutine_reaches_its_caller_alone(thread: LoopThread) -> None:
    async def leave(error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            thread.run(leave(error))
        assert thread.run(double(1)) == 2


def test_callbacks_run_in_the_waiting_thread_and_may_wait_themselves(thread: LoopThread) -> None:
    def callback() -> tuple[int, int]:
        return threading.get_ident(), thread.run(double(21))

    def broken() -> None:
        raise KeyError("callback")

    async def work() -> tuple[int, int]:
        with pytest.raises(KeyError, match="callback"):
            await in_calling_thread(broken)
        return await in_calling_thread(callback)

    assert thread.run(work()) == (threading.get_ident(), 42)


def test_closing_cancels_what_runs(thread: LoopThread) -> None:
    started = threading.Event()
    caught: list[BaseException] = []

    async def work() -> None:
        started.set()
        await asyncio.sleep(60)

    def wait() -> None:
        try:
            thread.run(work())
        except asyncio.CancelledError as error:
            caught.append(error)

    other = threading.Thread(target=wait)
    other.start()
    started.wait()
    thread.close()
    thread.close()
    other.join()
    assert len(caught) == 1
    with pytest.raises(ClosedError):
        thread.run(double(1))


def test_threads_can_be_asked_for_while_the_interpreter_exits() -> None:
    program = """
import asyncio, atexit
from rlzmq.actors.loop_thread import get_loop_thread

async def double(number):
    return 2 * await asyncio.to_thread(int, number)

def at_exit():
    print(get_loop_thread().run(double("4")))
    try:
        get_loop_thread().run(double("four"))
    except ValueError as error:
        print(error)

atexit.register(at_exit)
print(get_loop_thread().run(double("3")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[:2] == ["6", "8"]
    assert "invalid literal" in done.stdout
    assert not done.stderr
