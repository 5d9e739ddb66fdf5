"""Runs with a replay buffer: the ratio is kept, the books balance, what dead ranks held is counted; checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recovery_runs import kill

from rlzmq import Algorithm, DQNConfig, EpisodeBatch, SACConfig
from rlzmq.core.checkpoint import read_checkpoint
from tests.support.runs import assert_accounted, small, two_agents

FRESH, BATCH, RATIO, WARM_UP = 40, 32, 2.5, 100


def replay_config(
    num_env_runners: int, num_learners: int, staleness: int = 0, algorithm: str = "dqn"
) -> DQNConfig | SACConfig:
    settings: dict[str, Any] = {
        "num_env_runners": num_env_runners,
        "num_envs_per_env_runner": 4,
        "rollout_fragment_length": FRESH // (4 * max(num_env_runners, 1)),
        "num_learners": num_learners,
        "train_batch_size": BATCH,
        "n_step": (1, 3),
        "gamma": 0.9,
        "training_intensity": RATIO,
        "num_steps_sampled_before_learning_starts": WARM_UP,
        "target_network_update_freq": 80,
        "staleness": staleness,
        "model_config": {"fcnet_hiddens": [16]},
        "min_sample_timesteps_per_iteration": 1,
        "min_time_s_per_iteration": 0.0,
        "seed": 3,
    }
    if algorithm == "sac":
        return small(SACConfig, "Pendulum-v1", actor_lr=1e-3, alpha_lr=1e-2, **settings)
    if "recurrent" in algorithm:
        settings |= {"n_step": 1, "burn_in_len": 2, "replay_buffer_config": {"type": "EpisodeReplayBuffer"}}
        settings["model_config"] |= {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 6}
    settings |= {"config_class": DQNConfig, "lr": 1e-3, "epsilon": [(0, 1.0), (400, 0.1)]}
    return two_agents(**settings) if "multi-agent" in algorithm else small(**settings)


def check(result: dict[str, Any], cut: float = 0.0) -> int:
    """Returns the env steps trained in this update, repetitions counted.

    Args:
        result: Of `train`.
        cut: At most so large a part of them may be missing: sequences that end with their episode count as whole.
    """
    account = assert_accounted(result)
    lost = account["dropped"].get("buffer_lost", 0)
    taken_in = account["trained"] + lost
    due = RATIO * max(0, taken_in - WARM_UP)
    assert 0 <= due - result["num_env_steps_trained_lifetime"] < BATCH + cut * due
    source = result["learners"]["__all_modules__"]["batch_source"]
    assert source["num_bytes"] > 0
    buffers = result["replay_buffer"]
    assert buffers["num_env_steps_stored"] == source["num_env_steps"]
    assert buffers["num_bytes_stored"] == source["num_bytes"]
    if due >= BATCH:
        assert 0.0 <= RATIO - source["train_ratio"] < BATCH / (taken_in - WARM_UP) + cut * RATIO
    return int(result["learners"]["__all_modules__"]["num_env_steps_trained"])


@pytest.mark.parametrize("algorithm", ["recurrent dqn", "sac", "recurrent multi-agent dqn"])
def test_serial_and_distributed_runs_replay_the_same_numbers(algorithm: str) -> None:
    weights = []
    for num_env_runners, num_learners in ((0, 0), (1, 1)):
        with replay_config(num_env_runners, num_learners, algorithm=algorithm).build() as algo:
            trained = [check(algo.train(), cut=0.5 * ("recurrent" in algorithm)) for _ in range(8)]
            assert trained[0] == trained[1] == 0
            assert min(trained[3:]) > 0
            modules = algo.config.module_ids
            weights.append({module_id: algo.get_module(module_id).get_state() for module_id in modules})
    np.testing.assert_equal(*weights)


@pytest.mark.parametrize(
    ("staleness", "algorithm"), [(0, "dqn"), pytest.param(1, "sac", marks=pytest.mark.slow)]
)
async def test_a_dead_ranks_buffer_is_counted_and_the_others_go_on(staleness: int, algorithm: str) -> None:
    async with replay_config(2, 2, staleness, algorithm).build_async() as algo:
        for _ in range(6):
            result = await algo.train()
            check(result)
        assert "buffer_lost" not in result["accounting"]["dropped"]
        held = result["learners"]["__all_modules__"]["batch_source"]["num_env_steps"]
        assert held == result["accounting"]["trained"]
        for dying in (
            lambda: algo.learner_group.handles[1],
            lambda: algo.session.pipeline._broker.handle,
            lambda: algo.env_runner_group.handles[0],
            lambda: algo.env_runner_group.handles[1],
        ):
            await kill(dying())
            for _ in range(3):
                result = await algo.train()
                check(result)
        account = result["accounting"]
        assert 0 < account["dropped"]["buffer_lost"] < account["trained"]
        # What is stored now is what was taken in, less what was lost.
        assert result["learners"]["__all_modules__"]["batch_source"]["num_env_steps"] == account["trained"]
        assert result["fault_tolerance"]["num_learner_group_reforms"] >= 1
        assert result["fault_tolerance"]["num_broker_restarts"] == 1


async def test_a_resumed_run_continues_its_ratio_and_its_schedules(tmp_path: Path) -> None:
    async with replay_config(1, 1).build_async() as algo:
        for _ in range(6):
            check(await algo.train())
        path = await algo.save_to_path(tmp_path)
    async with replay_config(2, 1).build_async() as algo:
        await algo.restore_from_path(path)
        for num_done in (7, 8):
            result = await algo.train()
            check(result)
            assert (
                result["accounting"]["trained"] + result["accounting"]["dropped"]["buffer_lost"]
                >= 40 * num_done
            )
        second: dict[str, Any] = {"remote_worker_ids": [2]}
        # On a busy machine the first runner may have sampled these updates alone.
        group = algo.env_runner_group
        while (await group.foreach_env_runner(lambda runner: runner.global_env_steps, **second)) == [0]:
            check(await algo.train())
            num_done += 1
        # Epsilon is that of so many env steps, at first 280: 1 - 0.9 * 280 / 400.
        epsilon = 1 - 0.9 * 40 * (num_done - 1) / 400
        (sampled,) = await group.foreach_env_runner(_least_probability, **second)
        assert sampled == pytest.approx(epsilon / 2, abs=0.9 * 40 / 400)


def _least_probability(env_runner: Any) -> float:
    return float(np.exp(env_runner.sample_lease(1)[0].get_extra_model_outputs("action_dist_inputs", 0)).min())


def config_of(num_learners: int, *, stores: bool, kind: str = "PrioritizedEpisodeReplayBuffer") -> Any:
    config: Any = replay_config(min(num_learners, 1), num_learners)
    config.training(replay_buffer_config={"type": kind})
    return config.checkpointing(checkpoint_replay=stores)


def held_by(algo: Any) -> list[Counter[bytes]]:
    """The stored transitions of each rank, with their priorities."""

    def of_rank(learner: Any) -> Counter[bytes]:
        state = learner.get_state("source")["source"]["buffer"]
        stored = EpisodeBatch.from_wire(*state["episodes"])
        priorities = stored.columns.get("_priority", np.zeros(stored.num_slots))[stored.step_slots()]
        columns = [stored[name] for name in ("obs", "actions", "rewards")]
        return Counter(
            b"|".join(np.asarray(v).tobytes() for v in row) for row in zip(*columns, priorities, strict=True)
        )

    return [Counter(one) for one in algo.learner_group.foreach_learner(of_rank)]


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (0, 2, "PrioritizedEpisodeReplayBuffer"),
        (2, 2, "PrioritizedEpisodeReplayBuffer"),
        pytest.param(2, 1, "EpisodeReplayBuffer", marks=pytest.mark.slow),
    ],
)
def test_buffers_are_divided_among_any_number_of_ranks(
    tmp_path: Path, before: int, after: int, kind: str
) -> None:
    with config_of(before, stores=True, kind=kind).build() as algo:
        for _ in range(6):
            algo.train()
        held = held_by(algo)
        algo.save_to_path(tmp_path)
    assert [name for name in read_checkpoint(tmp_path) if "replay" in name] == [
        f"learner_group/replay-{rank}" for rank in range(max(before, 1))
    ]
    assert sum(map(Counter.total, held)) >= 6 * FRESH
    with Algorithm.from_checkpoint(tmp_path, config=config_of(after, stores=True, kind=kind)) as algo:
        again = held_by(algo)
        assert len(again) == max(after, 1)
        assert all(part.total() for part in again)
        assert sum(again, Counter()) == sum(held, Counter())
        if before == after:
            assert again == held
        result = algo.train()
    account = result["accounting"]
    assert "buffer_lost" not in account["dropped"]
    source = result["learners"]["__all_modules__"]["batch_source"]
    assert source["num_env_steps"] == account["trained"] >= 7 * FRESH


def test_without_the_setting_buffers_are_filled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(1, stores=False)
    with config.build() as algo:
        for _ in range(6):
            lost = algo.train()["accounting"]["trained"]
        algo.save_to_path(tmp_path)
    assert lost >= 6 * FRESH
    assert not any("replay" in name for name in read_checkpoint(tmp_path))
    with Algorithm.from_checkpoint(tmp_path, config=config) as algo:
        result = algo.train()
    assert [text for text in caplog.messages if "buffers" in text] == [
        f"The checkpoint was written without checkpoint_replay: the {lost} env steps that replay buffers held are "
        "lost, and empty buffers are filled by sampling."
    ]
    assert result["accounting"]["dropped"]["buffer_lost"] == lost
    assert result["learners"]["__all_modules__"]["batch_source"]["num_env_steps"] >= FRESH
