"""Which ports a run opens: none on one machine with one learner, loopback's with more, keyed ones where asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from tests.support.runs import listening


def listeners() -> list[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process or a descendant listens."""
    family = [psutil.Process(os.getpid()), *psutil.Process(os.getpid()).children(recursive=True)]
    found = []
    for process in family:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.append((connection.laddr.ip, connection.laddr.port))
    return sorted(set(found))


def test_a_run_on_one_machine_listens_nowhere(tmp_path: Path) -> None:
    config = listening(tmp_path, num_env_runners=2, listen=None, join_file=None)
    with config.learners(num_learners=1).build() as algo:
        algo.train()
        assert listeners() == []


def test_two_learners_listen_on_loopback_only(tmp_path: Path) -> None:
    config = listening(tmp_path, num_env_runners=1, batch=120, listen=None, join_file=None)
    with config.learners(num_learners=2).build() as algo:
        algo.train()
        assert {address for address, _ in listeners()} <= {"127.0.0.1", "::1"}


def test_a_run_that_listens_opens_its_two_keyed_ports_and_no_more(tmp_path: Path) -> None:
    with listening(tmp_path, num_env_runners=1).build() as algo:
        algo.train()
        keeper: Any = algo._async.session.pipeline._broker
        asked = {address.rpartition(":")[2] for address in keeper.remote_addresses.values()}
        assert {str(port) for _, port in listeners()} == asked
        assert {address for address, _ in listeners()} == {"127.0.0.1"}
