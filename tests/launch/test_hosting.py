"""What Ray's and Dask's engines refuse, and one process of a role on a node."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import MissingPackageError
from rlzmq.launch import host as hosts
from rlzmq.launch.engine import Jobs, Role, engine_of
from rlzmq.launch.host import host
from rlzmq.launch.hosting import Hosting
from rlzmq.net.keys import JoinFile


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_POLL_S", 0.01)


def role(tmp_path: Path, code: str, name: str = "runners") -> Role:
    key = tmp_path / "jobs" / "join.toml"
    key.parent.mkdir(exist_ok=True)
    return Role(name=name, argv=(sys.executable, "-c", code, str(key)), key=key)


class Engine(Hosting):
    """Engine that keeps what it is given."""

    what = "The engine"

    def __init__(self, jobs: Jobs, seen: bool = True) -> None:
        super().__init__(jobs)
        self.seen = seen
        self.submitted: dict[str, dict[str, object]] = {}

    def call(self, role: Role, name: str, call: str, options: dict[str, object]) -> None:
        self.submitted[call] = options

    def calls(self) -> set[str]:
        return set(self.submitted)

    def cancel(self, call: str) -> None:
        del self.submitted[call]

    def seen_by(self, path: Path) -> dict[str, bool]:
        return {"n1": path.exists(), "n2": self.seen}


def jobs(tmp_path: Path, cluster: str) -> Jobs:
    (tmp_path / "cluster.toml").write_text(cluster)
    return Jobs.of("ray", ["ppo"], tmp_path / "cluster.toml", tmp_path / "run")


@pytest.mark.parametrize(
    ("on", "package"), [("ray", "ray"), ("ray://h:1", "ray"), ("dask://h:1", "distributed")]
)
def test_the_missing_extra_is_named(on: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"rlzmq\[{on[:3]}"):
        engine_of(Jobs(on=on, name="a", workdir=Path(), roles={}))


@pytest.mark.parametrize("key", ['time = "1:00"', 'image = "x"', 'options = ["no value"]'])
def test_what_the_engine_does_not_have_is_refused(tmp_path: Path, key: str) -> None:
    given = jobs(tmp_path, f"[head]\n{key}\n")
    with pytest.raises(ConfigurationError, match=key.partition(" ")[0]):
        Engine(given).start(given.roles["head"])


def test_nodes_without_the_run_directory_are_refused(tmp_path: Path) -> None:
    given = jobs(tmp_path, "[head]\noptions = ['workers=[\"n1\"]']\n")
    with pytest.raises(ConfigurationError, match="n2"):
        Engine(given, seen=False).start(given.roles["head"])
    engine = Engine(given)
    name = engine.start(given.roles["head"])
    assert engine.submitted == {name: {"workers": ["n1"]}}


def test_calls_are_added_and_those_with_the_highest_numbers_removed(tmp_path: Path) -> None:
    given = jobs(tmp_path, "[runners]\ncount = 2\n")
    engine = Engine(given)
    for each in given.roles.values():
        given.handles[each.name] = engine.start(each)
    runners = given.roles["runners"]
    engine.scale(runners, 4)
    engine.end(runners, [1], 0.0)  # one has left
    engine.scale(runners, 4)
    assert sorted(engine.living(runners)) == [0, 1, 2, 3]
    engine.scale(runners, 1)
    assert set(engine.submitted) == {given.handles["head"], f"{given.handles['runners']}-0"}


class Head:
    """What the head and its host leave in a directory, and a process that ends when this says so."""

    def __init__(self, tmp_path: Path) -> None:
        self.jobs = tmp_path / "jobs"

    def writes(self, port: int) -> None:
        JoinFile("runner", {"data": f"tcp://127.0.0.1:{port}"}).write(self.jobs / "join.toml")


def log(tmp_path: Path, name: str = "runners-0") -> str:
    return (tmp_path / "jobs" / f"{name}.log").read_text()


def test_a_peer_gets_the_key_by_its_standard_input(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(69)"
    given = role(tmp_path, code)
    Head(tmp_path).writes(1000)
    assert not host(given, "runners-0", "h")  # it is to be started again
    assert f"['-'] {given.key.read_text()}" in log(tmp_path)
    nowhere = Role(name="runners", argv=("/nowhere/python",), key=given.key)
    assert host(nowhere, "runners-0", "h")
    assert "/nowhere/python" in log(tmp_path)
    (tmp_path / "jobs" / "head.code").write_text("0")
    assert host(given, "runners-0", "h")


def test_a_peer_without_a_key_begins_nothing_when_the_run_is_over(tmp_path: Path) -> None:
    answers = iter([False, True])  # an engine is asked now and then only
    given = role(tmp_path, "")
    assert host(given, "runners-0", "h", is_over=lambda code: next(answers, False))
    assert not (tmp_path / "jobs" / "runners-0.log").exists()


def test_a_peer_that_is_wrong_ends_the_run(tmp_path: Path) -> None:
    wrong = role(tmp_path, "import sys; sys.exit(78)")
    Head(tmp_path).writes(1000)
    assert host(wrong, "runners-0", "h")
    head = role(tmp_path, "import time; print('begun', flush=True); time.sleep(100)", "head")
    assert host(head, "head", "h")
    assert not (tmp_path / "jobs" / "head.log").exists()


def test_a_process_ends_when_it_shall_and_when_the_head_is_another_one(tmp_path: Path) -> None:
    forever = role(tmp_path, "import time\nprint('begun', flush=True)\nwhile True: time.sleep(1)")
    head = Head(tmp_path)
    head.writes(1000)

    def has_begun(then: Callable[[], object]) -> Callable[[int | None], bool]:
        def is_over(code: int | None) -> bool:
            if (tmp_path / "jobs" / "runners-0.log").exists() and log(tmp_path):
                then()
            return False

        return is_over

    assert not host(forever, "runners-0", "h", is_over=has_begun(lambda: head.writes(2000)))
    (tmp_path / "jobs" / "runners-0.log").unlink()
    end = has_begun(lambda: hosts.end(tmp_path / "jobs", "runners-0", 30.0))
    assert host(forever, "runners-0", "h", is_over=end)


def test_a_head_is_repeated_when_it_was_interrupted_and_not_when_it_is_wrong(tmp_path: Path) -> None:
    for end, has_ended in (
        ("os._exit(75)", False),
        ("os.kill(os.getpid(), 9)", False),
        ("os._exit(0)", True),
        ("os._exit(70)", True),
    ):
        assert host(role(tmp_path, f"import os; {end}", "head"), "head", "h") is has_ended
    assert (tmp_path / "jobs" / "head.code").read_text() == "70"
