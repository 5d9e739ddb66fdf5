"""Processes that die at chosen places, also in runs on recorded data; runs that stand still for no known reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recovery_runs import check_account, kill, large, small

from rlzmq import BCConfig, SingleAgentEnvRunner
from rlzmq.core.errors import StandstillError
from rlzmq.core.patience import Patience
from rlzmq.core.run_dir import find_checkpoint
from rlzmq.replay import write_shard
from tests.support.runs import small as small_run

PLACES = [
    (small, "broker.UpdateDone@broker:kill:3"),  # trained, the driver not told
    (small, "learner.Shard@learner-1:kill:2"),  # delivered, not decoded
    (small, "learner.vote@learner-0:kill:2"),  # all steps done, no vote
    (small, "learner.voted@learner-1:stop:2"),  # hangs
    (small, "runner.Lease@runner-0:kill:3"),
    (large, "runner.sent@runner-0:kill:2"),  # nobody but the socket knows of the segment
    (large, "broker.Fragment@broker:kill:3"),  # held and in the ledger, not acknowledged
]
MORE_PLACES = [
    (small, "runner.sampled@runner-0:kill:2"),
    (small, "broker.Fragment@broker:kill:3"),  # in the ledger, not acknowledged
    (small, "broker.OpenUpdate@broker:kill:2"),
    (small, "broker.ShardReady@broker:kill:2"),
    (small, "broker.DriverState@broker:kill:2"),
    (small, "learner.Train@learner-0:kill:2"),  # told to train
    (small, "learner.train@learner-1:kill:2"),  # before its first collective
    (small, "learner.voted@learner-1:kill:2"),  # voted, nobody told
    (small, "learner.UpdateCommitted@learner-1:kill:1"),
    (small, "runner.sent@runner-0:exit:2"),
    (large, "broker.ShardReady@broker:kill:2"),
    (small, "broker.Weights@broker:kill:2"),
    (small, "learner.trained@learner-0:kill:2"),  # trained, the broker not told
    (large, "learner.train@learner-0:kill:2"),
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


def cloning_config(directory: Path, num_learners: int) -> Any:
    """Write two shards of CartPole episodes; return the config of a run that clones them."""
    runner = SingleAgentEnvRunner(config=small_run())
    for _ in range(2):
        write_shard(directory, runner.sample(num_episodes=8, random_actions=True))
    runner.stop()
    return small_run(
        BCConfig,
        num_learners=num_learners,
        input_=str(directory),
        dataset_num_iters_per_learner=3,
        train_batch_size_per_learner=20,
        min_time_s_per_iteration=0,
    )


async def test_dead_ranks_and_brokers_are_replaced_in_a_run_that_samples_nothing(tmp_path: Path) -> None:
    async with cloning_config(tmp_path, 2).build_async() as algo:
        for number in range(1, 9):
            result = await algo.train()
            assert result["learners"]["default_policy"]["weights_seq_no"] == number
            if number == 2:
                await kill(algo.learner_group.handles[1])
            elif number == 4:
                await kill(algo.session.pipeline._broker.handle)
            elif number == 6:
                await kill(algo.learner_group.handles[0])
        while len(algo.learner_group.handles) < 2:
            result = await algo.train()
        hashes = await algo.learner_group.foreach_learner(lambda learner: learner.parameter_hash())
        parts = await algo.learner_group.foreach_learner(lambda learner: learner.source._rank)
    assert len(set(hashes)) == 1
    assert sorted(parts) == [(0, 2), (1, 2)], "each rank trains its own part of the episodes"
    assert result["accounting"] == {"sampled": 0, "trained": 0, "dropped": {}, "pending": 0}
    assert result["fault_tolerance"]["num_broker_restarts"] == 1
    assert result["fault_tolerance"]["num_learner_group_reforms"] >= 2


def impatient(algo: Any, min_s: float) -> None:
    algo.session.pipeline._watchdog._patience = Patience(min_s)


async def test_a_standstill_is_reported_formed_anew_and_ends_the_run_with_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rlzmq")
    async with small(1, 1).build_async() as algo:
        algo.keep_checkpoints(tmp_path)
        for _ in range(2):
            await algo.train()
        impatient(algo, 1.0)
        dumped = []
        runner = algo.env_runner_group.handles[0]
        runner.send_signal = lambda number: dumped.append(runner)
        algo.session.pipeline._driver.core.open_update = lambda update: []  # the broker never hears of it
        with pytest.raises(StandstillError, match="waits for the driver to open update 2"):
            await algo.train()
        assert algo.session.fault_tolerance()["num_broker_restarts"] == 1
        assert algo.session.fault_tolerance()["num_learner_group_reforms"] == 1
    assert "Re-forming broker and learner group, once" in caplog.text
    assert dumped == [runner, runner]
    assert find_checkpoint(tmp_path).path is not None


async def test_a_standstill_that_forming_anew_ends_is_survived() -> None:
    async with small(1, 1).build_async() as algo:
        await algo.train()
        impatient(algo, 4.0)
        pipeline = algo.session.pipeline
        broker = pipeline._broker.handle
        await broker.apply(lambda role: setattr(role._core._grants, "progress", lambda now: None))
        result = await algo.train()  # no lease is granted until another broker comes
        assert result["learners"]["default_policy"]["weights_seq_no"] == 2
        assert pipeline._broker.handle is not broker
        assert (await algo.train())["fault_tolerance"]["num_broker_restarts"] == 1
