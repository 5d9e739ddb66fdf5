"""Runs whose updates take no fresh env steps: dead processes are replaced, and each rank trains its own episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recovery_runs import kill

from rlzmq import BCConfig, SingleAgentEnvRunner
from rlzmq.replay import write_shard
from tests.support.runs import small


def cloning_config(directory: Path, num_learners: int) -> Any:
    """Write two shards of CartPole episodes; return the config of a run that clones them."""
    runner = SingleAgentEnvRunner(config=small())
    for _ in range(2):
        write_shard(directory, runner.sample(num_episodes=8, random_actions=True))
    runner.stop()
    return small(
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
