"""Actors: calls, errors, cancellation, deadlines, deaths and last words; in processes and in this one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import psutil
import pytest
from actor_checks import is_gone
from actor_classes import Recorder, Stopper, Terminator

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.actors.system import ActorSystem
from rlzmq.core.errors import (
    ClosedError,
    ConfigurationError,
    DeadlineError,
    ExitRaisedError,
    PeerLostError,
    ProtocolError,
    RemoteError,
)
from rlzmq.core.process import LastWords, end_process
from rlzmq.driver.supervision import first_line, lost_error


@pytest.fixture(params=["process", "in_process"])
async def actor(request: pytest.FixtureRequest, system: ActorSystem) -> ActorHandle:
    """A Recorder, once in a process of its own and once in this one."""
    return await system.spawn(Recorder, 5, name="rec", in_process=request.param == "in_process")


async def test_an_actor_has_a_process_and_a_named_thread(system: ActorSystem, monkeypatch: Any) -> None:
    monkeypatch.setenv("RLZMQ_TEST", "carried")
    monkeypatch.setattr(sys, "path", [*sys.path, "/some/where"])
    actor = await system.spawn(Recorder, name="rec")
    where = await actor.where()
    assert where["pid"] == actor.pid != os.getpid()
    assert (where["thread"], where["is_main_thread"]) == ("rec", False)
    assert (where["cwd"], where["environ"], where["path"]) == (os.getcwd(), "carried", sys.path)
    assert (await actor.loop_thread())[0] == "MainThread"
    assert (await actor.loop_thread())[1].startswith("uvloop")


async def test_a_process_starts_although_the_working_directory_was_removed(
    system: ActorSystem, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    os.rmdir(tmp_path)
    actor = await system.spawn(Recorder)
    assert await actor.torch_threads() == 1


async def test_torch_runs_in_forks_with_one_thread(system: ActorSystem) -> None:
    actors = await asyncio.gather(*(system.spawn(Recorder) for _ in range(2)))
    assert await asyncio.gather(*(actor.matmul() for actor in actors)) == [300.0**3] * 2
    assert await actors[0].torch_threads() == 1
    first, second = await asyncio.gather(*(actor.random() for actor in actors))
    assert first != second


async def test_a_result_is_a_snapshot(system: ActorSystem) -> None:
    class Filler:
        def __init__(self) -> None:
            self.data = np.zeros(1_000_000)

        def fill(self, value: float) -> Any:
            self.data[:] = value
            return self.data

    actor = await system.spawn(Filler)
    results = await asyncio.gather(*(actor.fill(float(number)) for number in range(5)))
    assert [(result.min(), result.max()) for result in results] == [(n, n) for n in range(5)]


async def test_what_does_not_travel_is_named(system: ActorSystem) -> None:
    actor = await system.spawn(Recorder)
    with pytest.raises(TypeError, match=r"argument of echo\(\).*does not travel"):
        await actor.echo(threading.Lock())
    with pytest.raises(TypeError, match="inside the actor"):
        await system.spawn(Recorder, threading.Lock())
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"the function for Recorder-0 cannot be sent"):
        await actor.apply(lambda actor: lock)
    with pytest.raises(TypeError, match=r"apply: .*does not travel") as caught:
        await actor.apply(lambda actor: actor)
    assert not any("rlzmq" in note for note in caught.value.__notes__), "the text is what a user reads"


async def test_functions_are_applied_in_the_actor(actor: ActorHandle) -> None:
    factor = 4

    async def slowly(actor: Any, offset: int) -> int:
        await asyncio.sleep(0)
        return actor.total + offset

    assert await actor.apply(lambda actor, k: actor.total * k, factor) == 20
    assert await actor.apply(slowly, offset=1) == 6


async def test_code_that_is_sent_by_value_keeps_its_files_name(system: ActorSystem, monkeypatch: Any) -> None:
    table, name = cloudpickle.CloudPickler.dispatch_table, "<dynamic-code>"  # as cloudpickle 3.1.3 has it
    monkeypatch.setitem(table, CodeType, lambda code, of=table[CodeType]: of(code.replace(co_filename=name)))
    actor = await system.spawn(Recorder)
    assert await actor.apply(lambda actor: sys._getframe().f_code.co_filename) == __file__


async def test_unknown_methods_are_refused_with_the_nearest_name(actor: ActorHandle) -> None:
    with pytest.raises(AttributeError, match=r"Did you mean 'add'\?"):
        actor.ad  # noqa: B018
    with pytest.raises(AttributeError, match=r"handle\.apply\(lambda actor: actor\.constant\)"):
        actor.constant  # noqa: B018
    with pytest.raises(AttributeError, match="has no method '_private'"):
        await actor.call("_private")
    assert not hasattr(actor, "__array__")
    assert {"add", "stop", "pid"} <= set(dir(actor))


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("os", FileNotFoundError, "[Errno 2] No such file: 'x.txt'"),
        ("rlzmq", ConfigurationError, "bad lr"),
        ("unicode", RemoteError, "UnicodeDecodeError: "),
        ("own", RemoteError, "actor_classes.OwnError: ('my own', 7)"),
        ("own", ValueError, "OwnError"),
        ("exit", ExitRaisedError, "called sys.exit(3) at "),
        ("cancelled", ExitRaisedError, "raised CancelledError"),
    ],
)
async def test_remote_errors_keep_their_type(
    system: ActorSystem, kind: str, expected: type[Exception], text: str
) -> None:
    actor = await system.spawn(Recorder, name="rec")
    with pytest.raises(expected) as caught:
        await actor.call("raise_error", kind, deadline_s=30)
    assert text in str(caught.value)
    origin = caught.value.remote_origin
    assert (origin.pid, origin.role) == (actor.pid, "rec")
    assert "in raise_error" in origin.traceback_text
    assert "rlzmq/actors" not in origin.traceback_text
    assert caught.value.__notes__[0].startswith(f"raised in actor 'rec' (pid {actor.pid} on ")
    assert await actor.add(0) == 0


async def test_a_constructor_that_raises_leaves_no_process(system: ActorSystem) -> None:
    with pytest.raises(KeyError, match="broken") as caught:
        await system.spawn(Recorder, fail=KeyError("broken"))
    assert not psutil.pid_exists(caught.value.remote_origin.pid)
    with pytest.raises(KeyError, match="broken"):
        await system.spawn(Recorder, fail=KeyError("broken"), in_process=True)


async def test_deadlines_end_calls(actor: ActorHandle) -> None:
    await actor.add(0)
    with pytest.raises(DeadlineError, match=r"'rec' .* no answer to wait\(\) within 0\.3 s"):
        await actor.call("wait", 60, deadline_s=0.3)  # it has begun by then, on a loaded machine too
    assert await actor.get_events() == ["wait cancelled"]
    with pytest.raises(DeadlineError):
        await actor.call("block", deadline_s=0.05)
    await actor.release()
    assert await actor.add(1) == 6  # after the call, which went on


async def test_cancelling_the_task_cancels_the_method(actor: ActorHandle) -> None:
    task = asyncio.create_task(actor.wait(60))
    await asyncio.sleep(0)
    await actor.add(0)  # behind the call on the same channel: it has begun
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await actor.add(0)
    assert await actor.get_events() == ["wait cancelled"]


async def test_a_cancelled_blocking_call_that_waits_its_turn_never_runs(actor: ActorHandle) -> None:
    first = asyncio.create_task(actor.block())
    second = asyncio.create_task(actor.sleep(0.1))
    while not await actor.peek_events():
        pass
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await actor.peek_events()  # behind the cancellation on the same channel
    await actor.release()
    assert await first == "released"
    assert await actor.get_events() == ["block"]


@pytest.mark.parametrize(
    ("how", "text"), [("segfault", r"killed by signal 11 \(SIGSEGV\)"), ("exit", "exited with code 5")]
)
async def test_calls_of_a_dead_actor_fail_with_its_last_words(
    system: ActorSystem, how: str, text: str
) -> None:
    actor = await system.spawn(Recorder, name="rec")
    waiting = asyncio.create_task(actor.wait(60))
    await asyncio.sleep(0)
    with pytest.raises(PeerLostError, match=rf"(?s)\(Recorder, pid {actor.pid}\) {text}.*last words"):
        await actor.end(how)
    with pytest.raises(ActorLostError) as caught:
        await waiting
    assert (caught.value.pid, caught.value.role) == (actor.pid, "rec")
    status = await actor.exited
    assert caught.value.exit_status == status
    assert "last words" in status.stderr_lines
    with pytest.raises(PeerLostError, match=r"before add\(\) was called"):
        await actor.add(1)


async def test_stop_runs_the_actors_own_stop(system: ActorSystem, tmp_path: Path) -> None:
    actor = await system.spawn(Stopper, str(tmp_path / "a"))
    status = await actor.stop()
    assert status.exit_code == 0
    assert (tmp_path / "a").read_text() == "stopped"
    assert await actor.stop() == status
    hanging = await system.spawn(Stopper, str(tmp_path / "b"), "hang")
    assert (await hanging.stop(timeout_s=0.2)).signal_number == signal.SIGKILL
    raising = await system.spawn(Stopper, str(tmp_path / "c"), "raise")
    with pytest.raises(RuntimeError, match="cannot stop"):
        await raising.stop()
    assert raising.exited.done()


async def test_programs_and_processes_that_an_actor_starts_can_be_terminated(system: ActorSystem) -> None:
    actor = await system.spawn(Terminator)
    assert await actor.terminate_program() == -signal.SIGTERM
    assert await actor.terminate_fork() == -signal.SIGTERM


async def test_an_in_process_actor_that_hangs_is_abandoned(system: ActorSystem) -> None:
    actor = await system.spawn(Recorder, in_process=True)
    task = asyncio.create_task(actor.wait(60))
    await actor.add(0)
    actor.kill()
    with pytest.raises(PeerLostError):
        await task
    with pytest.raises((PeerLostError, ClosedError)):
        await actor.add(1)


async def test_a_stopped_system_is_closed_and_stop_is_idempotent() -> None:
    system = ActorSystem()
    actor = await system.spawn(Recorder)
    await asyncio.gather(system.stop(), system.stop())
    assert actor.exited.done()
    with pytest.raises(ClosedError, match="make a new one"):
        await system.spawn(Recorder)


async def test_messages_are_bounded_on_both_sides() -> None:
    async with ActorSystem(max_message_bytes=100_000) as system:
        actor = await system.spawn(Recorder)
        with pytest.raises(ProtocolError, match="100000"):
            await actor.echo(np.zeros(100_000))
        with pytest.raises(ProtocolError, match="100000"):
            await actor.apply(lambda actor: __import__("numpy").zeros(100_000))
        assert await actor.add(1) == 1


async def test_an_actor_may_have_actors(system: ActorSystem) -> None:
    class Parent:
        async def sum_of_children(self, num: int) -> int:
            async with ActorSystem() as inner:
                children = [await inner.spawn(Recorder, number) for number in range(num)]
                return sum([await child.add(1) for child in children])

        async def own_child(self) -> int:
            self.inner = await ActorSystem().start()
            self.child = await self.inner.spawn(Recorder)
            return self.child.pid

    parent = await system.spawn(Parent)
    assert await parent.sum_of_children(2) == 3
    grandchild = psutil.Process(await parent.own_child())
    parent.kill()
    await parent.exited
    assert is_gone(grandchild)


# Writes when its parent has ended: the parent's pipe to it is closed.
ECHO = "import sys; sys.stdin.read(); print('OOM hangs: the child\\'s line', file=sys.stderr, flush=True)"


class Dying:
    """Ends its process in several ways."""

    def end(self, text: str) -> None:
        subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE)
        print("OOM hangs: this is not why", file=sys.stderr)
        end_process(72, LastWords("", text, "  a frame\n"))

    async def break_loop(self) -> None:
        asyncio.get_running_loop().call_soon(_exit, "broken loop")

    def exit_silently(self) -> None:
        os._exit(9)


def _exit(text: str) -> None:
    raise SystemExit(text)


async def test_the_words_of_a_process_are_told_from_its_childrens(system: ActorSystem) -> None:
    actor = await system.spawn(Dying, name="d")
    with pytest.raises(ActorLostError) as caught:
        await actor.end("env runner 1 hangs: for this reason\nand more")
    error = caught.value
    why = f"actor 'd' (Dying, pid {actor.pid}) exited with code 72 during a call of end()"
    said = "\nIts last words:\n    a frame\n  env runner 1 hangs: for this reason\n  and more"
    assert str(error) == why + said
    assert first_line(error) == f"{why}: env runner 1 hangs: for this reason."
    lost = lost_error(actor)
    assert str(lost) == f"d (pid {actor.pid}) exited with code 72.{said}"


async def test_an_error_at_the_root_of_a_process_is_its_last_words(system: ActorSystem) -> None:
    actor = await system.spawn(Dying)
    await actor.break_loop()
    words = (await actor.exited).last_words
    assert words is not None
    assert words.summary == "SystemExit: broken loop"
    why = r"code 70 during .*\nIts last words:\n +File .*test_actor_system.py.*in _exit\n.*\n  SystemExit: broken loop$"
    with pytest.raises(ActorLostError, match=rf"(?s){why}"):
        await actor.exit_silently()
