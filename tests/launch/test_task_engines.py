"""Runs on real clusters of Ray and Dask with two nodes: what happens to tasks there happens to a run."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.runs import assert_accounts_in, ends_of, wait_for_text
from tests.support.task_clusters import DEADLINE_S, ENGINES, Node, TaskCluster, until, why_missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_TRAIN = (
    "rlzmq train ppo --env CartPole-v1 --preset none --batch-size-per-learner 200 --minibatch-size 50 --num-epochs 1 "
    "--checkpoint-every-s 2 --run-dir runs/a --cluster cluster.toml"
)


@pytest.fixture(scope="module", params=list(ENGINES))
def cluster(request: pytest.FixtureRequest) -> Iterator[TaskCluster]:
    if why := why_missing(request.param):
        pytest.skip(why)
    made = ENGINES[request.param]()
    yield made
    made.close()


class Run:
    """A run that was started in a directory of its own."""

    def __init__(self, cluster: TaskCluster, cwd: Path, name: str = "a") -> None:
        self.cluster, self.cwd, self.path = cluster, cwd, cwd / "runs" / name
        (cwd / "cluster.toml").write_text(f'[head]\n{cluster.head}\n[runners]\ncount = 2\nmemory = "100MB"\n')

    def type(self, line: str, code: int = 0) -> str:
        """Type a command; return what it says."""
        command = self.cluster.type(line, self.cwd)
        said, _ = command.communicate(timeout=400)
        assert command.returncode == code, said + self.describe()
        return said

    def log(self, name: str = "head") -> str:
        path = self.path / "jobs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def describe(self) -> str:
        return ends_of([*(self.path / "jobs").glob("*.log"), *self.cluster.directory.glob("*.log")])

    def wait_for(self, pattern: str, name: str = "head", after: int = 0) -> int:
        """Wait for text in a log; return where it ends."""
        return wait_for_text(lambda: self.log(name), pattern, after, self.describe, DEADLINE_S)

    def runners(self, count: int, without: int = 0) -> dict[int, Node]:
        """Wait until so many runners run, this one not among them; return them."""
        found: dict[int, Node] = {}

        def are_there() -> bool:
            nonlocal found
            found = self.cluster.roles("rlzmq runner")
            return len(found) == count and without not in found

        until(are_there, lambda: f"{count} runners, not {without}: {found}\n{self.describe()}")
        return found


def test_a_run_reaches_its_goal(cluster: TaskCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path)
    (tmp_path / "here.py").write_text("from gymnasium.envs.classic_control import CartPoleEnv as CartPole\n")
    own = _TRAIN.replace("CartPole-v1", "here:CartPole")
    run.type(f"{own} --stop return=40 --on {cluster.from_outside}")
    said = run.type("rlzmq launch logs runs/a --follow")
    assert re.search(r"\[runners\] \d: runner", said)  # one of the two may reach the goal alone
    assert "≥ 40" in run.log()
    until(lambda: not cluster.roles(""), run.describe)
    assert_accounts_in(run.log())


def test_what_dies_is_replaced_and_the_rest_goes_on(cluster: TaskCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path)
    launcher = cluster.type(f"{_TRAIN} --on {cluster.on}", tmp_path)
    assert launcher.stdout is not None
    until(lambda: launcher.stdout.readline().startswith("runners "), run.describe)
    launcher.kill()  # -9
    launcher.communicate()
    run.wait_for("iter 1 ")
    (head,) = cluster.roles("rlzmq train")

    before = run.runners(2)
    killed, kept = before
    kill(before[killed], killed)
    assert kept in run.runners(2, without=killed)  # only it is replaced
    run.wait_for("iter", after=len(run.log()))

    far = next(node for node in run.runners(2).values() if node is not cluster.roles("rlzmq train")[head])
    far.lose()
    back = run.runners(2)
    assert set(back.values()) == {cluster.roles("rlzmq train")[head]}
    assert set(cluster.roles("rlzmq train")) == {head}
    assert "resumed" not in run.log()
    run.wait_for("iter", after=len(run.log()))

    until(lambda: any((run.path / "checkpoints").iterdir()), run.describe)
    end = len(run.log())
    kill(cluster.roles("rlzmq train")[head], head)
    end = run.wait_for("resumed ", after=end)
    run.wait_for("iter", after=end)

    cluster.add_node()
    run.type("rlzmq scale runs/a --env-runners 3")
    run.runners(3)
    run.type("rlzmq scale runs/a --env-runners 1")
    (last,) = run.runners(1)
    run.wait_for("iter", after=len(run.log()))
    assert last in cluster.roles("rlzmq runner")

    secret = re.findall(r'client_secret_key = "(.+)"', (run.path / "jobs" / "join.toml").read_text())[0]
    said = str([process.cmdline() for node in cluster.nodes for process in node.tree()])
    run.type("rlzmq launch stop runs/a")
    assert not cluster.roles("")
    assert "interrupted" in run.log()
    assert (run.path / "jobs" / "head.code").read_text() == "75"
    iterations = re.findall(r"^iter (\d+)", run.log(), re.M)
    assert int(max((run.path / "checkpoints").iterdir()).name) >= int(iterations[-1])
    assert_accounts_in(run.log())
    assert secret not in run.describe() + said


def test_learners_of_two_nodes_train_each_with_its_gpu_and_are_replaced(
    cluster: TaskCluster, tmp_path: Path
) -> None:
    run = Run(cluster, tmp_path)
    learners = '[learners]\ncount = 2\ngpus = 1\nmemory = "100MB"\n'
    (tmp_path / "cluster.toml").write_text(f"[head]\n{cluster.head}\n{learners}[runners]\ncount = 1\n")
    cluster.add_node()
    run.type(f"{_TRAIN} --on {cluster.on}")
    run.wait_for("iter 1 ")
    ranks = cluster.roles("rlzmq learner")
    assert len(ranks) == len(set(ranks.values())) == 2, "one GPU a node"
    if cluster.on == "ray":
        assert [psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in ranks] == ["0", "0"]
    kill(ranks[min(ranks)], min(ranks))
    until(lambda: len(cluster.roles("rlzmq learner").keys() - {min(ranks)}) == 2, run.describe)
    run.wait_for("iter (.|\n)*" * 3, after=len(run.log()))
    run.type("rlzmq launch stop runs/a")
    assert not cluster.roles("")
    assert_accounts_in(run.log())


def test_what_no_worker_offers_is_refused(cluster: TaskCluster, tmp_path: Path) -> None:
    if cluster.on == "ray":
        pytest.skip("Ray waits for its autoscaler")
    run = Run(cluster, tmp_path)
    (tmp_path / "cluster.toml").write_text("[runners]\ncpus = 2\n")
    assert "no worker offers CPU" in run.type(f"{_TRAIN} --on {cluster.on}", code=78)
    assert not cluster.roles("")


def test_the_page_typed_literally(cluster: TaskCluster, tmp_path: Path) -> None:
    page = (
        Path(__file__).parents[2] / "docs" / "how_to" / f"{type(cluster).__name__.lower()}.md"
    ).read_text()
    blocks = re.findall(
        r"^```(\w*)\n(.*?)^```", page.replace("dask://127.0.0.1:8786", cluster.on), re.DOTALL | re.M
    )
    run = Run(cluster, tmp_path, "cartpole")
    (toml,) = (text for kind, text in blocks if kind == "toml")
    (tmp_path / "cluster.toml").write_text(toml)
    (train, later) = (text for kind, text in blocks if not kind)
    run.type(train.replace("return=475", "return=501"))  # never reached
    run.wait_for("iter 1 ")
    logs, scale, stop = later.splitlines()
    assert "iter 1 " in run.type(logs)
    run.type(scale)
    run.runners(3)
    run.type(stop)
    assert not cluster.roles("")
    assert_accounts_in(run.log())


def kill(node: Node, pid: int) -> None:
    next(process for process in node.tree() if process.pid == pid).send_signal(signal.SIGKILL)
