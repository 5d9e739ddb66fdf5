"""Actor classes that the tests spawn."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from rlzmq.core.errors import ConfigurationError


class OwnError(ValueError):
    """A type that the other side does not know."""


class Terminator:
    """Starts processes and terminates them, as environments do with their simulators."""

    def terminate_program(self) -> int:
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return program.wait()

    def terminate_fork(self) -> int | None:
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        fork.start()
        fork.terminate()
        fork.join()
        return fork.exitcode


class Recorder:
    """Does a little of everything."""

    constant = 3

    def __init__(self, start: int = 0, fail: BaseException | None = None) -> None:
        if fail is not None:
            raise fail
        self.total = start
        self.events: list[str] = []
        self.is_released = threading.Event()

    def add(self, number: int, *, times: int = 1) -> int:
        self.total += number * times
        return self.total

    def echo(self, value: Any) -> Any:
        return value

    def where(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "cwd": os.getcwd(),
            "thread": threading.current_thread().name,
            "is_main_thread": threading.current_thread() is threading.main_thread(),
            "environ": os.environ.get("RLZMQ_TEST"),
            "path": list(sys.path),
        }

    async def loop_thread(self) -> tuple[str, str]:
        return threading.current_thread().name, type(asyncio.get_running_loop()).__module__

    def torch_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def matmul(self) -> float:
        import torch

        return float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())

    def random(self) -> float:
        return float(np.random.random())

    def sleep(self, seconds: float) -> str:
        self.events.append(f"sleep {seconds}")
        time.sleep(seconds)
        return "slept"

    def block(self) -> str:
        """Blocks the actor's thread until it is released."""
        self.events.append("block")
        self.is_released.wait()
        return "released"

    async def release(self) -> None:
        self.is_released.set()

    async def wait(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.events.append("wait cancelled")
            raise
        return "waited"

    def get_events(self) -> list[str]:
        return self.events

    async def peek_events(self) -> list[str]:
        return self.events

    def raise_error(self, kind: str) -> None:
        if kind == "own":
            raise OwnError("my own", 7)
        errors: dict[str, BaseException] = {
            "os": FileNotFoundError(2, "No such file", "x.txt"),
            "rlzmq": ConfigurationError("bad lr"),
            "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            "exit": SystemExit(3),
            "cancelled": asyncio.CancelledError(),
        }
        raise errors[kind]

    def end(self, how: str) -> None:
        print("last words", file=sys.stderr, flush=True)
        if how == "segfault":
            ctypes.string_at(0)
        elif how == "exit":
            os._exit(5)
        os.kill(os.getpid(), 9)

    def _private(self) -> None:
        pass


class Stopper:
    """Has a ``stop`` of its own."""

    def __init__(self, path: str, how: str = "") -> None:
        self.path = path
        self.how = how

    def stop(self) -> None:
        if self.how == "hang":
            time.sleep(60)
        if self.how == "raise":
            raise RuntimeError("cannot stop")
        with open(self.path, "w") as file:
            file.write("stopped")
