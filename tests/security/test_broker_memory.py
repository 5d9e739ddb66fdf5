"""A broker under a memory limit: it, not the machine, runs out of memory, and the run goes on."""

from __future__ import annotations

from pathlib import Path

from rlzmq.net.keys import JoinFile
from tests.security.floods import peak_bytes, unfinished_parts
from tests.support.runs import assert_accounted, listening

_MIB = 1 << 20


def test_a_flood_ends_at_the_limit_with_its_connection_or_with_the_broker(tmp_path: Path) -> None:
    config = listening(tmp_path, num_env_runners=1).fault_tolerance(broker_memory_limit_bytes=400 * _MIB)
    with config.build() as algo:
        algo.train()
        keeper = algo._async.session.pipeline._broker
        assert unfinished_parts(JoinFile.read(tmp_path / "join.toml"), 450 * _MIB)
        assert_accounted(algo.train())
        assert_accounted(algo.train())
        assert peak_bytes(keeper.handle.pid) < 450 * _MIB
