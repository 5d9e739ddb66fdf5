"""What code written for Ray Tune expects of names, resources, callbacks and settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from rlzmq import ResultGrid, tune
from rlzmq.core.errors import ConfigurationError
from rlzmq.tune.schedulers import HyperBandScheduler, create_scheduler
from tests.tune.trainables import score


class Record(tune.Callback):
    """Notes which hooks were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        assert trial in trials
        self.calls.append(("start", trial.trial_id))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        assert iteration == sum(name == "result" for name, _ in self.calls) + 1
        self.calls.append(("result", f"{trial.trial_id} {result['score']}"))

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.calls.append(("complete", trial.trial_id))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.calls.append(("error", str(trial.error)))

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        self.calls.append(("end", str(len(trials))))


def fails_at_two(config: dict[str, Any]) -> None:
    if config["x"] == 2:
        raise ValueError("two")
    score({**config, "iterations": 2})


def search(run_config: tune.RunConfig, callback: tune.Callback) -> ResultGrid:
    return tune.Tuner(
        tune.with_resources(fails_at_two, tune.PlacementGroupFactory([{"CPU": 1}])),
        param_space={"x": tune.grid_search([1, 2])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=dataclasses.replace(run_config, callbacks=[callback]),
    ).fit()


def test_callbacks_follow_a_search(run_config: tune.RunConfig) -> None:
    record = Record()
    results = search(run_config, record)
    assert record.calls[:4] == [
        ("start", "00000"),
        ("result", "00000 1"),
        ("result", "00000 2"),
        ("complete", "00000"),
    ]
    assert [name for name, _ in record.calls[4:]] == ["start", "error", "end"]
    assert "two" in record.calls[5][1]
    assert isinstance(results, ResultGrid)
    assert results.experiment_path.endswith("/search")


def test_an_error_in_a_callback_ends_the_search(run_config: tune.RunConfig) -> None:
    class Raises(tune.Callback):
        def on_trial_result(self, **info: Any) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        search(run_config, Raises())
    assert raised.value.__notes__ == ["Raised by Raises.on_trial_result of RunConfig(callbacks=…)."]


class Misspelt(tune.Callback):
    def on_trial_results(self, **info: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: tune.RunConfig(callbacks=[Misspelt()]),
            "on_trial_results is never called.*'on_trial_result'",
        ),
        (lambda: tune.RunConfig(callbacks=[print]), "expected objects of tune.Callback"),  # type: ignore[list-item]
        (lambda: tune.TuneConfig(trial_name_creator=str), "Their values are in Result.config"),  # type: ignore[arg-type]
        (lambda: tune.TuneConfig(trial_dirname_creator=str), "is not supported"),  # type: ignore[arg-type]
        (
            lambda: tune.with_resources(score, tune.PlacementGroupFactory([{"CPU": 1, "GPU": 1}])),
            "num_gpus_per_learner",
        ),
    ],
)
def test_what_is_not_built_names_what_to_do(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_tune_run_names_the_tuner() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'run'. Instead: tune.Tuner\("):
        tune.run(score)  # type: ignore[attr-defined]


def test_a_placement_group_is_the_sum_of_its_cores() -> None:
    factory = tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 0.5, "GPU": 0}, {"CPU": 2}])
    assert factory.required_resources == {"CPU": 3.5}
    assert tune.with_resources(score, factory).resources == {"cpu": 3.5}


def test_hyperband_has_all_brackets_below_its_last_time() -> None:
    scheduler = create_scheduler("hyperband", max_t=81, reduction_factor=3)
    assert isinstance(scheduler, HyperBandScheduler)
    assert scheduler.brackets == 4
    assert [[time for time, _ in rungs] for rungs in scheduler._rungs] == [
        [27, 9, 3, 1],
        [27, 9, 3],
        [27, 9],
        [27],
    ]
    with pytest.raises(ConfigurationError, match="reduction_factor above 1"):
        HyperBandScheduler(reduction_factor=1)
