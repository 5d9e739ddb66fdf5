"""Shards: what was written is what is read, mapped and not loaded, and what is torn is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlzmq.core.errors import ConfigurationError
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.replay import open_shards, write_shard


def episodes(num: int, seed: int = 0) -> list[SingleAgentEpisode]:
    rng = np.random.default_rng(seed)
    return [
        SingleAgentEpisode(
            id_=f"e{seed}-{i}",
            observations=[
                {"image": rng.integers(0, 255, (4, 4), dtype=np.uint8), "x/y": rng.normal(size=2)}
                for _ in range(length + 1)
            ],
            actions=list(rng.integers(0, 3, length)),
            rewards=list(rng.normal(size=length)),
            terminated=bool(i % 2),
            truncated=not i % 2,
            len_lookback_buffer=0,
        )
        for i, length in enumerate(rng.integers(1, 20, num))
    ]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = [episodes(5, seed) for seed in range(3)]
    for index, batch in enumerate(written):
        write_shard(tmp_path / f"shard-{index:03d}", EpisodeBatch.from_episodes(batch))
    for batch, shard in zip(written, open_shards(tmp_path, verify=True), strict=True):
        assert isinstance(shard.columns["obs"]["image"], np.memmap)
        assert shard.columns["obs"]["image"].dtype == np.uint8
        for one, other in zip(batch, shard, strict=True):
            assert one.id_ == other.id_
            assert (one.is_terminated, one.is_truncated) == (other.is_terminated, other.is_truncated)
            assert np.asarray(other.get_actions()).tolist() == np.asarray(one.get_actions()).tolist()
            images = [obs["image"] for obs in one.get_observations()]
            assert (np.asarray(other.get_observations()["image"]) == images).all()


def test_lookback_parts_and_steps_of_no_chunk_are_left_out(tmp_path: Path) -> None:
    batch = EpisodeBatch.from_episodes(episodes(4))
    total = batch.num_env_steps
    part = batch.slice_steps(3, total - 2)
    write_shard(tmp_path / "part", part)
    (shard,) = open_shards(tmp_path)
    assert shard.num_env_steps == total - 5
    assert shard.num_slots == shard.num_env_steps + len(shard)
    assert shard.t_started.tolist() == part.t_started.tolist()


def test_what_is_not_there_or_not_whole_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="found none"):
        open_shards(tmp_path)
    shard = write_shard(tmp_path / "one", episodes(2))
    with pytest.raises(ConfigurationError, match="not empty"):
        write_shard(shard, episodes(2))
    file = next(shard.glob("*.npy"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert open_shards(tmp_path)
    with pytest.raises(ConfigurationError, match="not what was written"):
        open_shards(tmp_path, verify=True)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigurationError, match="Write it again"):
        open_shards(tmp_path)
    table = json.loads((shard / "shard.json").read_text())
    table["columns"]["obs"] = "../../etc/passwd"
    (shard / "shard.json").write_text(json.dumps(table))
    with pytest.raises(ConfigurationError, match="not a file of this shard"):
        open_shards(tmp_path)
