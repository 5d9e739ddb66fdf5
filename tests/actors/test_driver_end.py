"""However a driver ends, whatever it is, nothing of it is left: processes, directories, sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil
import pytest
from actor_checks import is_gone

# The class is defined in __main__, in a script without a guard. Preloading nothing makes it quick.
SCRIPT = """
import asyncio, os
from rlzmq.actors import forkserver
from rlzmq.actors.system import ActorSystem

forkserver.prestart(preload=[])
OFFSET = 1

class Worker:
    def __init__(self, number):
        self.number = number + OFFSET

    def pids(self):
        import subprocess
        return [os.getpid(), os.getppid(), subprocess.Popen(["sleep", "60"]).pid]

    def get(self):
        return self.number

async def main(how):
    async with ActorSystem() as system:
        workers = [await system.spawn(Worker, number) for number in range(2)]
        assert [await worker.get() for worker in workers] == [1, 2]
        pids = [pid for worker in workers for pid in await worker.pids()]
        print(*pids, flush=True)
        if how == "raise":
            raise ZeroDivisionError("the user's error")
        if how == "return":
            return
        await asyncio.sleep(60)

"""
RUN = 'asyncio.run(main("{how}"))\n'


def start(runtime_dir: Path, arguments: list[str], text: str = "") -> tuple[subprocess.Popen[str], list[int]]:
    """A driver script under way: the process, and the pids of its actors, their parents and children."""
    driver = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_dir)},
        cwd=runtime_dir,
    )
    assert driver.stdin is not None
    driver.stdin.write(text)
    driver.stdin.close()
    return driver, [int(pid) for pid in pipe(driver.stdout).readline().split()]


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def finish(driver: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    with driver:
        stderr = pipe(driver.stderr).read()
        return driver.wait(), stderr


@pytest.mark.parametrize("source", ["stdin", "file"])
def test_classes_of_main_need_no_module_and_no_guard(runtime_dir: Path, tmp_path: Path, source: str) -> None:
    text = SCRIPT + RUN.format(how="return")
    if source == "stdin":
        driver, pids = start(runtime_dir, ["-"], text)
    else:
        (tmp_path / "local_module.py").write_text("VALUE = 41\n")
        text = text.replace("OFFSET = 1", "import local_module\nOFFSET = local_module.VALUE - 40")
        (tmp_path / "script.py").write_text(text)
        driver, pids = start(runtime_dir, [str(tmp_path / "script.py")])
    code, stderr = finish(driver)
    assert code == 0, stderr
    assert stderr == ""
    assert len(pids) == 6
    assert_nothing_left(pids, runtime_dir)


def test_nothing_is_left_after_an_exception(runtime_dir: Path) -> None:
    driver, pids = start(runtime_dir, ["-c", SCRIPT + RUN.format(how="raise")])
    code, stderr = finish(driver)
    assert code == 1, stderr
    assert "the user's error" in stderr
    assert_nothing_left(pids, runtime_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(runtime_dir: Path, number: signal.Signals) -> None:
    driver, pids = start(runtime_dir, ["-c", SCRIPT + RUN.format(how="wait")])
    # Ctrl-C goes to the whole foreground group: the actors are in none of its groups.
    assert os.getpgid(driver.pid) not in {os.getpgid(pid) for pid in pids}
    driver.send_signal(number)
    code, stderr = finish(driver)
    assert code == -number, stderr
    assert_nothing_left(pids, runtime_dir)


def test_nothing_is_left_of_a_driver_that_dies_while_the_server_imports_more(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_import.py").write_text("import time\nprint('imports', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    how = "        if how == 'preload':\n            system.preload(['slow_import'])\n"
    text = SCRIPT.replace("        await asyncio.sleep(60)\n", how + "        await asyncio.sleep(60)\n")
    driver, pids = start(runtime_dir, ["-c", text + RUN.format(how="preload")])
    assert pipe(driver.stdout).readline() == "imports\n"
    driver.kill()
    finish(driver)
    assert_nothing_left(pids, runtime_dir)


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


def test_a_sync_driver_may_forget_to_stop(runtime_dir: Path) -> None:
    text = SCRIPT + (
        "from rlzmq.actors.loop_thread import get_loop_thread\n"
        "run = get_loop_thread().run\n"
        "system = ActorSystem()\n"
        "worker = run(system.spawn(Worker, 0))\n"
        "print(*run(worker.pids()), flush=True)\n"
    )
    driver, pids = start(runtime_dir, ["-c", text])
    code, stderr = finish(driver)
    assert code == 0, stderr
    assert_nothing_left(pids, runtime_dir)


def assert_nothing_left(pids: list[int], runtime_dir: Path) -> None:
    assert pids
    end = time.monotonic() + 10.0  # 0.1 s on an idle machine
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert is_gone(psutil.Process(pid), max(0.0, end - time.monotonic())), pid
    while list(runtime_dir.iterdir()) and time.monotonic() < end:
        time.sleep(0.002)
    assert list(runtime_dir.iterdir()) == []
