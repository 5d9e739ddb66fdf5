"""``rlzmq launch`` on network namespaces: ssh with strict keys, CURVE, kills, one Ctrl-C, link cuts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.clusters import LEARNER, PORT, RUNNER, cluster_text, join_directories, launched
from tests.support.machines import SSH_PORT, Machines, why_no_machines

asyncssh = pytest.importorskip("asyncssh")
pytestmark = [
    pytest.mark.skipif(bool(why_no_machines()), reason=why_no_machines() or "namespaces work"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(5, tmp_path) as machines:
        machines.start_sshds()
        yield machines


@pytest.mark.slow
def test_five_machines_train_survive_kills_and_end_with_one_ctrl_c(machines: Machines) -> None:
    head, first, *_ = machines
    text = cluster_text(machines, runners=((1, 1), (2, 1)), learners=((3, 1), (4, 1)), restarts=2)
    with launched(head, text) as launch:
        for name in (
            "runner-10.77.0.2-0",
            "runner-10.77.0.3-0",
            "learner-10.77.0.4-0",
            "learner-10.77.0.5-0",
        ):
            launch.wait_for(rf"^\[{name}\] .*(joined|is rank)")
        launch.wait_for(r"^\[head\] iter 3 ")
        # Ranks talk over the machines' own addresses, and nobody listens on every interface but torch.
        assert f"{head.address}:{PORT}" in head.listening()
        first.processes(RUNNER)[0].kill()
        launch.wait_for(r"^\[runner-10.77.0.2-0\] ended with 137; restart 1 of 2")
        launch.wait_for(r"^\[runner-10.77.0.2-0\] .* joined ", count=2)
        killed = len(launch.output)
        machines[4].processes(LEARNER)[0].kill()
        after = launch.wait_for(r"^\[learner-10.77.0.5-0\] ended with 137; restart 1 of 2", after=killed)
        launch.wait_for(r"^\[head\] iter ", after=after, count=3)  # the survivor trains on
        launch.wait_for(r"^\[learner-10.77.0.5-0\] .* is rank", after=after)
        after = len(launch.output)
        launch.wait_for(r"^\[head\] iter ", after=after, count=3)
        launch.interrupt()
        assert launch.end() == 130
    text = "\n".join(launch.output)
    assert text.count(" goodbye: ") == 2, text[-3000:]
    assert "[head] accounting: sampled" in text
    assert "secret" not in text
    assert machines.leftovers() == {}
    assert join_directories(machines.directory) == []


@pytest.mark.slow
def test_a_local_head_serves_hosts_and_a_spent_budget_ends_everything(machines: Machines) -> None:
    head = machines[0]
    text = cluster_text(machines, head="local", runners=((1, 1),), restarts=1)
    with launched(head, text) as launch:  # the launcher runs on the head itself
        for restart in (1, 2):
            launch.wait_for(r"^\[runner-10.77.0.2-0\] .* joined ", count=restart)
            machines[1].processes(RUNNER)[0].kill()
            if restart == 1:
                launch.wait_for(r"^\[runner-10.77.0.2-0\] ended with 137; restart 1 of 1")
        assert launch.end() == 69
    assert "failed 2 times in a row, the last time with exit code 137" in "\n".join(launch.output[-5:])
    assert "Traceback" not in "\n".join(launch.output)
    assert machines.leftovers() == {}
    assert join_directories(machines.directory) == []


@pytest.mark.slow
def test_a_host_that_was_cut_off_is_there_again_and_a_dead_head_ends_everything(machines: Machines) -> None:
    with launched(machines[4], cluster_text(machines, runners=((1, 1), (2, 1)))) as launch:
        launch.wait_for(r"^\[runner-10.77.0.2-0\] .* joined ")
        launch.wait_for(r"^\[runner-10.77.0.3-0\] .* joined ")
        machines[1].cut()
        after = launch.wait_for(r"^\[head\] broker: runner \S+@m1 lost: unreachable")
        launch.wait_for(r"^\[head\] iter ", after=after, count=5)
        machines[1].mend()
        runners = machines[1].processes(RUNNER)
        observer = str(next(machines[0].directory.glob("tmp.*/join.observer.toml")))
        top = [sys.executable, "-m", "rlzmq", "top", observer, "--count", "1"]
        while "@m1" not in machines[0].popen(top, stdout=subprocess.PIPE, text=True).communicate()[0]:
            assert launch.process.poll() is None
        assert machines[1].processes(RUNNER) == runners  # nothing was restarted
        assert not any("restart" in line for line in launch.output)
        machines[0].processes(f"{sys.executable} -m rlzmq train")[0].kill()
        assert launch.end() == 137
    assert machines.leftovers() == {}
    assert join_directories(machines.directory) == []


@pytest.mark.slow
def test_a_head_that_may_resume_is_started_again_with_all_others(machines: Machines) -> None:
    train = ("--resume", "auto", "--checkpoint-every-s", "0.5")
    text = cluster_text(machines, runners=((1, 1), (2, 1)), learners=((3, 1),), train=train, restarts=1)
    with launched(machines[4], text) as launch:
        for number, code in ((1, "restart 1 of 1, with all others"), (2, "")):
            after = len(launch.output)
            launch.wait_for(r"^\[runner-10.77.0.2-0\] .* joined ", after=after)
            launch.wait_for(r"^\[runner-10.77.0.3-0\] .* joined ", after=after)
            if number == 2:
                launch.wait_for(r"^\[head\] resumed ", after=after)
            launch.wait_for(r"^\[head\] iter ", after=after, count=20)
            while not list((machines.directory / "run" / "checkpoints").glob("[0-9]*/manifest.json")):
                launch.wait_for(r"^\[head\] iter ", after=len(launch.output))
            machines[0].processes(f"{sys.executable} -m rlzmq train")[0].kill()
            if code:
                launch.wait_for(rf"^\[head\] ended with 137; {code}", after=after)
        assert launch.end() == 137  # the budget is spent
    assert machines.leftovers() == {}
    assert join_directories(machines.directory) == []


def test_what_is_wrong_is_named(machines: Machines) -> None:
    head, host, *_ = machines

    def fails(text: str, code: int, told: str) -> None:
        with launched(machines[2], text) as launch:
            assert launch.end() == code, launch.output
        output = "\n".join(launch.output)
        assert told in output, output
        assert "Traceback" not in output

    text = cluster_text(machines)
    with head.popen([sys.executable, "-m", "http.server", "--bind", head.address, str(PORT)],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as taken:  # fmt: skip
        while f"{head.address}:{PORT}" not in head.listening():
            assert taken.poll() is None
        fails(text, 78, f"{head.address}:{PORT}")
        taken.kill()
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    known_hosts = machines.directory / "known_hosts"
    lines = [f"[{host.address}]:{SSH_PORT} {other}" if host.address in line else line
             for line in known_hosts.read_text().splitlines()]  # fmt: skip
    known_hosts.write_text("\n".join(lines) + "\n")
    fails(text, 69, f"{host.address}: Host key is not trusted")
    while machines.leftovers():  # what waits for the join file sees that its directory is gone
        time.sleep(0.05)
