"""However a driver or an actor ends, nothing that it started is left: processes, directories, sockets, memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
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

# The class is defined in __main__, in a script without a guard. Preloading nothing makes it quick.
SCRIPT = """
import asyncio, os, subprocess, sys
from rlzmq.actors import forkserver
from rlzmq.actors.system import ActorSystem

forkserver.PRELOAD = ()
forkserver.get_fork_server()

class Worker:
    def pids(self):
        return [os.getpid(), os.getppid(), subprocess.Popen(["sleep", "60"]).pid]

async def main():
    async with ActorSystem() as system:
        workers = [await system.spawn(Worker) for _ in range(2)]
        print(*[pid for worker in workers for pid in await worker.pids()], flush=True)
        if len(sys.argv) > 1:
            system.preload(sys.argv[1:])
            child = forkserver.get_fork_server().spawn("released")
            await child.started
            child.close()
        await asyncio.sleep(60)

asyncio.run(main())
"""


MODULES = {
    "slow_import": "import time\nprint('imports', flush=True)\ntime.sleep(60)\n",
    "ends_inside": """
import os, selectors

server, driver = os.getpid(), os.getppid()
remove = selectors._BaseSelectorImpl.unregister

def unregister(selector, file):
    key = remove(selector, file)
    if os.getpid() == server:
        print("imports", flush=True)
        while os.getppid() == driver:
            pass
    return key

selectors._BaseSelectorImpl.unregister = unregister
""",
}
"""What the fork server imports: one takes long, one waits for the driver to end while the server forgets a child."""


@pytest.mark.parametrize(
    ("number", "imports"),
    [
        (signal.SIGINT, []),
        pytest.param(signal.SIGKILL, [], marks=pytest.mark.slow),
        *((signal.SIGKILL, [name]) for name in MODULES),
    ],
)
def test_nothing_is_left_after_a_signal_whatever_the_server_does(
    number: signal.Signals, imports: list[str], runtime_dir: Path, tmp_path: Path
) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *imports], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": str(tmp_path)}, cwd=runtime_dir,
    )  # fmt: skip
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 6
    # Ctrl-C goes to the whole foreground group: the actors are in none of its groups.
    assert os.getpgid(driver.pid) not in {os.getpgid(pid) for pid in pids}
    if imports:
        assert driver.stdout.readline() == "imports\n"
    driver.send_signal(number)
    _, stderr = driver.communicate()
    assert driver.returncode == -number, stderr
    end = time.monotonic() + 10.0  # 0.1 s on an idle machine
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert is_gone(psutil.Process(pid), max(0.0, end - time.monotonic())), pid
    while list(runtime_dir.iterdir()) and time.monotonic() < end:
        time.sleep(0.002)
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.alone
def test_the_server_starts_at_once_and_leaves_torch_alone() -> None:
    script = """
import sys, time
from pathlib import Path
start = time.perf_counter()
from rlzmq.actors import forkserver
forkserver.get_fork_server()
seconds = time.perf_counter() - start
assert "torch" not in sys.modules and "numpy" not in sys.modules
is_warm = "libtorch" in Path(f"/proc/{forkserver.get_fork_server().pid}/maps").read_text()
assert seconds < 1.0 or not is_warm, seconds  # about 0.05 s on an idle machine
"""
    subprocess.run([sys.executable, "-c", script], check=True)


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
