"""The train and evaluate commands in processes of their own: files, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import psutil
import pytest

from rlzmq.cli.main import main
from tests.support.runs import assert_accounted
from tests.support.warm_process import WarmPopen

TRAIN = [
    "train", "ppo", "--env", "CartPole-v1", "--envs-per-env-runner", "4", "--batch-size-per-learner", "200",
    "--minibatch-size", "50", "--num-epochs", "1", "--seed", "3", "--preset", "none",
]  # fmt: skip


def command(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return WarmPopen(
        [sys.executable, "-m", "rlzmq", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )


MY_ENVS = """
import gymnasium as gym, numpy as np

class Walk(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 10, False, {}

gym.register(id="Walk-v0", entry_point="my_envs:Walk")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module of the user's, as it is for the installed command: not on the path."""
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("my_envs", None)
    gym.registry.pop("Walk-v0", None)


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if path.name.startswith("rlzmq")]


def test_a_run_leaves_its_config_metrics_and_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train = command(tmp_path, *TRAIN, "--env-runners", "1", "--stop", "iterations=3", "--run-dir", str(run))
    out, err = train.communicate(timeout=100)
    assert train.returncode == 0, err
    assert "training_iteration = 3 ≥ 3" in out
    assert "accounting: sampled" in out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 3]
    assert_accounted(rows[-1])
    assert 'env = "CartPole-v1"' in (run / "config.toml").read_text()
    assert leftovers(tmp_path) == []

    more = ["--env-runners", "0", "--resume", str(run), "--stop", "iterations=4", "--run-dir", str(run)]
    assert main([*TRAIN, *more]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["training_iteration"] == 4
    assert rows[-1]["accounting"]["trained"] >= 800

    capsys.readouterr()
    assert main(["evaluate", str(run), "--episodes", "3", "--seed", "0"]) == 0
    assert capsys.readouterr().out.startswith("episodes 3  return mean ")


def test_a_signal_while_learners_are_waited_for_leaves_no_keys_behind(tmp_path: Path) -> None:
    distributed = ["--listen", "tcp://127.0.0.1:0", "--learners", "1", "--num-remote-learners", "1"]
    train = command(
        tmp_path, *TRAIN, *distributed, "--env-runners", "1", "--join-file", str(tmp_path / "join.toml")
    )
    assert train.stderr is not None
    while not (line := train.stderr.readline()).startswith("waiting for learners:"):
        assert line, "it ended before it listened"
    family = psutil.Process(train.pid).children(recursive=True)
    assert sorted(tmp_path.glob("join*.toml"))
    train.send_signal(signal.SIGTERM)
    out, err = train.communicate(timeout=60)
    assert train.returncode == 75, err
    assert out.endswith("interrupted\n")
    assert sorted(tmp_path.glob("join*.toml")) == []
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert leftovers(tmp_path) == []


def test_modules_of_the_current_directory_are_found_and_the_printed_commands_work(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "ppo", "--env", "my_envs:Walk", "--steps", "1"]) == 0
    gym.registry.pop("Walk-v0")
    sys.modules.pop("my_envs")
    own = ["--env", "Walk-v0", "--import", "my_envs", "--env-runners", "1", "--lr", "0.125"]
    assert main([*TRAIN, *own, "--stop", "iterations=1", "--run-dir", "my run"]) == 0
    printed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if " rlzmq " in line)
    assert main([*shlex.split(printed["evaluate"])[1:], "--episodes", "1"]) == 0
    more = ["--env-runners", "0", "--stop", "iterations=2", "--run-dir", "r2"]
    assert main([*shlex.split(printed["resume"])[1:], *more]) == 0
    assert "lr = 0.125" in (here / "r2" / "config.toml").read_text()
    assert json.loads((here / "r2" / "metrics.jsonl").read_text())["training_iteration"] == 2


def test_bad_run_directories_configs_and_checkpoints_are_named_before_anything_is_built(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(config: object, checkpoint: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("rlzmq.cli.train._build", build)
    assert main([*TRAIN, "--run-dir", "/proc/x", "--quiet"]) == 78
    assert "cannot write to the run directory /proc/x" in capsys.readouterr().err
    (here / "bin.toml").write_bytes(b"\xff\xfe")
    assert main([*TRAIN, "--config", "bin.toml"]) == 78
    assert "Cannot read bin.toml" in capsys.readouterr().err
    (here / "torn").mkdir()
    (here / "torn" / "manifest.json").write_text("{")
    assert main(["train", "ppo", "--resume", "torn"]) == 78
    said = capsys.readouterr().err
    assert "torn is neither a complete checkpoint nor" in said
    assert f"{here / 'torn'}: " in said, "with the reason"
    assert main([*TRAIN, "--run-dir", "gone/deep", "--quiet"]) == 70
    assert not (here / "gone").exists()
