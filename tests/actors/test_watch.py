"""Processes that hang are killed; those that are busy, or get no core, are not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq.actors import system
from rlzmq.actors.process_state import ActorLostError
from rlzmq.actors.system import ActorSystem, Watched
from rlzmq.core.patience import Patience


class Worker:
    """An actor whose event loop and thread can be blocked."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251

    async def stop_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


async def test_who_blocks_its_loop_or_is_stopped_is_killed_and_who_works_is_not() -> None:
    async with ActorSystem() as system:
        busy, blocked, stopped = [
            await system.spawn(Worker, name=name, patience=Patience(1.0))
            for name in ("busy", "blocked", "stopped")
        ]
        works = asyncio.ensure_future(busy.sleep(4.0))
        with pytest.raises(ActorLostError, match=r"'blocked'.*no answer for") as caught:
            await blocked.block(600)
        assert "in block" in str(caught.value)
        with pytest.raises(ActorLostError, match="SIGSTOP"):
            await stopped.stop_itself()
        await works


# -- one process, without a process ---------------------------------------------------------------


class Machine:
    """A process, as `Watched` sees it, and what its machine does."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, is_spared: bool = False, patience: Any = None
    ) -> None:
        self.pid, self.has_started = 4711, True
        self.is_stopped = self.answers = self.is_starved = False
        self.now = 0.0
        monkeypatch.setattr(system, "is_stopped", lambda pid: self.is_stopped)
        self.watched = Watched(self, patience or Patience(3.0), lambda: is_spared)  # type: ignore[arg-type]
        wait: Any = SimpleNamespace(begin=lambda pid: None, take_s=lambda: 0.45 if self.is_starved else 0.0)
        self.watched._core_wait = wait

    async def beat(self) -> None:
        while not self.answers:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def hangs_within(self, seconds: float) -> str:
        """Look twice a second; return what it says first, and note when."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            if why := self.watched.look(self.now):
                return why
            for _ in range(3):
                await asyncio.sleep(0)
        return ""


async def test_who_gets_no_core_has_its_time_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.is_starved = True
    assert await machine.hangs_within(25) == ""
    machine.is_starved = False
    assert "no answer for" in await machine.hangs_within(4)


@pytest.mark.parametrize(("is_spared", "what"), [(False, "SIGSTOP"), (True, "stopped")])
async def test_who_is_stopped_is_killed_or_continued_if_nobody_has_what_it_has(
    monkeypatch: pytest.MonkeyPatch, is_spared: bool, what: str
) -> None:
    machine = Machine(monkeypatch, is_spared=is_spared)
    machine.is_stopped = True
    assert what in await machine.hangs_within(1.0)
