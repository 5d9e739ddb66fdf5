"""Whatever an actor's process started ends with it, and leaves no shared memory or semaphores behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import psutil
import pytest
from actor_checks import is_gone

from rlzmq.actors import forkserver
from rlzmq.actors.system import ActorSystem

# Starts a process in a session of its own and ends: an orphan.
DAEMON = """
import subprocess
sleeping = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print(sleeping.pid, flush=True)
"""


def spin() -> None:
    while True:
        pass


class Family:
    """Has a child that never listens, a child in a session of its own, an orphan, semaphores and shared memory."""

    def start(self) -> tuple[list[int], list[str]]:
        context = get_context("forkserver")
        self.locks = [context.Lock() for _ in range(3)]
        self.memory = SharedMemory(create=True, size=4096)
        self.spinning: Any = context.Process(target=spin)
        self.spinning.start()
        own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
        orphan = subprocess.run([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, text=True, check=True)
        names = [f"sem.{lock._semlock.name.lstrip('/')}" for lock in self.locks]
        return [self.spinning.pid, own_session.pid, int(orphan.stdout)], [*names, self.memory.name]

    def sockets(self) -> list[str]:
        """Sockets of multiprocessing's own fork server."""
        return [str(path) for path in Path(get_temp_dir()).glob("listener-*")]


def left(processes: list[psutil.Process], names: list[str]) -> list[str]:
    alive = [str(process.pid) for process in processes if not is_gone(process, 0.0)]
    return alive + [name for name in names if Path("/dev/shm", name).exists()]


async def family_of(actor: Any) -> tuple[list[psutil.Process], list[str]]:
    pids, names = await actor.start()
    return [psutil.Process(pid) for pid in pids], names


async def until_nothing_is_left(processes: list[psutil.Process], names: list[str]) -> None:
    async with asyncio.timeout(30):  # the tracker ends by itself, a moment after the others
        while left(processes, names):  # noqa: ASYNC110 (facts of the kernel's)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["signal", "stop", "fork server"])
async def test_a_family_ends_with_its_actor(system: ActorSystem, how: str) -> None:
    other = await system.spawn(Family, name="other")
    actor = await system.spawn(Family, name="actor")
    others = await family_of(other)
    processes, names = await family_of(actor)
    sockets = await actor.sockets()
    assert len(left(processes, names)) == 7
    assert len(left([], sockets)) == 1
    assert all(system.run_directory.path in Path(path).parents for path in sockets)
    if how == "signal":
        psutil.Process(actor.pid).kill()
    elif how == "stop":
        await actor.stop()
    else:
        forkserver.get_fork_server().send_signal(signal.SIGKILL)
        for process in [*processes[1:], *others[0][1:]]:  # in a session of its own: init's now, and not found
            process.kill()
        others = ([], [])
    await actor.exited
    await until_nothing_is_left(processes, [*names, *sockets])
    assert len(left(*others)) == len(others[0]) + len(others[1]), "the other one's family lives on"
