"""``rlzmq tune``: a search from a TOML file."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from rlzmq import ConfigurationError, PPOConfig, tune
from rlzmq.cli.main import main

_SPACE = """
trainable = "PPO"

[environment]
env = "CartPole-v1"

[env_runners]
num_env_runners = 0

[training]
lr = { grid_search = [0.001, 0.0001] }
gamma = { uniform = [0.9, 0.99] }
train_batch_size_per_learner = 64
minibatch_size = 32
num_epochs = 1

[rl_module]
model_config = { fcnet_hiddens = { choice = [[4], [8]] } }

[tune]
scheduler = { name = "asha", max_t = 2 }

[stop]
training_iteration = 1
"""


def test_a_search_from_a_file_its_summary_and_its_continuation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fork_server: None
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    space = tmp_path / "space.toml"
    space.write_text(_SPACE)
    arguments = ["tune", str(space), "--dir", str(tmp_path), "--name", "mine", "--preset", "none"]
    assert main([*arguments, "--log", "tb"]) == 0
    said = capsys.readouterr().out
    assert "PPO_00001 terminated" in said
    for trial in ("PPO_00000", "PPO_00001"):
        read = events.EventAccumulator(str(tmp_path / "mine" / trial))
        read.Reload()
        assert [point.step for point in read.Scalars("num_env_steps_sampled_lifetime")] == [64]
    assert "2 trials ended, 0 failed" in said
    assert "best        env_runners/episode_return_mean = " in said
    assert "rlzmq evaluate " in said
    (train,) = (line for line in said.splitlines() if line.startswith("train "))
    config = PPOConfig.from_toml(Path(train.split("--config ")[1].split()[0]))
    assert config.lr in (0.001, 0.0001)
    assert config.train_batch_size_per_learner == 64
    assert main(arguments) == 78  # it exists
    assert "Tuner.restore" in capsys.readouterr().err
    assert main([*arguments, "--resume", "--quiet"]) == 0
    assert "2 trials ended, 0 failed" in capsys.readouterr().out


def test_an_interrupted_search_names_the_command_that_continues_it_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("rlzmq.tune.tuner.Tuner.fit", interrupted)
    space = tmp_path / "my space.toml"
    space.write_text(_SPACE)
    given = ["tune", str(space), "--dir", str(tmp_path), "--trials", "3"]
    assert main(given) == 130
    again = shlex.split(capsys.readouterr().out.splitlines()[-1])[2:]
    assert again[: len(given)] == given
    assert again[len(given)] == "--name"
    assert again[-1] == "--resume"
    assert main(again) == 130
    assert shlex.split(capsys.readouterr().out.splitlines()[-1])[2:] == again


def test_a_function_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fork_server: None
) -> None:
    space = tmp_path / "space.toml"
    space.write_text(
        'trainable = "tests.tune.trainables:score"\n[param_space]\nx = { grid_search = [1, 2] }\n'
        '[tune]\nmetric = "score"\n'
    )
    flags = ["--quiet", "--stop", "iterations=2", "--max-concurrent-trials", "1"]
    assert main(["tune", str(space), "--dir", str(tmp_path), *flags]) == 0
    assert "score = 4 in " in capsys.readouterr().out
    assert main(["tune", str(space), "--dir", str(tmp_path), *flags, "--metric", "scores"]) == 78
    assert "results have no 'scores'. Did you mean 'score'?" in capsys.readouterr().err


def test_searches_of_algorithms_that_learn_from_files_count_trained_steps_and_compare_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Any] = {}

    def make(trainable: str, **settings: Any) -> None:
        made.update(settings)
        raise ConfigurationError("enough is known")

    monkeypatch.setattr("rlzmq.tune.Tuner", make)
    words = ["tune", "bc", "--env", "CartPole-v1", "--lr", "1,2", "--stop", "steps=5"]
    assert main([*words, "--evaluation-interval", "1"]) == 78
    assert made["run_config"].stop == {"num_env_steps_trained_lifetime": 5}
    assert made["tune_config"].metric == "evaluation/env_runners/episode_return_mean"


def test_a_search_in_which_no_episode_has_ended_needs_longer_trials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tune.ResultGrid(
        [tune.Result({"env_runners": {}}, {}, "a")], "", "env_runners/episode_return_mean", "max"
    )
    monkeypatch.setattr("rlzmq.tune.tuner.Tuner.fit", lambda self: grid)
    assert main(["tune", "ppo", "--env", "CartPole-v1", "--lr", "1,2"]) == 78
    assert "No episode has ended in any of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tune]\n", 'which trainable? Begin with e.g. trainable = "PPO"'),
        ('trainable = "PPO"\n[trainng]\nlr = 1\n', "Did you mean 'training'"),
        ('trainable = "PPO"\n[tune]\nmetrik = "a"\n', "unexpected keyword argument 'metrik'"),
        ('trainable = "tests.tune.trainables:score"\n[parm_space]\nx = 1\n', "Did you mean 'param_space'"),
    ],
)
def test_mistakes_in_the_file_are_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = tmp_path / "space.toml"
    space.write_text(text)
    assert main(["tune", str(space), "--dir", str(tmp_path / "runs"), "--quiet"]) == 78
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
