"""Minari datasets to shards and back, with the real package; without it, an error that names the extra."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.core.errors import ConfigurationError
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.replay import export_to_minari, import_from_minari, open_shards, write_shard

OBSERVATIONS = gym.spaces.Dict(
    {"x": gym.spaces.Box(-9.0, 9.0, (2,), np.float32), "n": gym.spaces.Discrete(4)}
)
ACTIONS = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 8.0], np.float32))


def episode(index: int, length: int) -> SingleAgentEpisode:
    rng = np.random.default_rng(index)
    return SingleAgentEpisode(
        id_=f"e{index}",
        observations=[
            {"x": rng.normal(size=2).astype(np.float32), "n": np.int64(rng.integers(4))}
            for _ in range(length + 1)
        ],
        actions=[rng.uniform(-1, 1, 2).astype(np.float32) for _ in range(length)],
        rewards=list(rng.normal(size=length)),
        observation_space=OBSERVATIONS,
        action_space=ACTIONS,
        terminated=index % 2 == 0,
        truncated=index % 2 == 1,
        len_lookback_buffer=0,
    )


@pytest.mark.filterwarnings("ignore::UserWarning:minari")  # facts about a published dataset
def test_episodes_survive_the_way_to_minari_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    written = [episode(index, 3 + index) for index in range(4)]
    for one in written:
        write_shard(tmp_path / "a", [one], normalize_actions=True)
    dataset = export_to_minari(
        tmp_path / "a", "test/way-v0", algorithm_name="ppo", author="me", code_permalink="here"
    )
    assert dataset.total_episodes == 4
    first = dataset[0]
    low, high = ACTIONS.low, ACTIONS.high
    assert np.allclose(
        first.actions, low + (np.asarray(written[0].get_actions()) + 1) * (high - low) / 2, atol=1e-6
    )
    assert first.terminations.tolist() == [False, False, True]
    assert dataset[1].truncations.tolist() == [False, False, False, True]
    assert import_from_minari("test/way-v0", tmp_path / "b", max_env_steps=5) == 4
    opened = open_shards(tmp_path / "b")
    assert len(opened.shards) > 1
    assert opened.shards[0].action_space == ACTIONS
    assert opened.shards[0].meta["normalize_actions"] is True
    read = [back for shard in opened.shards for back in shard]
    for one, back in zip(written, read, strict=True):
        assert (one.is_terminated, one.is_truncated) == (back.is_terminated, back.is_truncated)
        assert np.allclose(back.get_actions(), one.get_actions(), atol=1e-6)
        assert np.allclose(back.get_rewards(), one.get_rewards(), atol=1e-6)
        assert np.array_equal(back.get_observations()["n"], [obs["n"] for obs in one.get_observations()])
        assert np.array_equal(back.get_observations()["x"], [obs["x"] for obs in one.get_observations()])
    assert import_from_minari(dataset, tmp_path / "c", normalize_actions=False) == 4
    (shard,) = open_shards(tmp_path / "c").shards
    assert np.array_equal(shard[0].get_actions(), first.actions)


def test_shards_without_spaces_cannot_be_exported(tmp_path: Path) -> None:
    pytest.importorskip("minari")
    one = SingleAgentEpisode(
        observations=[0.0, 1.0], actions=[0], rewards=[1.0], terminated=True, len_lookback_buffer=0
    )
    write_shard(tmp_path, [one])
    with pytest.raises(ConfigurationError, match="written without spaces"):
        export_to_minari(tmp_path, "test/none-v0")


def test_actions_of_unknown_range_and_of_another_environment_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("minari")
    write_shard(tmp_path / "a", [episode(0, 2)])
    with pytest.raises(ConfigurationError, match=r"bounds of Box.*normalize_actions=True"):
        export_to_minari(tmp_path / "a", "test/range-v0")
    write_shard(tmp_path / "b", [episode(0, 2)], normalize_actions=True)
    for env in ("CartPole-v1", gym.spec("CartPole-v1"), gym.make("CartPole-v1")):
        with pytest.raises(ConfigurationError, match=r"got .*CartPole.* with Discrete\(2\)"):
            export_to_minari(tmp_path / "b", "test/other-v0", env=env)
