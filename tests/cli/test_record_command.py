"""rlzmq record and inspect: episodes in files; rlzmq train with --output and --input, evaluate without its data."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from rlzmq.cli.main import main
from rlzmq.replay import open_shards
from tests.support.runs import small


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PPO run of one update on CartPole."""
    config = small(minibatch_size=64, seed=3)
    path = tmp_path_factory.mktemp("run") / "checkpoint"
    with config.build() as algo:
        algo.train()
        algo.save_to_path(path)
    return path


def returns_in(directory: Path) -> list[float]:
    return sorted(np.concatenate([shard.get_returns() for shard in open_shards(directory).shards]).tolist())


def test_a_checkpoints_episodes_are_recorded(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "data"
    arguments = ["record", str(checkpoint), "--output", str(output), "--episodes", "7"]
    assert main([*arguments, "--env-runners", "2"]) == 0
    assert "recorded  7 episodes" in capsys.readouterr().out
    returns = returns_in(output)
    assert len(returns) == 7
    shard = open_shards(output).shards[0]
    assert (shard.terminated | shard.truncated).all()
    assert shard.observation_space is not None
    assert shard.meta["normalize_actions"] is True
    assert main([*arguments, "--random"]) == 78
    assert "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--random", "--overwrite"]) == 0
    assert len(returns_in(output)) == 7, "the others are aside"


def test_inspect_shows_recorded_episodes_and_files_that_cannot_be_used(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        assert main(["record", str(checkpoint), "--output", str(tmp_path / name), "--episodes", "3"]) == 0
        for shard in open_shards(tmp_path / name).paths:
            shard.rename(tmp_path / shard.name)
    torn = open_shards(tmp_path).paths[0]
    torn.write_bytes(torn.read_bytes()[:-5])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"{torn.name} +NOT USABLE +torn or altered: its \d+ bytes", shown)
    assert re.search(r"whole +3 episodes +\d+ steps +return \d+", shown)
    assert re.search(r"3 episodes \(3 ended\), \d+ env steps in 1 shards; 1 files skipped", shown)
    for column in ("obs: ", "actions: ", "rewards: ", "action_logp: "):
        assert column in shown
    assert "return  mean" in shown
    for file in tmp_path.glob("*.shard"):
        file.write_bytes(b"")
    assert main(["inspect", str(tmp_path)]) == 78
    assert "none is usable" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nothing")]) == 78
    assert "/nothing: there is no such directory. Name a run" in capsys.readouterr().err


def test_a_clone_of_recorded_episodes_needs_them_only_to_train(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "data", tmp_path / "bc"
    assert main(["record", str(checkpoint), "--output", str(data), "--episodes", "20"]) == 0
    offline = [
        "train",
        "bc",
        "--env",
        "CartPole-v1",
        "--preset",
        "none",
        "--model-config",
        "fcnet_hiddens=[8]",
    ]
    offline += ["--dataset-num-iters-per-learner", "2", "--train-batch-size", "64", "--input", str(data)]
    assert main([*offline, "--stop", "steps=300", "--run-dir", str(run)]) == 0
    assert "num_env_steps_trained_lifetime = 384 ≥ 300" in capsys.readouterr().out
    shutil.rmtree(data)
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert main(["record", str(run), "--episodes", "2", "--output", str(tmp_path / "again")]) == 0
    assert main([*offline, "--run-dir", str(tmp_path / "third")]) == 78
    assert "data does not exist" in capsys.readouterr().err
