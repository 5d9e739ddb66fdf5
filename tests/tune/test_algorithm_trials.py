"""Searches over algorithms: populations of them, and trials with runner and learner processes of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from rlzmq import tune
from rlzmq.core.trace import read_trace
from rlzmq.tune.schedulers import PopulationBasedTraining
from rlzmq.tune.trial import read_results
from tests.support.runs import small
from tests.tune.trainables import meet_other_trial, note_loaded_weights, report_weights

LEARNING_RATE = "learners/default_policy/default_optimizer_learning_rate"


def small_ppo(num_processes: int = 0) -> Any:
    return small(
        seed=None, num_envs_per_env_runner=1, num_env_runners=num_processes, num_learners=num_processes
    )


def lines_of(results: tune.ResultGrid) -> list[list[dict[str, Any]]]:
    return [read_results(Path(result.path)) for result in results]


def test_a_population_of_algorithms_continues_from_the_best_ones_weights_with_another_learning_rate(
    run_config: tune.RunConfig,
) -> None:
    config = small_ppo().training(lr=tune.grid_search([1e-2, 1e-4]))
    config.callbacks(on_train_result=report_weights, on_checkpoint_loaded=note_loaded_weights)
    results = tune.Tuner(
        "PPO",
        param_space=config,
        tune_config=tune.TuneConfig(
            metric=LEARNING_RATE,
            mode="max",
            max_concurrent_trials=1,
            scheduler=PopulationBasedTraining(
                time_attr="training_iteration",
                perturbation_interval=2,
                hyperparam_mutations={"lr": tune.uniform(1e-5, 1e-1)},
                quantile_fraction=0.5,
                resample_probability=0.0,
                perturbation_factors=(0.5, 0.5),
                seed=0,
            ),
        ),
        run_config=dataclasses.replace(run_config, stop={"training_iteration": 4}),
    ).fit()
    assert results.num_errors == 0
    best, other = lines_of(results)
    rates = [
        [line["learners"]["default_policy"]["default_optimizer_learning_rate"] for line in lines]
        for lines in (best, other)
    ]
    assert rates[0] == pytest.approx([1e-2] * 4)
    assert rates[1] == pytest.approx([1e-4, 1e-4, 5e-3, 5e-3])  # in force, not only in the config
    assert results[1].config["lr"] == pytest.approx(5e-3)
    assert other[2]["loaded_weights"] == best[1]["weights"] != other[1]["weights"]
    assert other[2]["weights"] != best[2]["weights"]  # it learns at another rate from there
    assert [line["num_env_steps_sampled_lifetime"] for line in other] == [64, 128, 192, 256]
    (logged,) = map(json.loads, (Path(results.experiment_path) / "pbt_global.txt").read_text().splitlines())
    assert logged[:4] == ["PPO_00001", "PPO_00000", 2, 2]


def test_trials_with_runner_and_learner_processes_run_side_by_side_and_leave_none(
    run_config: tune.RunConfig, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    config = small_ppo(num_processes=1).training(lr=tune.grid_search([1e-3, 1e-4]))
    config.learners(learner_config_dict={"place": str(place)}).callbacks(on_train_result=meet_other_trial)
    shared = tmp_path / "shared"
    config.debugging(trace=str(shared / "run.json"), record_dir=str(shared / "arrivals"))
    results = tune.Tuner(
        "PPO",
        param_space=config,
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=dataclasses.replace(run_config, stop={"training_iteration": 2}),
    ).fit()
    assert results.num_errors == 0
    for lines in lines_of(results):
        assert [line["num_env_steps_trained_lifetime"] for line in lines] == [64, 128]
        assert lines[-1]["fault_tolerance"]["num_healthy_workers"] == 1
        assert lines[-1]["num_processes"] >= 3  # a broker, a runner, a learner
    assert not shared.exists()
    for result in results:
        own = Path(result.path)
        assert {"env", "forward"} <= {event["name"] for event in read_trace(own / "run.json")}
        assert any((own / "arrivals").iterdir())
