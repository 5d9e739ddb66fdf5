"""offline_data(output=…): what runners sample is in files, in one process and in several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import ConfigurationError, PPOConfig
from rlzmq.replay import open_shards
from tests.support.runs import small


def recording(path: Path, **settings: Any) -> PPOConfig:
    config: PPOConfig = small(num_envs_per_env_runner=3, train_batch_size_per_learner=120)
    config.offline_data(output=str(path), output_max_rows_per_file=100, **settings)
    return config


@pytest.mark.parametrize("processes", [0, 2])
def test_a_run_records_what_it_samples(tmp_path: Path, processes: int) -> None:
    config = recording(tmp_path).env_runners(num_env_runners=processes)
    config.offline_data(output_write_remaining_data=True)
    config.evaluation(evaluation_interval=1, evaluation_duration=2)
    with config.build() as algo:
        for _ in range(3):
            result = algo.train()
    opened = open_shards(tmp_path)
    assert not opened.skipped
    assert len(opened.shards) >= max(processes, 2)
    recorded = sum(shard.num_env_steps for shard in opened.shards)
    account = algo.accounting
    assert account.sampled <= recorded, "evaluation's steps are left out, what was not trained is not"
    assert recorded <= account.sampled + account.pending + 3 * 40 * max(processes, 1)
    episodes = [episode for shard in opened.shards for episode in shard]
    assert len({episode.id_ for episode in episodes}) == len(episodes)
    assert all(episode.t_started == 0 for episode in episodes)
    ended = [episode.get_return() for episode in episodes if episode.is_done]
    assert np.mean(ended) == pytest.approx(result["env_runners"]["episode_return_mean"], rel=0.2)


def test_several_agents_cannot_be_recorded(tmp_path: Path) -> None:
    config = recording(tmp_path).multi_agent(
        policies={"a", "b"}, policy_mapping_fn=lambda agent, episode: "a"
    )
    with pytest.raises(ConfigurationError, match="only episodes of single-agent"):
        config.validate()
