"""Runs as jobs of a real Slurm with consumable memory: what happens to jobs there happens to a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import assert_accounts_in, wait_for_text
from tests.support.slurm import DEADLINE_S, Slurm, until, why_no_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "Slurm is there"),
]

_TRAIN = (
    "rlzmq train ppo --preset none --batch-size-per-learner 200 --minibatch-size 50 --num-epochs 1 "
    "--checkpoint-every-s 5 --on slurm --cluster cluster.toml"
)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    cluster = Slurm()
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def nothing_stays(slurm: Slurm) -> Iterator[None]:
    """A test that fails leaves no jobs to the next one."""
    yield
    slurm.ctl("scancel --me")


class Run:
    """A run that was submitted."""

    def __init__(self, slurm: Slurm, name: str, cluster: str, before: str = "") -> None:
        self.slurm, self.path = slurm, slurm.home / "runs" / name
        (slurm.home / "cluster.toml").write_text(cluster)
        self.said = slurm.ctl(f"{before}{_TRAIN} --env CartPole-v1 --run-dir runs/{name}")
        self.jobs = dict(re.findall(r"^(head|learners|runners) +(\S+)$", self.said, re.M))
        assert "head" in self.jobs, self.said
        for role in self.jobs.keys() - {"head"}:
            (self.jobs[role],) = set(slurm.ctl(f"squeue -h --name={self.jobs[role]} -o %F").split())

    def log(self, role: str = "head") -> str:
        path = self.path / "jobs" / f"{role}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, pattern: str, role: str = "head", after: int = 0) -> int:
        """Wait for text in a log; return where it ends."""
        return wait_for_text(lambda: self.log(role), pattern, after, self.slurm.describe, DEADLINE_S)

    def wait_until(self, role: str, name: str, *values: str) -> None:
        until(lambda: self.slurm.fact(self.jobs[role], name) in values, self.slurm.describe)

    def goes_on(self, restarts: str, after: int = 0) -> int:
        """Wait until the head was requeued and trains again."""
        self.wait_until("head", "Restarts", restarts)
        return self.wait_for(r"resumed .*(.|\n)*iter \d+", after=after)

    def limit_time(self) -> None:
        """Let the head's time be over within two minutes, as soon as it has a checkpoint."""
        until(lambda: list(self.path.glob("checkpoints/*/manifest.json")), self.slurm.describe)
        hours, minutes, _ = map(int, self.slurm.fact(self.jobs["head"], "RunTime").split(":"))
        self.slurm.ctl(f"scontrol update JobId={self.jobs['head']} TimeLimit={60 * hours + minutes + 2}")

    def reaches_time_limit(self) -> None:
        """Wait until the head's time is over; the next one has more."""
        self.wait_until("head", "Restarts", "1")
        self.slurm.ctl(f"scontrol update JobId={self.jobs['head']} TimeLimit=60")

    def restarts(self, role: str) -> str:
        return self.slurm.fact(self.jobs[role], "Restarts")


def place(memory: str, node: str = "", count: int = 1, more: str = "") -> str:
    where = f'options = ["--nodelist={node}"]\n' if node else ""
    return f'count = {count}\nmemory = "{memory}"\n{where}{more}\n'


def test_a_run_outlives_its_time_limit_and_preemption_and_stays_cancelled(slurm: Slurm) -> None:
    limit = 'time = "60"'
    cluster = f"[head]\n{place('1G', 'n1', more=limit)}[runners]\n{place('1G', 'n2', 2)}"
    run = Run(slurm, "limited", cluster)
    assert slurm.fact(run.jobs["head"], "TimeLimit") == "01:00:00"
    run.limit_time()
    run.reaches_time_limit()
    end = run.goes_on("1")
    assert "interrupted" in run.log()

    slurm.ctl("sbatch --partition=prio --nodelist=n1 --exclusive --wrap 'sleep 1' --output=/dev/null")
    run.goes_on("2", after=end)

    slurm.ctl(f"scancel {run.jobs['head']}")
    until(lambda: not slurm.ctl("squeue -h").strip(), slurm.describe)  # the runners end by themselves
    assert slurm.state(run.jobs["head"]) == "CANCELLED"
    assert run.restarts("head") == "2"
    last = [int(number) for number in re.findall(r"^iter (\d+)", run.log(), re.M)][-1]
    newest = sorted((run.path / "checkpoints").iterdir())[-1]
    assert int(newest.name) >= last
    assert_accounts_in(run.log())


def test_only_the_runner_that_died_and_those_of_a_dead_node_are_replaced(slurm: Slurm) -> None:
    wide = 'cpus = 3\narguments = ["--envs-per-env-runner", "2"]\noptions = ["--exclude=n1"]'  # one per node
    cluster = f"[head]\n{place('1G', 'n1')}[runners]\n{place('1G', count=2, more=wide)}"
    run = Run(slurm, "elastic", cluster)
    other = Run(slurm, "neighbour", f"[head]\n{place('1G', 'n1')}[runners]\n{place('1G', 'n1')}")
    other.wait_for("iter 1 ")  # two heads on one node
    slurm.ctl(f"scancel {other.jobs['head']}")
    end = run.wait_for(" joined ", "runners-0")
    run.wait_for(" joined ", "runners-1")
    (head,) = {
        process.pid for process in slurm.processes("n1", "train ppo") if "elastic" in str(process.cmdline())
    }
    node = slurm.fact(f"{run.jobs['runners']}_0", "NodeList")
    for process in slurm.processes(node, "rlzmq runner"):
        process.kill()
    run.wait_for(" joined ", "runners-0", after=end)

    lost = slurm.fact(f"{run.jobs['runners']}_1", "NodeList")
    end = len(run.log("runners-1"))
    slurm.lose(lost)
    until(lambda: slurm.fact(f"{run.jobs['runners']}_1", "Restarts") == "1", slurm.describe)
    run.wait_for(" joined ", "runners-1", after=end)
    assert slurm.fact(f"{run.jobs['runners']}_1", "Restarts") == "1"
    assert slurm.fact(f"{run.jobs['runners']}_0", "Restarts") == run.restarts("head") == "0"
    assert head in {process.pid for process in slurm.processes("n1", "train ppo")}
    slurm.boot(lost)
    slurm.ctl(f"scancel {run.jobs['head']}")
    until(lambda: not slurm.ctl("squeue -h").strip(), slurm.describe)


def test_a_living_run_is_scaled_its_logs_are_followed_and_it_is_stopped(slurm: Slurm) -> None:
    run = Run(slurm, "scaled", f"[head]\n{place('1G', 'n1')}[runners]\n{place('1G', count=2)}")
    run.wait_for(" joined ", "runners-1")
    command = "rlzmq {} runs/scaled {}"
    assert slurm.ctl(command.format("scale", "--env-runners 3")).split() == ["runners", "3"]
    run.wait_for(" joined ", "runners-2")
    slurm.ctl(command.format("scale", "--env-runners 1"))
    for role in ("runners-1", "runners-2"):
        run.wait_for("leaving: the current fragment is sent first", role)
    until(lambda: len(slurm.ctl("squeue -h -r --name=" + "scaled-runners-" + run.jobs["head"]).splitlines()) == 1,
          slurm.describe)  # fmt: skip
    slurm.ctl(command.format("scale", "--env-runners 2"))  # the free number again
    end = run.wait_for("leaving", "runners-1")
    run.wait_for(" joined ", "runners-1", after=end)
    follow = "(" + command.format("launch logs", "--follow") + " > followed; echo code $? >> followed) & "
    slurm.ctl(f"{follow} {command.format('launch stop', '')}; wait")
    followed = (slurm.home / "followed").read_text()
    for text in (
        r"^\[head\] iter 1 ",
        r"^\[runners\] 2: .* joined ",
        r"^\[head\] .*checkpoints/",
        "^code 75$",
    ):
        assert re.search(text, followed, re.M), followed
    assert not slurm.ctl("squeue -h").strip()
    assert "does not exist" in slurm.ctl("rlzmq launch logs runs/none")


def test_learners_are_tasks_of_one_job_and_further_ones_are_spares(slurm: Slurm) -> None:
    cluster = f"[head]\n{place('1G', 'n1')}[learners]\n{place('1G', count=2)}[runners]\n{place('1G')}"
    run = Run(slurm, "learners", cluster)
    run.wait_for("is rank . of 2", "learners-1")  # the first to come is rank 0
    run.wait_for("iter 1 ")
    slurm.ctl("rlzmq scale runs/learners --learners 3")
    run.wait_for(" waits for tcp://", "learners-2")
    slurm.ctl("rlzmq scale runs/learners --learners 1")
    run.wait_for("iter ", after=len(run.log()))
    slurm.ctl("rlzmq launch stop runs/learners")
    run.wait_until("learners", "JobState", "COMPLETED", "FAILED", "CANCELLED")
    assert "iter 1 " in run.log()
    assert not slurm.ctl("squeue -h").strip()


@pytest.mark.parametrize("how", ["refused", "waits"])
def test_a_step_that_cannot_be_created_ends_the_run(slurm: Slurm, how: str) -> None:
    cluster = f"[head]\n{place('1G', 'n1')}[learners]\ncount = 2\n"
    before = "SLURM_MEM_PER_NODE=9999999 "
    if how == "waits":  # what the job was given is taken by another step
        occupy = slurm.home / "occupy.sh"
        occupy.write_text(
            "case $SLURM_JOB_NAME in *learners*) unset BASH_ENV; srun sleep 600 & sleep 3;; esac\n"
        )
        before = f"BASH_ENV={occupy} "
    run = Run(slurm, f"step_{how}", cluster, before=before)
    run.wait_until("head", "JobState", "CANCELLED", "FAILED")
    assert "the run is cancelled" in run.log("learners")
    until(lambda: not slurm.ctl("squeue -h").strip(), slurm.describe)


def test_a_job_that_slurm_refuses_leaves_no_others(slurm: Slurm) -> None:
    (slurm.home / "cluster.toml").write_text('[runners]\noptions = ["--partition=nowhere"]\n')
    said = slurm.ctl(f"{_TRAIN} --env CartPole-v1 --run-dir runs/refused; echo code $?")
    assert "nowhere" in said
    assert "code 78" in said
    until(lambda: not slurm.ctl("squeue -h").strip(), slurm.describe)


def test_the_page_typed_literally(slurm: Slurm) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "slurm.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (cluster,) = (text for kind, text in blocks if kind == "toml")
    submit, by_hand = (text for kind, text in blocks if not kind)
    for name, command in (("typed", submit), ("by_hand", by_hand)):
        directory = slurm.home / name
        directory.mkdir()
        (directory / "cluster.toml").write_text(cluster)
        said = slurm.ctl(command, cwd=directory)
        found = re.search(r"head +(?:job )?(\d+)", said)
        assert found, said
        log = directory / "runs" / "cartpole" / "jobs" / "head.log"
        until(lambda log=log: log.exists() and "iter 1 " in log.read_text(), slurm.describe)
        slurm.ctl(f"scancel {found[1]}")
        until(lambda: not slurm.ctl("squeue -h").strip(), slurm.describe)
        assert "checkpoints/" in log.read_text()
