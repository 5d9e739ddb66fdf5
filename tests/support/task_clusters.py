"""Ray and Dask clusters on this machine, with real nodes: each a tree of processes that a test may kill.

Each node says that it has a GPU, whether it has one or not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support import runs

ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
DEADLINE_S = 300.0  # only a fault reaches it
until = functools.partial(runs.until, timeout_s=DEADLINE_S, every_s=0.2)


def why_missing(engine: str) -> str:
    """Return why there can be no such cluster here; "" if there can."""
    package = {"ray": "ray", "dask": "distributed"}[engine]
    return "" if importlib.util.find_spec(package) else f"not installed: pip install 'rlzmq[{engine}]'"


class Node:
    """A node of a cluster."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def tree(self) -> list[psutil.Process]:
        """Return all its processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [*root.children(recursive=True), root]
        return []

    def roles(self, words: str) -> list[psutil.Process]:
        """Return the processes of roles whose command lines contain these words."""
        found = []
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if line[1:3] == ["-m", "rlzmq"] and words in " ".join(line):
                    found.append(process)
        return found

    def lose(self) -> None:
        """Take its power."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class TaskCluster:
    """A cluster whose first node is never lost."""

    on: str
    from_outside: str
    """`on` from a machine that is no node."""
    head: str
    """The table of the head that keeps it on the first node."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rlzmq-tasks-"))
        self.nodes: list[Node] = []
        self.environ: dict[str, str] = {
            **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
        }  # fmt: skip
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None: ...

    def add_node(self) -> Node:
        raise NotImplementedError

    def start(self, argv: Sequence[object], ready: str, name: str) -> Node:
        """Start a node; wait until it says that it is ready."""
        log = self.directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*map(str, argv)], env=self.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, cwd=self.directory,
            )  # fmt: skip
        node = Node(process)
        self.nodes.append(node)
        until(
            lambda: ready in log.read_text() or process.poll() is not None,
            lambda: f"{name}: {log.read_text()}",
        )
        assert process.poll() is None, log.read_text()
        return node

    def roles(self, words: str) -> dict[int, Node]:
        """Return the ids of all processes of roles with these words, and where they are."""
        return {process.pid: node for node in self.nodes for process in node.roles(words)}

    def type(self, line: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            line.replace("rlzmq", f"exec {sys.executable} -m rlzmq", 1), shell=True, cwd=cwd, env=self.environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def close(self) -> None:
        """End all nodes."""
        for node in reversed(self.nodes):
            node.lose()
        shutil.rmtree(self.directory, ignore_errors=True)


class Ray(TaskCluster):
    on = "ray"
    head = """options = ['resources={"node:__internal_head__"=0.001}']"""

    def _make(self) -> None:
        self._port, client_port = free_ports(2)
        self.from_outside = f"ray://127.0.0.1:{client_port}"
        argv = ["--head", "--port", self._port, "--ray-client-server-port", client_port]
        self._start([*argv, f"--temp-dir={self.directory}/t"], "first")
        self.environ["RAY_ADDRESS"] = f"127.0.0.1:{self._port}"
        self.add_node()

    def _start(self, argv: Sequence[object], name: str) -> Node:
        common = ["--block", "--num-cpus=3", "--num-gpus=1", "--object-store-memory=100000000"]
        common += ["--include-dashboard=false"] if name == "first" else []
        return self.start([_BIN / "ray", "start", *common, *argv], "Ray runtime started", name)

    def add_node(self) -> Node:
        return self._start(["--address", f"127.0.0.1:{self._port}"], f"node{len(self.nodes)}")


class Dask(TaskCluster):
    head = """options = ['workers=["w1"]']"""

    def _make(self) -> None:
        (port,) = free_ports(1)
        self.on = self.from_outside = f"dask://127.0.0.1:{port}"
        self._address = f"tcp://127.0.0.1:{port}"
        argv = ["scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard"]
        self.start([_BIN / "dask", *argv], "Scheduler at", "scheduler")
        self.add_node()
        self.add_node()

    def add_node(self) -> Node:
        name = f"w{len(self.nodes)}"
        argv = ["worker", self._address, "--nthreads", "3", "--name", name, "--no-dashboard"]
        argv += ["--resources", "MEMORY=8e9 GPU=1", "--memory-limit", "0"]
        return self.start([_BIN / "dask", *argv], "Registered to", name)


ENGINES: Mapping[str, type[TaskCluster]] = {"ray": Ray, "dask": Dask}


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, outside of those that Ray and the kernel take."""
    found: list[int] = []
    for port in range(24100 + os.getpid() % 5000, 32000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found
