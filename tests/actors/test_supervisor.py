"""A supervised actor comes back with back-off; fail fast is the default; the first failure is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from actor_classes import Recorder

from rlzmq.actors.exit_status import ActorLostError
from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.supervisor import Supervisor
from rlzmq.actors.system import ActorSystem
from rlzmq.core.errors import ClosedError
from rlzmq.protocol.supervision import RestartPolicy

pytestmark = pytest.mark.timeout(60)
QUICK = RestartPolicy(max_restarts=2, first_delay_s=0.01)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem() as system:
        yield system


async def test_a_killed_actor_comes_back_as_the_next_incarnation(system: ActorSystem) -> None:
    lost: list[BaseException] = []
    restored: list[ActorHandle] = []
    came_back = asyncio.Event()

    async def on_restart(handle: ActorHandle) -> None:
        restored.append(handle)
        await handle.add(100)
        came_back.set()

    supervisor = Supervisor(
        lambda incarnation: system.spawn(Recorder, incarnation, name=f"worker-{incarnation}"),
        policy=QUICK,
        on_lost=lost.append,
        on_restart=on_restart,
    )
    first = await supervisor.start()
    assert await supervisor.ready() is first
    running = asyncio.create_task(supervisor.run())
    first.kill()
    await asyncio.wait_for(came_back.wait(), 20)
    again = await supervisor.ready()
    assert await again.add(0) == 101
    assert again is supervisor.handle
    assert (restored, supervisor.num_restarts) == ([again], 1)
    assert isinstance(supervisor.first_failure, ActorLostError)
    assert lost == [supervisor.first_failure]
    await supervisor.stop()
    await running
    assert again.exited.done()
    with pytest.raises(ClosedError):
        await supervisor.start()


async def test_the_default_fails_fast(system: ActorSystem) -> None:
    supervisor = Supervisor(lambda incarnation: system.spawn(Recorder))
    handle = await supervisor.start()
    handle.kill()
    with pytest.raises(ActorLostError, match="killed by signal 9"):
        await supervisor.run()
    with pytest.raises(ClosedError):
        await supervisor.ready()


async def test_a_spent_budget_raises_the_first_failure_last(system: ActorSystem) -> None:
    async def spawn(incarnation: int) -> ActorHandle:
        if incarnation:
            raise KeyError(f"consequence {incarnation}")
        return await system.spawn(Recorder, name="origin")

    supervisor = Supervisor(spawn, policy=QUICK)
    handle = await supervisor.start()
    handle.kill()
    with pytest.raises(ActorLostError, match="origin") as caught:
        await supervisor.run()
    assert "given up after 3 failures within 60 s" in caught.value.__notes__[0]
    assert isinstance(caught.value.__cause__, KeyError)
    assert "consequence 2" in str(caught.value.__cause__)


async def test_a_failed_first_start_is_raised_at_once(system: ActorSystem) -> None:
    supervisor = Supervisor(lambda incarnation: system.spawn(Recorder, fail=KeyError("no")), policy=QUICK)
    with pytest.raises(KeyError, match="no"):
        await supervisor.start()


async def test_stop_during_the_back_off_ends_it(system: ActorSystem) -> None:
    lost = asyncio.Event()
    policy = RestartPolicy(first_delay_s=60.0, max_delay_s=60.0)
    supervisor = Supervisor(lambda _: system.spawn(Recorder), policy=policy, on_lost=lambda _: lost.set())
    handle = await supervisor.start()
    running = asyncio.create_task(supervisor.run())
    handle.kill()
    await lost.wait()
    await supervisor.stop()
    await running
    assert supervisor.handle is None
