"""Rules that end trials, and the table of trials."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlzmq import tune
from rlzmq.core.errors import ConfigurationError
from rlzmq.tune.stopper import (
    CombinedStopper,
    ExperimentPlateauStopper,
    MaximumIterationStopper,
    NoopStopper,
    TimeoutStopper,
    TrialPlateauStopper,
    make_stopper,
)
from rlzmq.tune.study import Claim
from rlzmq.tune.trial import Trial
from rlzmq.tune.tuner import LinesView, TableView


def results(*values: float) -> list[dict[str, Any]]:
    return [{"training_iteration": index, "loss": value} for index, value in enumerate(values, 1)]


def ends_at(stopper: Any, *values: float) -> int | None:
    ends = (result["training_iteration"] for result in results(*values) if stopper("00000", result))
    return next(ends, None)


def test_thresholds_are_reached_by_values_that_are_not_smaller(caplog: pytest.LogCaptureFixture) -> None:
    assert ends_at(make_stopper({"loss": 3}), 1, 2, 3, 4) == 3
    assert ends_at(make_stopper({"loss": 9, "evaluation/return": 1}), 1, 2) is None  # evaluations come later
    with caplog.at_level(logging.WARNING):
        assert ends_at(make_stopper({"los": 0, "loss": 2}), 1, 2) == 2
    assert "results have no 'los'. Did you mean 'loss'" in caplog.text
    assert ends_at(make_stopper({"loss": 3}), float("nan"), 4) == 2
    with pytest.raises(ConfigurationError, match=r"results have no 'los'. Did you mean 'loss'"):
        ends_at(make_stopper({"los": 0}), 1)


def test_nested_dicts_and_functions_end_trials() -> None:
    nested = {"training_iteration": 1, "nested": {"half": 0.5}}
    assert make_stopper({"nested": {"half": 0.5}})("00000", nested)
    assert not make_stopper({"nested": {"half": 0.6}})("00000", nested)
    assert ends_at(make_stopper(lambda trial_id, result: result["loss"] >= 2), 1, 2, 3) == 2


def test_plateaus() -> None:
    assert ends_at(TrialPlateauStopper("loss", std=0.1, num_results=3, grace_period=4), 1, 1, 1, 1) == 4
    assert ends_at(TrialPlateauStopper("loss", std=0.1, num_results=3, grace_period=1), 5, 1, 1, 1) == 4
    at_zero = TrialPlateauStopper("loss", num_results=2, grace_period=1, metric_threshold=0.0, mode="min")
    assert ends_at(at_zero, 1, 1, 0, 0) == 4  # above the threshold a plateau does not count
    with pytest.raises(ConfigurationError, match="needs mode"):
        TrialPlateauStopper("loss", metric_threshold=0.0)
    everything = ExperimentPlateauStopper("loss", top=2, std=0.0, patience=1)
    assert ends_at(everything, 5, 1, 1, 3) == 4
    assert everything.stop_all()


def test_times_iterations_and_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rlzmq.tune.stopper.time.monotonic", lambda: now)
    timeout = TimeoutStopper(datetime.timedelta(seconds=5))
    both = CombinedStopper(timeout, MaximumIterationStopper(3))
    assert ends_at(both, 1, 1, 1, 1) == 3
    assert not both.stop_all()
    now = 105.0
    assert both.stop_all()
    assert ends_at(NoopStopper(), 1, 1) is None
    with pytest.raises(ConfigurationError, match="expected a dict such as"):
        make_stopper(3)


def trials(tmp_path: Path) -> list[Trial]:
    made = []
    for index, status in enumerate(("TERMINATED", "RUNNING", "PAUSED")):
        trial = Trial(Claim(index, index, {"lr": 0.1 * (index + 1)}), "PPO")
        trial.open(tmp_path / str(index))
        trial.status = status  # type: ignore[assignment]
        trial.last_result = {"training_iteration": index, "env_runners": {"episode_return_mean": 20.5}}
        made.append(trial)
    return made


def test_the_table_shows_values_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = {"lr": tune.uniform(0, 1)}
    columns = tune.CLIReporter().columns("nested/score")
    console = Console(width=120)
    with console.capture() as captured:
        console.print(TableView("search", space, columns).draw(trials(tmp_path)))
    text = captured.get()
    assert "1 terminated, 1 running, 1 paused" in text
    row = next(line for line in text.splitlines() if "PPO_00001" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["PPO_00001", "RUNNING", "0.2", "1", "", "20.5", "", ""]
    view = LinesView(space, columns)
    with view:
        view.show(trials(tmp_path))
        view.show(trials(tmp_path))  # nothing has changed
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert said[1] == "PPO_00001 running    lr 0.2  iter 1  return 20.5"
    assert tune.CLIReporter(["a/b"]).columns(None) == {"a/b": "a/b"}
    assert tune.CLIReporter({"a/b": "B"}).columns("c") == {"a/b": "B"}
