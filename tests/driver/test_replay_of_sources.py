"""Runs with a replay buffer, or on files only, that were recorded, and their learner's side repeated bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from offline_runs import cloning_config
from replay_runs import replay_config

from rlzmq import Algorithm
from rlzmq.algorithms.replay import Replay, load_update
from rlzmq.core.errors import ConfigurationError
from rlzmq.roles.arrival_log import WeightsDigest, digest_weights, first_difference


def config_of(case: str, path: Path) -> Any:
    if case == "files":
        config = cloning_config(path / "shards", 1, 1)
    else:
        config: Any = replay_config(2, 1)
        kinds = {"uniform": "EpisodeReplayBuffer", "prioritized": "PrioritizedEpisodeReplayBuffer"}
        config.training(replay_buffer_config={"type": kinds[case]})
    return config.debugging(record_dir=str(path / "run" / "arrivals"))


def weights_of(algo: Any) -> WeightsDigest:
    return digest_weights(algo.get_state("learner_group")["learner_group"]["learner"]["rl_module"])


@pytest.mark.parametrize("case", ["uniform", "prioritized", "files"])
def test_a_recorded_run_on_a_source_is_repeated_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Also the part of it that was resumed from a checkpoint, which does not hold the source."""
    config, run = config_of(case, tmp_path), tmp_path / "run"
    with Algorithm.resume(run, config=config) as algo:
        for _ in range(5):
            algo.train()
        algo.save_checkpoint()
    with Algorithm.resume(run, config=config) as algo:
        for _ in range(4):
            algo.train()
        last = weights_of(algo)
    replay = Replay(run, config=config)
    assert replay.notes == []
    done = list(replay.updates())
    assert [update.version for update in done] == list(range(1, 10))
    assert all(update.is_compared for update in done)
    assert len(replay.began_at) == 2
    assert max(len(update.batches) for update in done) > 1
    learner, update = load_update(replay.save(tmp_path / "left"), config=config)
    assert weights_differ(learner, last)
    learner.update(**update)
    assert not weights_differ(learner, last)


def weights_differ(learner: Any, expected: WeightsDigest) -> bool:
    return bool(first_difference(expected, digest_weights(learner.get_state("rl_module")["rl_module"])))


def test_a_replay_whose_files_are_gone_is_refused(tmp_path: Path) -> None:
    config = config_of("files", tmp_path)
    with config.build() as algo:
        algo.train()
    for path in (tmp_path / "shards").iterdir():
        path.unlink()
    with pytest.raises(ConfigurationError, match="shards"):
        list(Replay(tmp_path / "run", config=config).updates())
