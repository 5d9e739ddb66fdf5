"""Runs on machines by ssh alone, real sshds in network namespaces that share no files; deaths, pulled cables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import Machine, Machines, why_no_machines
from tests.support.runs import assert_accounts_in, ends_of, until, wait_for_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_no_machines()), reason=why_no_machines() or "namespaces work"),
    pytest.mark.skipif(not os.path.exists("/usr/sbin/sshd"), reason="needs Debian's openssh-server"),
]
_DEADLINE_S = 120.0
_CLUSTER = """\
python = {python!r}
workdir = "/mnt"
[head]
hosts = ["m1"]
"""
_ROLE = """\
[{role}]
hosts = {hosts}
count = {count}
"""
_TRAIN = (
    "train ppo --env CartPole-v1 --preset none --envs-per-env-runner 2 --batch-size-per-learner 200 "
    "--minibatch-size 50 --num-epochs 1 --checkpoint-every-s 1 --run-dir run --on ssh --cluster cluster.toml"
)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """A laptop m0, and hosts m1, m2, …"""
    with Machines(4, tmp_path) as machines:
        machines.start_sshds()
        yield machines


def popen(machines: Machines, command: str) -> subprocess.Popen[str]:
    """Type a command on the laptop: what follows ``rlzmq``."""
    laptop = machines[0]
    path = f"{machines.directory / 'bin'}:{os.environ['PATH']}"
    return laptop.popen(
        [sys.executable, "-m", "rlzmq", *command.split()], cwd=laptop.directory, text=True,
        env=laptop.environment(PATH=path),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


class Run:
    """A run that was started from the laptop, m0."""

    def __init__(self, machines: Machines, *, runners: int, learners: int = 0) -> None:
        self.machines, self.laptop = machines, machines[0]
        text = _CLUSTER.format(python=sys.executable)
        for role, count in (("runners", runners), ("learners", learners)):
            if count:
                text += _ROLE.format(role=role, hosts='["m2", "m3"]', count=count)
        (self.laptop.directory / "cluster.toml").write_text(text)
        self.said = self.type(_TRAIN)

    def popen(self, command: str) -> subprocess.Popen[str]:
        return popen(self.machines, command)

    def type(self, command: str, code: int = 0) -> str:
        """Type a command on the laptop; return what it prints."""
        process = self.popen(command)
        said, _ = process.communicate(timeout=_DEADLINE_S)
        assert process.returncode == code, f"{said}\n{self.describe()}"
        return said

    def log(self, machine: Machine, name: str) -> str:
        path = machine.directory / "work" / "run" / "jobs" / f"{name}@{machine.host_name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, machine: Machine, name: str, pattern: str, after: int = 0) -> int:
        """Wait for text in a log; return where it ends."""
        return wait_for_text(lambda: self.log(machine, name), pattern, after, self.describe)

    def trains_on(self, count: int = 3) -> None:
        """Wait until the head has finished further iterations."""
        after = len(self.log(self.machines[1], "head"))
        self.wait_for(self.machines[1], "head", "(iter (.|\n)*)" * count, after)

    def sees(self, name: str) -> None:
        """Wait until a peer is there, as `rlzmq top` on the head's host shows it."""
        head = self.machines[1]
        observer = head.directory / "work" / "run" / "jobs" / "join.observer.toml"
        top = [sys.executable, "-m", "rlzmq", "top", str(observer), "--count", "1"]
        until(
            lambda: name in head.popen(top, stdout=subprocess.PIPE, text=True).communicate()[0], self.describe
        )

    def ends(self, *machines: Machine) -> None:
        """Wait until no loop and no role is left on machines."""
        until(
            lambda: not any(_is_ours(p) for machine in machines for p in machine.processes()), self.describe
        )

    def describe(self) -> str:
        return ends_of(self.machines.directory.glob("m*/work/run/jobs/*.log"))


def _is_ours(process: object) -> bool:
    words = " ".join(process.cmdline())  # type: ignore[attr-defined]
    return "rlzmq" in words or "/jobs/" in words


def test_a_run_is_started_scaled_followed_and_stopped_from_a_laptop(machines: Machines) -> None:
    laptop, head, first, second = machines
    run = Run(machines, runners=2)
    assert re.search(r"^runners +runners@m2,m3$", run.said, re.M), run.said
    run.wait_for(first, "runners-0", " joined ")
    run.wait_for(second, "runners-1", " joined ")
    run.type("scale run --env-runners 3")
    run.wait_for(first, "runners-2", " joined ")
    follow = run.popen("launch logs run --follow")
    run.type("scale run --env-runners 1")
    for machine, name in ((first, "runners-2"), (second, "runners-1")):
        assert "leaving: the current fragment is sent first" in run.log(machine, name)
    run.trains_on()
    run.type("launch stop run")
    said, _ = follow.communicate(timeout=_DEADLINE_S)
    assert follow.returncode == 75, said
    for text in (r"^\[head\] iter 1 ", r"^\[runners\] 2: .* joined ", r"^\[head\] accounting: sampled"):
        assert re.search(text, said, re.M), said
    assert "goodbye: " in run.log(first, "runners-0")
    run.ends(laptop, head, first, second)
    assert "secret" not in said
    assert list(head.directory.glob("work/run/checkpoints/*/manifest.json"))
    assert not list(head.directory.glob("work/run/jobs/join*"))


def test_what_dies_is_started_again_and_the_others_never_notice(machines: Machines) -> None:
    """A runner; a host that is cut off; a host that loses power; the head, whose ports and keys the next one takes."""
    _, head, first, second = machines
    run = Run(machines, runners=2)
    run.wait_for(first, "runners-0", " joined ")
    run.wait_for(second, "runners-1", " joined ")
    (driver,) = head.processes(f"{sys.executable} -m rlzmq train")
    runners = {machine: machine.processes(f"{sys.executable} -m rlzmq runner") for machine in (first, second)}

    end = len(run.log(first, "runners-0"))
    runners[first][0].kill()
    run.wait_for(first, "runners-0", " joined ", end)

    second.cut()
    run.wait_for(head, "head", r"runner \S+@m3 lost: unreachable")
    run.trains_on()
    second.mend()
    run.sees("@m3")
    assert second.processes(f"{sys.executable} -m rlzmq runner") == runners[second]  # nothing was restarted

    machines.lose(second)
    run.trains_on()
    machines.boot(second)
    end = len(run.log(second, "runners-1"))
    run.type("scale run --env-runners 2")  # what ran on it is started again
    run.wait_for(second, "runners-1", " joined ", end)
    assert driver.is_running()

    while not list(head.directory.glob("work/run/checkpoints/*/manifest.json")):
        run.trains_on(1)
    for is_killed in (True, False):
        ends = [
            len(run.log(machine, name)) for machine, name in ((first, "runners-0"), (second, "runners-1"))
        ]
        end = len(run.log(head, "head"))
        if is_killed:
            driver.kill()
        else:
            machines.lose(head)
            machines.boot(head)
            run.type(f"{_TRAIN} --resume auto")  # the others still run
        run.wait_for(head, "head", "resumed ", end)
        run.wait_for(first, "runners-0", r"the run was started again(.|\n)* joined ", ends[0])
        run.wait_for(second, "runners-1", r"the run was started again(.|\n)* joined ", ends[1])
        run.trains_on()
    run.type("launch stop run")
    run.ends(head, first, second)
    assert_accounts_in(run.log(head, "head"))


def test_a_run_outlives_the_laptop(machines: Machines) -> None:
    laptop, head, first, second = machines
    run = Run(machines, runners=1, learners=2)
    run.wait_for(first, "learners-0", "is rank")
    run.wait_for(second, "learners-1", "is rank")
    laptop.cut()
    for process in laptop.processes():
        process.kill()
    run.trains_on()
    (victim,) = second.processes(f"{sys.executable} -m rlzmq learner")
    end = len(run.log(second, "learners-1"))
    victim.kill()
    run.wait_for(second, "learners-1", "is rank", end)
    run.trains_on()
    machines.boot(laptop)
    run.type("launch stop run")
    run.ends(head, first, second)


def test_what_is_wrong_is_named_and_leaves_nothing(machines: Machines) -> None:
    _, head, first, second = machines
    known = machines.directory / "known_hosts"
    known.write_text(
        "".join(line for line in known.read_text().splitlines(True) if second.address not in line)
    )
    with pytest.raises(AssertionError, match=r"m3: (.|\n)*Host key verification failed"):
        Run(machines, runners=2)
    machines.directory.joinpath("known_hosts").write_text("")
    with pytest.raises(AssertionError, match=r"m1: (.|\n)*Host key verification failed"):
        Run(machines, runners=2)
    until(lambda: not any(map(_is_ours, (*head.processes(), *first.processes(), *second.processes()))))


def test_the_page_typed_literally(machines: Machines) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "several_machines.md").read_text()
    start, *later = (
        text.strip() for text in re.findall(r"^```\n(rlzmq (?:.|\n)*?)^```", page, re.MULTILINE)[:2]
    )
    (cluster,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for there, here in (("/home/me/venv/bin/python", sys.executable), ("/home/me/project", "/mnt")):
        assert there in cluster
        cluster = cluster.replace(there, here)
    for number in (1, 2, 3):
        cluster = cluster.replace(f"node{number}", f"m{number}")
    (machines[0].directory / "cluster.toml").write_text(cluster)
    for command in (start.replace("\\\n", ""), *later[0].splitlines()):
        process = popen(machines, command.removeprefix("rlzmq "))
        said, _ = process.communicate(timeout=_DEADLINE_S)
        assert process.returncode == 0, said
    assert "accounting: sampled" in machines[1].directory.joinpath(
        "work/runs/cartpole/jobs/head@m1.log").read_text()  # fmt: skip
    assert not any(map(_is_ours, (process for machine in machines for process in machine.processes())))


SCRIPT = Path(__file__).parents[2] / "scripts" / "partitions.py"


@pytest.mark.parametrize(
    "arguments",
    [
        "notice --repeat 1",
        "learners --repeat 1",
        "heal --cut 10 --repeat 1",
        "narrow --runners 3 --seconds 15",
    ],
)
def test_what_the_reliability_page_says_of_partitions(arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if arguments.startswith("heal"):
        assert "0 lost, 0 trained twice" in result.stdout
