"""Runs whose updates take no fresh env steps: nothing is sampled, runners evaluate, dead processes are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from offline_runs import BATCH, PER_UPDATE, cloning_config
from recovery_runs import kill


@pytest.mark.parametrize(("num_env_runners", "num_learners"), [(0, 0), (0, 1), (1, 2)])
def test_updates_without_fresh_data_train(tmp_path: Path, num_env_runners: int, num_learners: int) -> None:
    config = cloning_config(tmp_path, num_env_runners, num_learners)
    config.evaluation(
        evaluation_interval=2, evaluation_duration=2, evaluation_num_env_runners=min(num_learners, 1)
    )
    with config.build() as algo:
        for number in range(1, 5):
            result = algo.train()
            assert result["num_env_steps_trained_lifetime"] == number * BATCH * PER_UPDATE * max(
                num_learners, 1
            )
            assert result["accounting"] == {"sampled": 0, "trained": 0, "dropped": {}, "pending": 0}
            assert ("evaluation" in result) == (number >= 2)  # the last one, between evaluations
        assert result["evaluation"]["env_runners"]["num_episodes"] == 2
        assert result["learners"]["default_policy"]["weights_seq_no"] == 4


async def test_dead_ranks_and_brokers_are_replaced_in_a_run_that_samples_nothing(tmp_path: Path) -> None:
    async with cloning_config(tmp_path, 1, 2).build_async() as algo:
        for number in range(1, 9):
            result = await algo.train()
            assert result["learners"]["default_policy"]["weights_seq_no"] == number
            if number == 2:
                await kill(algo.learner_group.handles[1])
            elif number == 4:
                await kill(algo.session.pipeline._broker.handle)
            elif number == 6:
                await kill(algo.env_runner_group.handles[0])
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
