"""Shards: what was written is read, mapped and not loaded; what is torn is skipped; runs record their samples."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import ConfigurationError, PPOConfig
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.replay import EpisodeRecorder, open_shards, write_shard
from tests.support.runs import small
from tests.support.warm_process import WarmPopen


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
            action_space=gym.spaces.Discrete(3),
            terminated=bool(i % 2),
            truncated=not i % 2,
            len_lookback_buffer=0,
        )
        for i, length in enumerate(rng.integers(1, 20, num))
    ]


def assert_same(one: SingleAgentEpisode, other: SingleAgentEpisode) -> None:
    assert one.id_ == other.id_
    assert one.t_started == other.t_started
    assert (one.is_terminated, one.is_truncated) == (other.is_terminated, other.is_truncated)
    assert np.asarray(other.get_actions()).tolist() == np.asarray(one.get_actions()).tolist()
    assert np.asarray(other.get_rewards()).tolist() == np.asarray(one.get_rewards()).tolist()
    mine = one.get_observations()
    images = mine["image"] if isinstance(mine, dict) else [obs["image"] for obs in mine]
    assert (np.asarray(other.get_observations()["image"]) == np.asarray(images)).all()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = {id_.id_: id_ for seed in range(3) for id_ in episodes(5, seed)}
    for seed in range(3):
        write_shard(tmp_path / "data", episodes(5, seed), normalize_actions=True)
    opened = open_shards(tmp_path)
    assert len(opened.shards) == len(opened.paths) == 3
    for shard in opened.shards:
        assert not shard.columns["obs"]["image"].flags.writeable, "mapped, not loaded"
        assert shard.columns["obs"]["image"].dtype == np.uint8
        assert shard.action_space == gym.spaces.Discrete(3)
        assert shard.meta["normalize_actions"] is True
        for episode in shard:
            assert_same(written.pop(episode.id_), episode)
    assert not written
    assert open_shards(opened.paths[:1]).paths == opened.paths[:1], "single files, too"


def test_lookback_parts_and_steps_of_no_chunk_are_left_out(tmp_path: Path) -> None:
    batch = EpisodeBatch.from_episodes(episodes(4))
    total = batch.num_env_steps
    part = batch.slice_steps(3, total - 2)
    write_shard(tmp_path, part)
    (shard,) = open_shards(tmp_path).shards
    assert shard.num_env_steps == total - 5
    assert shard.num_slots == shard.num_env_steps + len(shard)
    assert shard.t_started.tolist() == part.t_started.tolist()


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="got none\nRecord episodes with"):
        open_shards(tmp_path)
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        open_shards(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="at least one step, got none"):
        write_shard(tmp_path, [])
    file = write_shard(tmp_path, episodes(2))
    file.write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"1 of which none is usable:\n.*torn or altered"):
        open_shards(tmp_path)


def test_a_shard_with_a_changed_byte_torn_or_made_longer_is_unusable(tmp_path: Path) -> None:
    whole = write_shard(tmp_path, episodes(2, seed=1))
    file = write_shard(tmp_path, episodes(2))
    content = file.read_bytes()
    last = len(content) - 1
    flipped = [
        content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        for at in (*range(64), *range(64, last, 37), last)
    ]
    torn = [content[:length] for length in (0, 1, 8, 12, 23, 24, 25, *range(26, last, 97), last)]
    for changed in (*flipped, *torn, content + b"\0"):
        file.write_bytes(changed)
        opened = open_shards(tmp_path)
        assert opened.paths == [whole]
        assert [path for path, _ in opened.skipped] == [file]
    assert "torn or altered" in opened.skipped[0][1]


def test_columns_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", episodes(1))
    one = episodes(1, seed=5)[0]
    other = SingleAgentEpisode(
        observations=[{"image": np.zeros((4, 5), np.uint8), "x/y": np.zeros(2)}] * 2,
        actions=[np.int64(1)], rewards=[0.0], terminated=True, len_lookback_buffer=0,
    )  # fmt: skip
    write_shard(tmp_path / "b", [other])
    with pytest.raises(ConfigurationError, match=r"column 'obs': expected .*uint8 \(4, 4\)"):
        open_shards(tmp_path)
    with pytest.raises(ValueError, match="column 'obs'"):
        write_shard(tmp_path, [one, other])


# -- recording ------------------------------------------------------------------------------------


def fragments(batch: EpisodeBatch, length: int) -> list[EpisodeBatch]:
    total = batch.num_env_steps
    return [batch.slice_steps(begin, min(begin + length, total)) for begin in range(0, total, length)]


@pytest.mark.parametrize("length", [1, 7, 1000])
@pytest.mark.parametrize("max_env_steps", [1, 30, 10_000])
def test_fragments_are_recorded_as_whole_episodes(tmp_path: Path, length: int, max_env_steps: int) -> None:
    written = episodes(9)
    recorder = EpisodeRecorder(tmp_path, max_env_steps=max_env_steps)
    for part in fragments(EpisodeBatch.from_episodes(written), length):
        recorder.add(part)
    recorder.close()
    recorder.close()
    read = {episode.id_: episode for shard in open_shards(tmp_path).shards for episode in shard}
    assert recorder.num_episodes == len(read) == len(written)
    assert recorder.num_env_steps == sum(map(len, written))
    for episode in written:
        assert_same(episode, read[episode.id_])


@pytest.mark.parametrize("writes_unfinished", [False, True])
def test_unfinished_episodes_are_written_only_if_asked_for(tmp_path: Path, writes_unfinished: bool) -> None:
    batch = EpisodeBatch.from_episodes(episodes(4))
    recorder = EpisodeRecorder(tmp_path, max_env_steps=5, writes_unfinished=writes_unfinished)
    recorder.add(batch.slice_steps(0, batch.num_env_steps - 1))
    recorder.close()
    read = [episode for shard in open_shards(tmp_path).shards for episode in shard]
    assert sum(not episode.is_done for episode in read) == int(writes_unfinished)
    assert sum(episode.is_done for episode in read) == 3


def test_an_abandoned_episode_is_forgotten(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path, max_env_steps=1, writes_unfinished=True)
    recorder.add(EpisodeBatch.from_episodes(episodes(1)).slice_steps(0, 2))
    for seed in range(1, 4):
        recorder.add(EpisodeBatch.from_episodes(episodes(1, seed)))
    recorder.close()
    assert [e.id_ for s in open_shards(tmp_path).shards for e in s if not e.is_done] == []
    assert recorder.num_episodes == 3


def test_a_full_disk_ends_the_recording_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "data"
    recorder = EpisodeRecorder(blocked, max_env_steps=1)
    blocked.rmdir()
    blocked.write_text("a file")
    with pytest.raises(ConfigurationError, match=r"cannot be recorded in .*data: "):
        EpisodeRecorder(blocked, max_env_steps=1)
    for seed in range(3):
        recorder.add(EpisodeBatch.from_episodes(episodes(1, seed)))
    recorder.close()
    assert recorder.num_episodes == 0
    (record,) = caplog.records
    assert "cannot be recorded" in record.getMessage()


WRITER = """
import sys
from tests.replay.test_shards import episodes
from rlzmq.core import faults
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.replay import EpisodeRecorder

faults.arm("writer")
recorder = EpisodeRecorder(sys.argv[1], max_env_steps=1)
for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 10):
    recorder.add(EpisodeBatch.from_episodes(episodes(3, seed)))
"""


@pytest.mark.parametrize("place", ["record.begun", "shard.written"])
def test_many_processes_write_into_a_directory_and_one_is_killed(tmp_path: Path, place: str) -> None:
    """The one is killed while it writes its fourth shard: the first three are whole, as are all of the others'."""
    writers = []
    for index in range(3):
        fault = {"RLZMQ_FAULT": f"{place}:kill:4"} if index == 0 else {}
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(100 * index)]
        writers.append(WarmPopen(command, env={**os.environ, **fault}))
    assert [writer.wait(60) for writer in writers] == [-signal.SIGKILL, 0, 0]
    opened = open_shards(tmp_path)
    ids = sorted(id_ for shard in opened.shards for id_ in shard.episode_ids)
    seeds = [*range(3), *range(100, 110), *range(200, 210)]
    assert ids == sorted(f"e{seed}-{i}" for seed in seeds for i in range(3))
    ((_, reason),) = opened.skipped
    assert "unfinished" in reason


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
