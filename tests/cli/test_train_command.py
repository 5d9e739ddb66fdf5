"""The train and evaluate commands in processes of their own: files, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlzmq import latest_checkpoint

TRAIN = [
    "train", "ppo", "--env", "CartPole-v1", "--envs-per-env-runner", "4", "--batch-size-per-learner", "200",
    "--minibatch-size", "50", "--num-epochs", "1", "--seed", "3", "--preset", "none",
]  # fmt: skip


def command(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rlzmq", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if path.name.startswith("rlzmq")]


def test_a_run_leaves_its_config_metrics_and_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = command(tmp_path, *TRAIN, "--env-runners", "1", "--stop", "iterations=3", "--run-dir", str(run))
    out, err = train.communicate(timeout=100)
    assert train.returncode == 0, err
    assert "training_iteration = 3 ≥ 3" in out
    assert "accounting: sampled" in out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 3]
    account = rows[-1]["accounting"]
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
    assert 'env = "CartPole-v1"' in (run / "config.toml").read_text()
    assert leftovers(tmp_path) == []

    resumed = command(
        tmp_path, *TRAIN, "--env-runners", "0", "--resume", str(run), "--stop", "iterations=4",
        "--run-dir", str(run),
    )  # fmt: skip
    out, err = resumed.communicate(timeout=100)
    assert resumed.returncode == 0, err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["training_iteration"] == 4
    assert rows[-1]["accounting"]["trained"] == 800

    evaluate = command(tmp_path, "evaluate", str(run), "--episodes", "3", "--seed", "0")
    out, err = evaluate.communicate(timeout=100)
    assert evaluate.returncode == 0, err
    assert out.startswith("episodes 3  return mean ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_in_order(number: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = command(tmp_path, *TRAIN, "--env-runners", "1", "--learners", "1", "--run-dir", str(run))
    assert train.stdout is not None
    assert train.stdout.readline().startswith("iter 1")
    family = psutil.Process(train.pid).children(recursive=True)
    assert family
    train.send_signal(number)
    out, err = train.communicate(timeout=30)
    assert train.returncode == (130 if number == signal.SIGINT else 75), err
    assert "interrupted" in out
    assert latest_checkpoint(run) is not None
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert leftovers(tmp_path) == []
