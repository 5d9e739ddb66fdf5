"""Replay buffers in checkpoints: restored by any number of ranks, or left out and filled by sampling."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_runs import FRESH, replay_config

from rlzmq import Algorithm, EpisodeBatch
from rlzmq.core.checkpoint import read_checkpoint


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
        (2, 1, "EpisodeReplayBuffer"),
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
