"""What code written for Ray Tune expects of names, resources, callbacks and settings."""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlzmq import PPO, PPOConfig, ResultGrid, tune
from rlzmq.core.errors import ConfigurationError
from rlzmq.tune import registry
from tests.tune.trainables import score, with_checkpoints


class Log(tune.LoggerCallback):
    """Notes what a logger is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log_trial_start(self, trial: Any) -> None:
        self.calls.append(("start", trial.trial_id))

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self.calls.append(("result", iteration, result["score"]))

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self.calls.append(("end", failed, "two" in str(trial.error)))

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        self.calls.append(("over", len(trials)))


def fails_at_two(config: dict[str, Any]) -> None:
    if config["x"] == 2:
        raise ValueError("two")
    score({**config, "iterations": 2})


def search(run_config: tune.RunConfig, *callbacks: tune.Callback) -> ResultGrid:
    return tune.Tuner(
        tune.with_resources(fails_at_two, tune.PlacementGroupFactory([{"CPU": 1}])),
        param_space={"x": tune.grid_search([1, 2])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=dataclasses.replace(run_config, callbacks=callbacks),
    ).fit()


def test_callbacks_follow_a_search(run_config: tune.RunConfig) -> None:
    log = Log()
    results = search(run_config, log)
    assert isinstance(results, ResultGrid)
    assert results.experiment_path.endswith("/search")
    assert results[0].metrics["config"] == {"x": 1}
    assert log.calls[:3] == [("start", "00000"), ("result", 1, 1), ("result", 2, 2)]
    assert log.calls[3:] == [("end", False, False), ("start", "00001"), ("end", True, True), ("over", 2)]


def test_modules_of_rays_are_attributes_of_tune() -> None:
    assert tune.registry is registry  # type: ignore[attr-defined]
    assert tune.result.TRAINING_ITERATION == "training_iteration"  # type: ignore[attr-defined]
    PPOConfig().debugging(logger_config={"type": tune.logger.NoopLogger})  # type: ignore[attr-defined]
    assert registry.get_trainable_cls("PPO") is PPO
    assert registry.register_env is tune.register_env


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
        (lambda: tune.RunConfig(callbacks=[Misspelt()]), "on_trial_results .*'on_trial_result'"),
        (lambda: tune.RunConfig(sync_config=object()), "storage_path is a directory"),  # type: ignore[arg-type]
        (
            lambda: tune.with_resources(score, tune.PlacementGroupFactory([{"CPU": 1, "GPU": 1}])),
            "num_gpus_per_learner",
        ),
    ],
)
def test_what_is_not_built_names_what_to_do(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


def test_missing_names_say_what_to_use() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'run'. Instead: tune.Tuner\("):
        tune.run(score)  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"Instead: tune.with_resources"):
        exec("from rlzmq.tune.schedulers import ResourceChangingScheduler")
    assert not hasattr(tune, "run")


def say_and_sum(config: dict[str, Any]) -> None:
    print(f"x is {config['x']}")
    print("careful", file=sys.stderr)
    with_checkpoints(config)


def name_of(trial: Any) -> str:
    assert str(trial) == trial.name == f"say_and_sum_{trial.trial_id}"
    return f"{trial.trainable_name}({trial.evaluated_params['x']})"


def name_once(trial: Any) -> str:
    raise AssertionError("a trial that goes on keeps its names")


def test_trials_are_named_by_functions_and_keep_their_names(
    run_config: tune.RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    named = tune.TuneConfig(
        num_samples=2, max_concurrent_trials=1, trial_name_creator=name_of,
        trial_dirname_creator=lambda trial: f"x={trial.config['x']}",
    )  # fmt: skip
    ends = tune.FailureConfig(max_kills=0)
    logged = dataclasses.replace(run_config, log_to_file=True, verbose=None, failure_config=ends)
    space = {"x": tune.grid_search([3])}
    results = tune.Tuner(say_and_sum, param_space=space, tune_config=named, run_config=logged).fit()
    assert [Path(result.path).name for result in results] == ["x=3", "x=3_00001"]
    assert results.num_errors == 2
    shown = capfd.readouterr()
    assert shown.out.count("say_and_sum(3) error") == 2
    assert "x is 3" not in shown.out
    assert "careful" not in shown.err
    again = tune.Tuner.restore(
        results.experiment_path,
        say_and_sum,
        resume_errored=True,
        tune_config=dataclasses.replace(named, trial_name_creator=name_once, trial_dirname_creator=name_once),
    )
    resumed = again.fit()
    assert [result.path for result in resumed] == [result.path for result in results]
    assert capfd.readouterr().out.count("say_and_sum(3) terminated") == 2
    for result in resumed:
        path = Path(result.path)
        assert result.metrics["total"] == 12
        assert tune.Result.from_path(path).error is None
        assert (path / "stdout").read_text() == 2 * "x is 3\n"
        assert (path / "stderr").read_text().count("careful\n") == 2
        rows = list(csv.DictReader((path / "progress.csv").read_text().splitlines()))
        assert [row["total"] for row in rows] == ["3", "6", "9", "12"]
        assert list(rows[0]) == list(result.metrics_dataframe.columns)


@pytest.mark.parametrize("name", [None, "a/b"])
def test_a_directorys_name_that_is_none_ends_the_search(run_config: tune.RunConfig, name: Any) -> None:
    named = tune.TuneConfig(trial_dirname_creator=lambda trial: name)
    with pytest.raises(ConfigurationError, match=r"trial_dirname_creator=….* returned"):
        tune.Tuner(score, param_space={"x": 1}, tune_config=named, run_config=run_config).fit()


def test_a_placement_group_is_the_sum_of_its_cores() -> None:
    factory = tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 0.5, "GPU": 0}, {"CPU": 2}])
    assert factory.required_resources == {"CPU": 3.5}
    assert tune.with_resources(score, factory).resources == {"cpu": 3.5}
