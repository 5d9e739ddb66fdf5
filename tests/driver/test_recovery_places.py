"""Processes that die or hang at chosen places, with fragments in sockets or in shared memory: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recovery_runs import check_account, large, small

PLACES = [
    (small, "broker.Fragment@broker:kill:3"),  # in the ledger, not acknowledged
    (small, "broker.UpdateDone@broker:kill:3"),  # trained, the driver not told
    (small, "broker.Weights@broker:kill:2"),
    (small, "learner.Shard@learner-1:kill:2"),  # delivered, not decoded
    (small, "learner.vote@learner-0:kill:2"),  # all steps done, no vote
    (small, "learner.trained@learner-0:kill:2"),  # trained, the broker not told
    (small, "learner.voted@learner-1:stop:2"),  # hangs
    (small, "runner.sampled@runner-0:kill:2"),
    (small, "runner.Lease@runner-0:kill:3"),
    (large, "runner.sent@runner-0:kill:2"),  # nobody but the socket knows of the segment
    (large, "broker.Fragment@broker:kill:3"),  # held and in the ledger, not acknowledged
    (large, "learner.train@learner-0:kill:2"),
]
MORE_PLACES = [
    (small, "broker.OpenUpdate@broker:kill:2"),
    (small, "broker.ShardReady@broker:kill:2"),
    (small, "broker.DriverState@broker:kill:2"),
    (small, "learner.Train@learner-0:kill:2"),  # told to train
    (small, "learner.train@learner-1:kill:2"),  # before its first collective
    (small, "learner.voted@learner-1:kill:2"),  # voted, nobody told
    (small, "learner.UpdateCommitted@learner-1:kill:1"),
    (small, "runner.sent@runner-0:exit:2"),
    (large, "broker.ShardReady@broker:kill:2"),
    (large, "learner.Shard@learner-1:kill:3"),
]
COUNTS = {
    "broker": "num_broker_restarts",
    "learner": "num_learner_restarts",
    "runner": "num_remote_worker_restarts",
}


@pytest.mark.parametrize(
    ("make", "fault"), [*PLACES, *(pytest.param(*place, marks=pytest.mark.slow) for place in MORE_PLACES)]
)
async def test_who_dies_at_a_chosen_place_is_replaced_alone_and_every_update_is_whole(
    make: Callable[[int, int], Any], fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", fault)
    monkeypatch.setenv("RLZMQ_FAULT_LOG", str(tmp_path / "fired"))
    role, number, result = fault.partition(".")[0], 0, dict[str, Any]()
    async with make(1, 2).build_async() as algo:
        while (
            number < 4 or not result["fault_tolerance"][COUNTS[role]] or len(algo.learner_group.handles) < 2
        ):
            result = await algo.train()
            number += 1
            check_account(result, number)
            assert result["learners"]["default_policy"]["weights_seq_no"] == number
        hashes = await algo.learner_group.foreach_learner(lambda learner: learner.parameter_hash())
    assert len(set(hashes)) == 1
    assert (tmp_path / "fired").read_text().split() == fault.replace("@", " ").replace(":", " ").split()
    counts = result["fault_tolerance"]
    assert {name: counts[name] for name in COUNTS.values()} == {
        name: int(of == role) for of, name in COUNTS.items()
    }
    assert counts["num_env_steps_without_report"] == 0
