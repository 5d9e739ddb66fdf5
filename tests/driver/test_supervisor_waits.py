"""Waiting for what a supervisor's processes do."""

from __future__ import annotations

import asyncio

import pytest

from rlzmq.driver.supervision import Supervisor


async def test_an_event_that_is_cleared_before_its_waiter_goes_on_is_waited_for_again() -> None:
    supervisor, event = Supervisor(), asyncio.Event()
    waiter = asyncio.create_task(supervisor.wait_for(event))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()  # e.g. a process is there,
    event.clear()  # and dies in the same turn of the loop
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiter.done()
    event.set()
    await waiter


async def test_a_failure_of_the_run_ends_the_wait() -> None:
    supervisor, event = Supervisor(), asyncio.Event()
    waiter = asyncio.create_task(supervisor.wait_for(event))
    await asyncio.sleep(0)
    supervisor.fail(OSError("no more processes"))
    with pytest.raises(OSError, match="no more processes"):
        await waiter
