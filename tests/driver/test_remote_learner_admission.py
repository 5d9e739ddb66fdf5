"""RemoteLearnerListener and remote learners on one event loop: losses, survivors, shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.cli.joining import make_config
from rlzmq.driver.join_files import JoinKeys
from rlzmq.driver.remote_learners import RemoteLearnerListener
from rlzmq.net.keys import JoinFile
from rlzmq.roles.learner_role import RemoteLearner
from tests.support.runs import listening


class Meeting:
    """A door, and learners that come to it."""

    def __init__(self, tmp_path: Path) -> None:
        self.config = listening(tmp_path, num_remote_learners=2).learners(num_learners=2)
        self.keys = JoinKeys.generate()
        spaces = (gym.spaces.Box(-1.0, 1.0, (4,), np.float32), gym.spaces.Discrete(2))
        self.door = RemoteLearnerListener(self.config, self.keys, spaces)
        self.runs: list[asyncio.Task[None]] = []

    def learner(self, make: Any = make_config) -> tuple[RemoteLearner, asyncio.Task[None]]:
        join: JoinFile = self.keys.join_file("learner", {"control": self.door.control_address, "data": ""})
        learner = RemoteLearner(join, make, preferred_rank=-1, timeout_s=20)
        run = asyncio.create_task(learner.run())
        self.runs.append(run)
        return learner, run

    async def came(self, num: int) -> None:
        while len(self.door._waiting) < num:
            self.door._came.clear()
            await self.door._came.wait()


@pytest.fixture
async def meeting(tmp_path: Path) -> AsyncIterator[Meeting]:
    meeting = Meeting(tmp_path)
    await meeting.door.start()
    try:
        yield meeting
    finally:
        await meeting.door.close()
        for run in meeting.runs:
            run.cancel()
        await asyncio.gather(*meeting.runs, return_exceptions=True)


async def test_a_learner_that_breaks_its_connection_takes_no_other_with_it(meeting: Meeting) -> None:
    first, _ = meeting.learner()
    dying = await meeting.door.take(meeting.config, 0)
    _, run = meeting.learner()
    living = await meeting.door.take(meeting.config, 1)
    _, spare = meeting.learner()
    await meeting.came(1)
    first._socket.close(0)
    await dying.exited
    # Everybody was asked for a sign by now, and whoever could not read the question would have left.
    assert await living.ping() == 0
    replacement = await meeting.door.take(meeting.config, 0, replaces=True)
    assert await replacement.ping() == 0
    assert not run.done()
    assert not spare.done()


async def test_all_end_in_order_with_the_run(meeting: Meeting, caplog: pytest.LogCaptureFixture) -> None:
    is_building, may_build = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(packed: Any) -> Any:
        loop.call_soon_threadsafe(is_building.set)
        asyncio.run_coroutine_threadsafe(may_build.wait(), loop).result()
        return make_config(packed)

    _, rank = meeting.learner()
    handle = await meeting.door.take(meeting.config, 0)
    _, built = meeting.learner(slow)
    taking = asyncio.create_task(meeting.door.take(meeting.config, 1))
    await is_building.wait()
    _, spare = meeting.learner()
    await meeting.came(1)
    with caplog.at_level(logging.WARNING):
        assert (await handle.stop()).signal_number is None
        taking.cancel()
        await asyncio.wait((taking,))
        await meeting.door.close()
    may_build.set()
    await asyncio.gather(rank, built, spare)  # none of them raises
    news = [record.getMessage() for record in caplog.records if record.name.startswith("rlzmq")]
    assert news == []  # an end in order is none
