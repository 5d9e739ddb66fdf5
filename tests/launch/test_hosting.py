"""What Ray's and Dask's engines refuse, and one process of a role on a node."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import MissingPackageError
from rlzmq.launch import hosting
from rlzmq.launch.engine import Jobs, Resources, Role, engine_of
from rlzmq.launch.hosting import OVER, Hosting, News, host
from rlzmq.net.join_file import JoinFile


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "_POLL_S", 0.01)


def role(tmp_path: Path, code: str, name: str = "runners", **resources: object) -> Role:
    key = tmp_path / "jobs" / "join.toml"
    key.parent.mkdir(exist_ok=True)
    return Role(name, (sys.executable, "-c", code, str(key)), key, Resources(**resources))  # type: ignore[arg-type]


class Engine(Hosting):
    """Engine that keeps what it is given."""

    what = "The engine"

    def __init__(self, jobs: Jobs, seen: bool = True) -> None:
        super().__init__(jobs)
        self.seen = seen
        self.submitted: dict[str, dict[str, object]] = {}

    def _submit(self, role: Role, name: str, options: dict[str, object]) -> None:
        self.submitted[name] = options

    def _names(self) -> set[str]:
        return set(self.submitted)

    def _order(self, name: str, grace_s: float) -> None:
        del self.submitted[name]

    def _seen_by(self, path: Path) -> dict[str, bool]:
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


def test_nodes_without_the_run_directory_are_refused_unless_the_head_has_a_place(tmp_path: Path) -> None:
    given = jobs(tmp_path, "")
    with pytest.raises(ConfigurationError, match="n2"):
        Engine(given, seen=False).start(given.roles["head"])
    given = jobs(tmp_path, "[head]\noptions = ['workers=[\"n1\"]']\n")
    engine = Engine(given, seen=False)
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


def test_a_peer_gets_the_key_by_its_standard_input(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(69)"
    secret = JoinFile("runner", {"data": "tcp://127.0.0.1:1000"}).to_text()
    news: list[News] = [{}, {"join.toml": secret}]

    def tell(texts: News) -> News:
        return news.pop(0) if len(news) > 1 else news[0]

    call = ("a-runners-0", "a-head", tmp_path, "h")
    assert not host(role(tmp_path, code), *call, tell)  # the engine starts it again
    assert f"['-'] {secret}" in (tmp_path / "jobs" / "runners-0.log").read_text()
    assert host(role(tmp_path, code), *call, lambda texts: {OVER: True})
    wrong = role(tmp_path, "import sys; sys.exit(78)")
    told: list[News] = []
    assert host(wrong, *call, lambda texts: told.append(texts) or tell(texts))  # type: ignore[func-returns-value]
    assert "a-head" in told[-1]  # which is to end
    nowhere = Role("runners", ("/nowhere/python",), wrong.key, wrong.resources)
    assert host(nowhere, *call, tell)
    assert "/nowhere/python" in (tmp_path / "jobs" / "runners-0.log").read_text()


def test_a_process_ends_when_it_shall_and_when_the_head_is_another_one(tmp_path: Path) -> None:
    forever = role(tmp_path, "import time\nwhile True: time.sleep(1)")
    one, two = (JoinFile("runner", {"data": f"tcp://127.0.0.1:{port}"}).to_text() for port in (1000, 2000))
    news: list[News] = [{"join.toml": one}, {"join.toml": one}, {"join.toml": two}]

    def tell(texts: News) -> News:
        return news.pop(0) if len(news) > 1 else news[0]

    assert not host(forever, "a-runners-0", "a-head", tmp_path, "h", tell)
    news[:] = [{"join.toml": one}, {"join.toml": one}, {"join.toml": one, "a-runners-0": 30.0}]
    assert host(forever, "a-runners-0", "a-head", tmp_path, "h", tell)


def test_a_head_is_repeated_when_it_was_interrupted_and_not_when_it_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a-head").touch()
    for end, has_ended in (
        ("os._exit(75)", False),
        ("os.kill(os.getpid(), 9)", False),
        ("os._exit(0)", True),
        ("os._exit(70)", True),
    ):
        head = role(tmp_path, f"import os; {end}", "head")
        call = ("a-head", "a-head", tmp_path, "h")
        assert host(head, *call, lambda texts: {"join.toml": "its own"}) is has_ended
    assert (tmp_path / "jobs" / "head.code").read_text() == "70"
    assert host(head, "b-head", "b-head", tmp_path, "h", lambda texts: {})  # another directory, on this node
