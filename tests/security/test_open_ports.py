"""Which ports a run opens: none on one machine with one learner, loopback's with more, keyed ones where asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

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


@pytest.mark.parametrize(("num_learners", "listens"), [(1, False), (2, False), (0, True)])
def test_a_run_opens_what_it_needs(num_learners: int, listens: bool, tmp_path: Path) -> None:
    """Nothing for one learner, loopback's ports for two, and the two keyed ones where asked."""
    where = {} if listens else {"listen": None, "join_file": None}
    config = listening(tmp_path, num_env_runners=1, batch=120, **where)
    with config.learners(num_learners=num_learners).build() as algo:
        algo.train()
        found = listeners()
        keeper: Any = algo._async.session.pipeline._broker
        asked = {address.rpartition(":")[2] for address in keeper.remote_addresses.values()}
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    assert num_learners != 1 or found == []
    assert not listens or {str(port) for _, port in found} == asked
