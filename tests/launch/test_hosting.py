"""What Ray's and Dask's engines refuse, and the host of one process of a role on a node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import MissingPackageError
from rlzmq.launch import hosts
from rlzmq.launch.engine import Jobs, engine_of
from rlzmq.net.keys import JoinFile
from tests.support.runs import until

_DEADLINE_S = 60.0


class Cluster:
    """A cluster that keeps what it is given."""

    sees = True

    def __init__(self, package: Any, address: str) -> None:
        self.submitted: dict[str, dict[str, object]] = {}

    def submit(self, name: str, host: Any, asked: Any, memory: int, options: dict[str, object]) -> None:
        self.submitted[name] = options

    def names(self) -> set[str]:
        return set(self.submitted)

    def cancel(self, name: str) -> None:
        del self.submitted[name]

    def seen_by(self, path: str) -> dict[str, bool]:
        return {"n1": Path(path).exists(), "n2": self.sees}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[Cluster]:
    monkeypatch.setitem(hosts._CLUSTERS, "ray", ("json", Cluster))
    monkeypatch.setattr(Cluster, "sees", True)
    return Cluster


def jobs(tmp_path: Path, cluster: str) -> Jobs:
    (tmp_path / "cluster.toml").write_text(cluster)
    return Jobs.of("ray", ["ppo"], tmp_path / "cluster.toml", tmp_path / "run")


@pytest.mark.parametrize(
    ("on", "package"), [("ray", "ray"), ("ray://h:1", "ray"), ("dask://h:1", "distributed")]
)
def test_the_missing_extra_is_named(
    on: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"rlzmq\[{on[:3]}"):
        engine_of(Jobs.of(on, [], None, tmp_path))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("key", ['time = "1:00"', 'image = "x"', 'options = ["no value"]'])
def test_what_the_engine_does_not_have_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigurationError):
        engine_of(jobs(tmp_path, f"[head]\n{key}\n")).start("head")


def test_nodes_without_the_run_directory_are_refused(tmp_path: Path, cluster: type[Cluster]) -> None:
    engine: Any = engine_of(jobs(tmp_path, "[head]\noptions = ['workers=[\"n1\"]']\n"))
    cluster.sees = False
    with pytest.raises(ConfigurationError, match="n2"):
        engine.start("head")
    cluster.sees = True
    engine.start("head")
    assert list(engine._cluster.submitted.values()) == [{"workers": ["n1"]}]


@pytest.mark.usefixtures("cluster")
def test_tasks_are_added_and_those_with_the_highest_numbers_removed(tmp_path: Path) -> None:
    engine: Any = engine_of(jobs(tmp_path, "[runners]\ncount = 2\n"))
    for role in ("head", "runners"):
        engine.start(role)
    engine.scale("runners", 4)
    engine.end("runners", [1], 0.0)  # one has left
    engine.scale("runners", 4)
    assert sorted(engine.living("runners")) == [0, 1, 2, 3]
    engine.scale("runners", 1)
    assert [Path(name).name for name in engine._cluster.submitted] == ["head", "runners-0"]


class Host:
    """A host that was started in a directory as a node's."""

    def __init__(self, tmp_path: Path, code: str, name: str = "runners-0", over: str = "false") -> None:
        self.jobs, self.name = tmp_path / "jobs", name
        self.jobs.mkdir(exist_ok=True)
        key = self.jobs / "join.toml"
        argv = [sys.executable, "-m", "rlzmq.launch.hosts", name, str(key), sys.executable, "-c", code]
        environ = {
            **os.environ,
            "RLZMQ_HEAD": "h",
            "RLZMQ_OVER": over,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        self.process = subprocess.Popen(argv, env=environ)

    @property
    def log(self) -> str:
        path = self.jobs / f"{self.name}.log"
        return path.read_text() if path.exists() else ""

    def until(self, is_true: Callable[[], object]) -> None:
        until(is_true, lambda: self.log, _DEADLINE_S)

    def ends(self) -> int:
        return self.process.wait(_DEADLINE_S)


def head_listens(tmp_path: Path, port: int) -> str:
    file = tmp_path / "jobs" / "join.toml"
    file.parent.mkdir(exist_ok=True)
    JoinFile("runner", {"data": f"tcp://127.0.0.1:{port}"}).write(file)
    return file.read_text()


def test_a_peer_gets_the_key_by_its_standard_input_and_is_started_again_until_the_head_has_ended(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, "import sys; print(sys.stdin.read(), flush=True); sys.exit(69)")
    key = head_listens(tmp_path, 1000)
    host.until(lambda: host.log.count(key) >= 2)
    (tmp_path / "jobs" / "head.code").write_text("0")
    assert host.ends() == 0


def test_a_peer_without_a_key_begins_nothing_when_the_run_is_over(tmp_path: Path) -> None:
    host = Host(tmp_path, "print('begun')", over="true")
    assert host.ends() == 0
    assert not (tmp_path / "jobs" / "runners-0.log").exists()


def test_a_peer_that_is_wrong_ends_the_run(tmp_path: Path) -> None:
    head = Host(tmp_path, "import time; print('begun', flush=True); time.sleep(100)", "head")
    head.until(lambda: head.log)
    head_listens(tmp_path, 1000)
    assert Host(tmp_path, "import sys; sys.exit(78)").ends() == 0
    assert head.ends() == 0
    assert (tmp_path / "jobs" / "head.code").read_text() == "75"


def test_a_process_ends_when_it_shall_and_when_the_head_is_another_one(tmp_path: Path) -> None:
    head_listens(tmp_path, 1000)
    host = Host(tmp_path, "import time\nprint('begun', flush=True)\nwhile True: time.sleep(1)")
    host.until(lambda: host.log)
    head_listens(tmp_path, 2000)
    host.until(lambda: host.log.count("begun") == 2)
    (tmp_path / "jobs" / "runners-0.end").write_text("30.0")
    assert host.ends() == 0


@pytest.mark.parametrize(
    ("code", "times"),
    [("os._exit(70)", 1), ("os.kill(os.getpid(), 9)", 2)],
)
def test_a_head_is_repeated_when_it_was_interrupted_and_not_when_it_is_wrong(
    tmp_path: Path, code: str, times: int
) -> None:
    count = "import os; print('begun', flush=True)"
    host = Host(tmp_path, f"{count}; {code}", "head")
    host.until(lambda: host.log.count("begun") >= times)
    if times == 2:
        (tmp_path / "jobs" / "head.end").write_text("0")
    host.ends()
    assert (tmp_path / "jobs" / "head.code").read_text() == (code[9:-1] if times == 1 else "75")
