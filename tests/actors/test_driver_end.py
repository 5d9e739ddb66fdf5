"""However a driver ends, whatever it is, nothing of it is left: processes, directories, sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from actor_checks import is_gone

# The class is defined in __main__, in a script without a guard. Preloading nothing makes it quick.
SCRIPT = """
import asyncio, os, subprocess, sys
from rlzmq.actors import forkserver
from rlzmq.actors.system import ActorSystem

forkserver.prestart(preload=[])

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
    [(signal.SIGINT, []), (signal.SIGKILL, []), *((signal.SIGKILL, [name]) for name in MODULES)],
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
def test_prestart_returns_at_once_and_leaves_torch_alone() -> None:
    script = """
import sys, time
from pathlib import Path
start = time.perf_counter()
from rlzmq.actors import forkserver
forkserver.prestart()
seconds = time.perf_counter() - start
assert "torch" not in sys.modules and "numpy" not in sys.modules
is_warm = "libtorch" in Path(f"/proc/{forkserver.get_fork_server().pid}/maps").read_text()
assert seconds < 1.0 or not is_warm, seconds  # about 0.05 s on an idle machine
"""
    subprocess.run([sys.executable, "-c", script], check=True)
