"""``rlzmq launch`` on network namespaces: ssh with strict keys, CURVE, kills, one Ctrl-C, link cuts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.clusters import LEARNER, PORT, RUNNER, cluster_text, join_directories, launched
from tests.support.machines import Machines, why_no_machines

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
        launch.wait_for(r"^preflight: 5 hosts, .* ports 5555, 5556, 5557, 5558 free and reached")
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
        os.kill(first.pids(RUNNER)[0], signal.SIGKILL)
        launch.wait_for(r"^\[runner-10.77.0.2-0\] ended with 137; restart 1 of 2")
        launch.wait_for(r"^\[runner-10.77.0.2-0\] .* joined ", count=2)
        killed = len(launch.output)
        os.kill(machines[4].pids(LEARNER)[0], signal.SIGKILL)
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
