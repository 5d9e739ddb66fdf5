"""Calls that do not return are named, again after twice the time."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from rlzmq.cli.interrupt import Interrupt
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.errors import ExitRaisedError, Interrupted


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_call_is_named_with_its_stack_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    watch = CallWatch(0.2)
    watch.start("watch")
    with watch.call("on_train_result"):
        while len(caplog.records) < 2:
            time.sleep(0.01)
    watch.close()
    assert all(message.startswith("on_train_result has not returned for ") for message in messages(caplog))
    assert "test_call_watch.py" in messages(caplog)[0]


def test_a_call_that_takes_too_long_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    texts: list[str] = []

    def tell(text: str) -> None:
        texts.append(text)
        told.set()

    watch = CallWatch(0.0, 0.2, tell)
    watch.start("watch")
    with watch.call("close()"):
        assert told.wait(30.0)
        time.sleep(0.3)
    assert len(texts) == 1
    assert texts[0].startswith("close() has not returned")
    assert not caplog.records


def test_an_interrupt_in_the_main_thread_is_ctrl_c_and_anywhere_else_an_error() -> None:
    watch = CallWatch()
    with pytest.raises(KeyboardInterrupt), watch.call("a callback"):
        raise KeyboardInterrupt
    raised: list[BaseException] = []

    def call() -> None:
        try:
            with watch.call("a callback"):
                raise KeyboardInterrupt
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(raised[0], ExitRaisedError)


def test_a_command_knows_its_interrupts_from_those_of_user_code() -> None:
    watch = CallWatch()
    with Interrupt(drain_s={}) as interrupt:
        with pytest.raises(ExitRaisedError), watch.call("an environment"):
            raise KeyboardInterrupt
        interrupt.ends_at_once, interrupt.on_first = False, interrupt.raise_now
        with pytest.raises(Interrupted), watch.call("an environment"):
            signal.raise_signal(signal.SIGTERM)
