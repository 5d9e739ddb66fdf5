"""rlzmq train with --output and --input, evaluate and record of a checkpoint whose data is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlzmq.cli.main import main


def test_a_policy_is_recorded_cloned_evaluated_and_recorded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "data", tmp_path / "bc"
    common = [
        "--env",
        "CartPole-v1",
        "--preset",
        "none",
        "--seed",
        "1",
        "--model-config",
        "fcnet_hiddens=[8]",
    ]
    online = [
        "--env-runners",
        "0",
        "--train-batch-size",
        "400",
        "--num-epochs",
        "1",
        "--stop",
        "iterations=1",
        "--quiet",
    ]
    given = ["train", "ppo", *common, *online, "--output", str(data), "--run-dir", str(tmp_path / "ppo")]
    assert main(given) == 0
    assert list(data.glob("*.shard"))
    offline = ["--input", str(data), "--dataset-num-iters-per-learner", "2", "--train-batch-size", "64"]
    goals = [
        "--stop",
        "steps=300",
        "--stop",
        "return=1000",
        "--evaluation-interval",
        "1",
        "--evaluation-duration",
        "2",
    ]
    assert main(["train", "bc", *common, *offline, *goals, "--run-dir", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "num_env_steps_trained_lifetime = 384 ≥ 300" in shown
    assert "evaluation " in shown
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1])["num_env_steps_trained_lifetime"] == 384
    shutil.rmtree(data)
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0, "the policy is needed, not its data"
    assert main(["record", str(run), "--episodes", "2", "--output", str(tmp_path / "again")]) == 0
    assert main(["train", "bc", *common, *offline, "--run-dir", str(tmp_path / "third")]) == 78
    assert "data does not exist" in capsys.readouterr().err
