"""Schedulers by made results, and in searches; rules that end trials, and the table of trials."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from rich.console import Console

from rlzmq import PPOConfig, tune
from rlzmq.core.errors import ConfigurationError
from rlzmq.tune.schedulers import (
    PB2,
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
    create_scheduler,
    metric_and_mode,
)
from rlzmq.tune.search import OptunaSearch
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
from tests.tune.trainables import score


@dataclasses.dataclass(eq=False)
class FakeTrial:
    trial_id: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    last_result: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_waiting: bool = False
    is_finished: bool = False


def result(time: int, value: float) -> dict[str, Any]:
    return {"training_iteration": time, "time_total_s": float(time), "value": value}


def with_metric(scheduler: TrialScheduler, mode: str = "max") -> Any:
    scheduler.set_search_properties("value", mode)  # type: ignore[arg-type]
    return scheduler


def decisions(scheduler: Any, mode: str, results: list[tuple[int, int, float]]) -> list[str]:
    """What a scheduler says of results (trial, time, value) that come one after the other."""
    study = optuna.create_study(direction=f"{mode}imize", pruner=with_metric(scheduler, mode).make_pruner())
    trials: dict[int, Any] = {}
    said = []
    for index, time, value in results:
        trial = trials.get(index) or trials.setdefault(index, study.ask())
        trial.report(value, time)
        ours: Any = FakeTrial(f"{index:05d}")
        decision = scheduler.on_trial_result(ours, result(time, value))
        if decision.action == "continue" and trial.should_prune():
            decision = scheduler.on_trial_pruned(ours)
        said.append(decision.action)
    return said


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_asha_keeps_the_best_part_at_each_rung(mode: str, sign: int) -> None:
    first = [(0, 1, 5), (1, 1, 4), (2, 1, 6), (3, 1, 1), (4, 1, 7)]
    results = [*first, (0, 2, -100), (0, 3, 9), (2, 3, 8), (0, 9, 9)]
    scheduler = ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)
    said = decisions(scheduler, mode, [(i, t, sign * v) for i, t, v in results])
    # The first goes on; the others have to be the best so far. Time 2 is no rung; 9 is `max_t`.
    assert [what == "stop" for what in said] == [False, True, False, True, False, False, False, True, True]


def test_hyperband_has_brackets_whose_rungs_begin_later() -> None:
    scheduler = HyperBandScheduler(time_attr="training_iteration", max_t=9)
    said = decisions(scheduler, "max", [(i, 1, -float(i)) for i in range(30)])
    assert "stop" in said
    assert said.count("continue") > 2


@pytest.mark.parametrize(("hard_stop", "expected"), [(True, "stop"), (False, "pause")])
def test_the_median_rule_ends_what_is_worse_than_the_others(hard_stop: bool, expected: str) -> None:
    rule = MedianStoppingRule(
        time_attr="training_iteration", grace_period=2, min_samples_required=3, hard_stop=hard_stop
    )
    good = [(index, time, level) for index, level in enumerate([3.0, 2.0, 1.0]) for time in (1, 2, 3)]
    said = decisions(rule, "max", [*good, (9, 1, 0.0), (9, 2, 0.0), (8, 3, 2.5), (9, 3, 0.0)])
    # Nothing ends before the grace period is over; a trial pauses once only.
    assert said == [*["continue"] * 10, expected, "continue", "stop" if hard_stop else "continue"]


def test_a_metric_that_is_no_finite_number_is_the_worst() -> None:
    for mode in ("max", "min"):
        assert with_metric(FIFOScheduler(), mode).score_of(result(1, math.inf)) == -math.inf
        assert decisions(ASHAScheduler(), mode, [(0, 1, math.nan)]) == ["stop"]
        for other, value, expected in ((0.0, math.nan, "stop"), (math.nan, 0.0, "continue")):
            rule = MedianStoppingRule("training_iteration", grace_period=1, min_samples_required=2)
            assert decisions(rule, mode, [(0, 1, other), (1, 1, other), (2, 1, value)])[-1] == expected


def test_population_based_training_exploits_the_best_and_changes_values() -> None:
    pbt = with_metric(
        PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=2,
            hyperparam_mutations={
                "lr": tune.loguniform(1e-3, 1.0),
                "lambda_": lambda: 0.5,
                "num_epochs": lambda: 2,
                "env_config": {"free": lambda: 0.5, "size": [1, 2, 4, 8]},
            },
            resample_probability=0.0,
            seed=0,
        )
    )
    config = PPOConfig().environment(env_config={"size": 4, "free": 10})
    config.training(lr=0.9, lambda_=0.95, num_epochs=1)
    trials = [FakeTrial(f"{i:05d}", config) for i in range(4)]
    for trial in trials:
        pbt.on_trial_add(trial)
    for index in (1, 2, 3):
        assert pbt.on_trial_result(trials[index], result(1, float(index))).action == "continue"
    best = pbt.on_trial_result(trials[3], result(2, 3.0))
    assert (best.action, best.saves, best.exploits) == ("continue", True, None)
    pbt.on_trial_result(trials[0], result(1, -1.0))
    decision = pbt.on_trial_result(trials[0], result(2, -1.0))
    assert decision.exploits is trials[3]
    assert decision.changes["lr"] in (pytest.approx(0.72), 1.0)  # · 0.8, or · 1.2 within the bounds
    assert decision.changes["lambda_"] in (pytest.approx(0.76), 1.0)  # and within those of the setting
    assert decision.changes["num_epochs"] == 1
    assert decision.changes["env_config/size"] in (2, 8)
    assert decision.changes["env_config/free"] in (8, 12)
    trials[2].is_waiting = True  # with fewer slots than trials they take turns
    assert pbt.on_trial_result(trials[1], result(2, 1.0)).action == "pause"
    assert pbt.choose([trials[2], trials[3]]) is trials[2]


def test_pb2_chooses_the_values_that_were_worth_most_and_follows_them_when_they_change() -> None:
    bounds = {"a": (0, 10), "inner": {"size": (0, 8)}}
    pb2 = with_metric(PB2(perturbation_interval=1, hyperparam_bounds=bounds, quantile_fraction=0.5, seed=3))
    trials = [FakeTrial(f"{i:05d}", {"a": 5.0 - i, "inner": {"size": 4}}) for i in range(2)]
    for trial in trials:
        pb2.on_trial_add(trial)
    rng = np.random.default_rng(0)
    totals = [0.0, 0.0]
    chosen: dict[float, list[float]] = {7.5: [], 2.5: []}
    for time in range(1, 61):
        best = 7.5 if time <= 30 else 2.5
        for index, trial in enumerate(trials):
            totals[index] += 5.0 - abs(trial.config["a"] - best)
            decision = pb2.on_trial_result(trial, result(time, totals[index] if time % 20 > 1 else math.nan))
            if decision.exploits is not None and time % 30 > 15:
                chosen[best].append(decision.changes["a"])
                assert isinstance(decision.changes["inner/size"], int)
            trial.config = {"a": rng.uniform(0, 10), "inner": {"size": 4}}
    for best, values in chosen.items():
        assert len(values) >= 5
        assert all(0 <= value <= 10 for value in values)
        assert abs(np.median(values) - best) < 1.5, (best, values)


def test_a_result_without_the_metric_is_an_error_if_it_is_required() -> None:
    pbt = with_metric(PopulationBasedTraining(hyperparam_mutations={"a": [1]}))
    with pytest.raises(ConfigurationError, match=r"needs 'value', .* Did you mean 'values'\?"):
        pbt.on_trial_result(FakeTrial("00000"), {"time_total_s": 1.0, "values": 1.0})
    pbt.metric = "env_runners/value"
    first = {"time_total_s": 1.0, "env_runners": {"num_episodes_lifetime": 0}}
    assert pbt.on_trial_result(FakeTrial("00000"), first).action == "continue"
    pbt.require_attrs = False
    assert pbt.on_trial_result(FakeTrial("00000"), {"time_total_s": 1.0}).action == "continue"


def test_population_based_training_draws_new_values() -> None:
    pbt = with_metric(
        PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=1,
            hyperparam_mutations={"lr": tune.uniform(2, 3), "size": [1, 2], "free": lambda: 7},
            resample_probability=1.0,
            custom_explore_fn=lambda changed: {**changed, "size": 100},
        )
    )
    good, bad = FakeTrial("00000", {"lr": 9, "size": 9, "free": 9}), FakeTrial("00001")
    for trial, value in ((good, 1.0), (bad, 0.0)):
        pbt.on_trial_add(trial)
        decision = pbt.on_trial_result(trial, result(1, value))
    assert 2 <= decision.changes["lr"] <= 3
    assert (decision.changes["size"], decision.changes["free"]) == (100, 7)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ASHAScheduler(grace_period=9, max_t=3), "at most max_t"),
        (lambda: PopulationBasedTraining(hyperparam_mutations={"lr": 3}), "a search object or a function"),
        (lambda: PopulationBasedTraining(hyperparam_mutations={"a": [1]}, synch=True), "take turns instead"),
        (lambda: PB2(hyperparam_bounds={"a": {"b": (2, 1)}}), r"'a/b'.*expected \(lower, upper\)"),
        (lambda: ASHAScheduler().set_search_properties(None, "max"), "set TuneConfig"),
        (lambda: ASHAScheduler(metric="a").set_search_properties("b", "max"), "in one of them only"),
        (lambda: metric_and_mode(OptunaSearch(mode="min"), "a", "max"), "in one of them only"),
        (lambda: create_scheduler("ahsa"), "Did you mean 'asha'"),
        (lambda: create_scheduler("asha", maxt=3), "unexpected keyword argument 'maxt'"),
    ],
)
def test_bad_settings_are_named(make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_asha_ends_bad_trials_of_a_search_early(run_config: tune.RunConfig) -> None:
    results = tune.Tuner(
        score,
        param_space={"x": tune.grid_search([math.inf, 4, 3, 2, 1]), "iterations": 50},
        tune_config=tune.TuneConfig(
            metric="score", mode="max", max_concurrent_trials=1,
            scheduler=ASHAScheduler(max_t=8, grace_period=2, reduction_factor=2),
        ),
        run_config=run_config,
    ).fit()  # fmt: skip
    assert [result.metrics["training_iteration"] for result in results] == [2, 8, 2, 2, 2]
    assert results.num_errors == 0


# -- stoppers, and the table of trials -----------------------------------------------------------------


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
    wrong = make_stopper({"los": 0})
    for _ in range(2):  # each trial's
        with pytest.raises(ConfigurationError, match=r"results have no 'los'. Did you mean 'loss'"):
            ends_at(wrong, 1)


def test_a_return_ends_trials_although_the_first_result_has_no_ended_episode_and_no_update() -> None:
    stopper = make_stopper({"env_runners/episode_return_mean": 5})
    assert not stopper("00000", {"env_runners": {"num_episodes_lifetime": 0}})
    assert stopper("00000", {"env_runners": {"num_episodes_lifetime": 2, "episode_return_mean": 6.0}})
    stopper = make_stopper({"learners/a/loss": 5})
    assert not stopper("00000", {"num_env_steps_trained_lifetime": 0})
    assert stopper("00000", {"num_env_steps_trained_lifetime": 9, "learners": {"a": {"loss": 6.0}}})


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
