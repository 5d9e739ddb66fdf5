"""Writers: what they wrote, read back by the library of each."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from rlzmq import Callback
from rlzmq.cli.main import main
from rlzmq.telemetry.runs import numbers_in
from rlzmq.telemetry.writers import (
    MLflowWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    Writer,
    make_writers,
)
from tests.support.runs import small

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def train(writer: Callback, num_iterations: int = 2, **evaluation: Any) -> list[dict[str, Any]]:
    config = small(train_batch_size_per_learner=128, lr=0.125, seed=3, callbacks_class=writer, **evaluation)
    with config.build() as algo:
        return [algo.train() for _ in range(num_iterations)]


def finite(result: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in numbers_in(result) if math.isfinite(value)}


def test_tensorboard_reads_every_number_the_histograms_and_the_settings(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    hparams = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    writer = TensorBoardWriter(tmp_path, histograms=True)
    results = train(writer, evaluation_interval=2, evaluation_duration=3)
    read = events.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "histograms": 0})
    read.Reload()
    for name, value in finite(results[-1]).items():
        point = read.Scalars(name)[-1]
        assert point.value == pytest.approx(value, rel=1e-6), name
        assert point.step == results[-1]["num_env_steps_sampled_lifetime"]
    returns = read.Scalars("env_runners/episode_return_mean")
    assert [point.step for point in returns] == [row["num_env_steps_sampled_lifetime"] for row in results]
    assert read.Histograms("evaluation/env_runners/hist_stats/episode_return")[0].histogram_value.num == 3
    weights = [name for name in read.Tags()["histograms"] if name.startswith("weights/default_policy/")]
    assert len(weights) >= 4
    assert len(read.Histograms(weights[0])) == 2
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    stored = hparams.parse_session_start_info_plugin_data(content).hparams
    assert stored["lr"].number_value == 0.125
    assert stored["env"].string_value == "CartPole-v1"


def test_what_a_resumed_run_repeats_replaces_what_was_written_of_it(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    steps = [row["num_env_steps_sampled_lifetime"] for row in train(TensorBoardWriter(tmp_path), 3)]
    train(TensorBoardWriter(tmp_path), 1)  # as if resumed before the first iteration
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [point.step for point in read.Scalars("training_iteration")] == steps[:1]


def test_a_writer_that_fails_is_named_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Writer):
        def write(self, *args: Any) -> None:
            raise OSError("no space left")

        def close(self) -> None:
            raise AssertionError("not opened")

    assert len(train(Full(), 3)) == 3
    assert [record.message for record in caplog.records if "Full" in record.message] == [
        "Full failed, and writes no more: OSError: no space left"
    ]


def test_train_writes_for_the_writers_of_log_and_evaluate_needs_no_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    arguments = [
        "train", "ppo", "--env", "CartPole-v1", "--env-runners", "0", "--batch-size-per-learner", "128",
        "--num-epochs", "1",
        "--minibatch-size", "64", "--preset", "none", "--stop", "iterations=2", "--quiet", "--run-dir", str(run),
    ]  # fmt: skip
    assert main([*arguments, "--log", "tb"]) == 0
    read = events.EventAccumulator(str(run))
    read.Reload()
    assert [point.value for point in read.Scalars("training_iteration")] == [1, 2]
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--log", "tb,wanddb", "--overwrite"]) == 78
    assert "no writer 'wanddb'. Did you mean 'wandb'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("tb", "tensorboard", "pip install 'rlzmq[tb]'"),
        ("wandb", "wandb", "pip install wandb"),
        ("mlflow", "mlflow", "pip install mlflow"),
        ("trackio", "trackio", "pip install trackio"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command(
    name: str, module: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"needs {module}: ") as raised:
        make_writers(f"{name},{name}", tmp_path)
    assert command in str(raised.value)


class Ends(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        self.calls.append("init")

    def on_algorithm_end(self, *, algorithm: Any, **kwargs: Any) -> None:
        self.calls.append(f"end after {algorithm.iteration}")
        raise ZeroDivisionError


def test_the_end_is_told_once_and_an_error_in_it_leaves_no_process() -> None:
    ends = Ends()
    with pytest.raises(ZeroDivisionError):
        train(ends, 1)
    assert ends.calls == ["init", "end after 1"]


def test_mlflow_reads_the_numbers_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    results = train(MLflowWriter(tmp_path / "mine"))
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert (run.info.run_name, run.info.status, run.data.params["lr"]) == ("mine", "FINISHED", "0.125")
    expected = finite(results[0]) | finite(results[1])
    assert run.data.metrics == pytest.approx(expected)


class FakeWandb:
    """Keeps what W&B is told."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.num_ends = 0

    def init(self, *, project: str, dir: str, config: dict[str, Any]) -> FakeWandb:
        self.config = config
        return self

    def log(self, numbers: dict[str, float], *, step: int) -> None:
        self.rows.append((step, numbers))

    def finish(self) -> None:
        self.num_ends += 1


def test_wandb_gets_the_numbers_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    results = train(WandbWriter(tmp_path))
    assert (fake.config["lr"], fake.num_ends) == (0.125, 1)
    assert [step for step, _ in fake.rows] == [row["num_env_steps_sampled_lifetime"] for row in results]
    for (_, numbers), result in zip(fake.rows, results, strict=True):
        assert finite(result).items() <= numbers.items()


def test_trackio_reads_the_numbers_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    results = train(TrackioWriter(tmp_path / "mine"))
    rows = SQLiteStorage.get_logs("rlzmq", "mine")
    assert [row["step"] for row in rows] == [row["num_env_steps_sampled_lifetime"] for row in results]
    assert {name: rows[-1][name] for name in finite(results[-1])} == pytest.approx(finite(results[-1]))
