"""Searches: grids and random values, results, stop criteria, failures, restores, populations, trials with processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlzmq import PPOConfig, tune
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.trace import read_trace
from rlzmq.core.trust import Trust
from rlzmq.tune.schedulers import PopulationBasedTraining
from rlzmq.tune.search import BasicVariantGenerator
from rlzmq.tune.settings import settings_from_stored, stored_settings
from rlzmq.tune.study import Study
from rlzmq.tune.trial import read_results
from rlzmq.tune.trial_api import RunningFunction, TrialContext, set_running_function
from tests.support.runs import small
from tests.support.warm_process import run_warm
from tests.tune.trainables import Counter, meet_other_trial, note_loaded_weights, report_weights, score


def test_grid_points_and_random_values_of_a_function(run_config: tune.RunConfig) -> None:
    space = {
        "x": tune.grid_search([1, 2]),
        "inner": {"rate": tune.loguniform(1e-4, 1e-2)},
        "ten": tune.sample_from(lambda spec: spec.config.x * 10),
    }
    tuner = tune.Tuner(
        score,
        param_space=space,
        tune_config=tune.TuneConfig(
            num_samples=2,
            metric="score",
            mode="max",
            search_alg=tune.search.BasicVariantGenerator(random_state=1),
        ),
        run_config=run_config,
    )
    results = tuner.fit()
    assert len(results) == results.num_terminated == 4
    assert results.errors == []
    assert [result.config["x"] for result in results] == [1, 2, 1, 2]
    assert [result.config["ten"] for result in results] == [10, 20, 10, 20]
    rates = [result.config["inner"]["rate"] for result in results]
    assert len(set(rates)) == 4
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    best = results.get_best_result()
    assert best.config["x"] == 2
    assert best.metrics["score"] == 6
    assert best.metrics["training_iteration"] == 3
    assert results.get_best_result(mode="min", scope="avg").config["x"] == 1
    with pytest.raises(RuntimeError, match=r"'scor'\. Did you mean 'score'\?$"):
        results.get_best_result("scor")
    assert results.get_best_result("nested/half", "max").metrics["nested"] == {"half": 1.0}
    frame = results.get_dataframe()
    assert list(frame["score"]) == [3, 6, 3, 6]
    assert list(frame["config/inner/rate"]) == rates
    assert list(best.metrics_dataframe["nested/half"]) == [1.0] * 3
    again = tune.Result.from_path(best.path)
    assert again.config == best.config
    assert again.metrics == best.metrics
    with pytest.raises(ConfigurationError, match=r"tune\.Tuner\.restore"):
        tune.Tuner(score, param_space=space, run_config=run_config).fit()
    space["x"] = tune.grid_search([1, 2, 3])
    with pytest.raises(ConfigurationError, match=r"^x=.*same choices"):
        tune.Tuner.restore(results.experiment_path, score, param_space=space).fit()


def test_an_algorithm_with_search_objects_in_its_config(run_config: tune.RunConfig) -> None:
    config = (
        small(seed=None)
        .training(lr=tune.grid_search([1e-3, 1e-4]))
        .rl_module(model_config={"fcnet_hiddens": tune.choice([[4], [8]])})
    )
    results = tune.Tuner(
        "PPO",
        param_space=config,
        run_config=dataclasses.replace(run_config, stop={"num_env_steps_sampled_lifetime": 100}),
    ).fit()
    assert [result.config["lr"] for result in results] == [1e-3, 1e-4]
    for result in results:
        assert result.error is None
        assert result.config["model_config"]["fcnet_hiddens"] in ([4], [8])
        assert result.metrics["num_env_steps_sampled_lifetime"] >= 128
        assert result.metrics["done"]
        assert result.checkpoint is not None  # classes save one at the end
        with PPOConfig.algo_class.fget(small()).from_checkpoint(result.checkpoint.path) as algo:
            assert algo.iteration == 2
            assert algo.config.lr == result.config["lr"]
    assert results[0].config["seed"] != results[1].config["seed"]


def test_a_config_with_search_objects_cannot_be_built() -> None:
    config = small().training(lr=tune.uniform(0.1, 0.2))
    with pytest.raises(ConfigurationError, match=r"config\.lr .*tune\.Tuner\('PPO'"):
        config.build()


@pytest.mark.parametrize("trainable", ["PPO", "ppo", PPOConfig, PPOConfig().algo_class, small()])
def test_all_names_of_an_algorithm(trainable: Any) -> None:
    assert repr(tune.Tuner(trainable, param_space=small())).startswith("Tuner(PPO, runs/tune/PPO_")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tune.Tuner("PPPO", param_space=small()), "no trainable 'PPPO'. Did you mean 'PPO'"),
        (lambda: tune.Tuner("PPO"), "param_space has no environment"),
        (lambda: tune.Tuner("PPO", param_space=small()).fit(), "PPO never ends by itself: set RunConfig"),
        (
            lambda: tune.Tuner(
                score, tune_config=tune.TuneConfig(search_alg=tune.search.OptunaSearch(), metric="score")
            ).fit(),
            "chooses values by results: set TuneConfig(metric",
        ),
        (lambda: tune.TuneConfig(num_samples=-1), "never ends: set time_budget_s"),
        (lambda: tune.FailureConfig(max_failures=1, fail_fast=True), "leave max_failures at 0"),
        (lambda: tune.RunConfig(name="a/b"), "expected the name of a directory"),
    ],
)
def test_bad_arguments_are_named(make: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text.replace("(", r"\(")):
        make()


def test_a_killed_trial_continues_from_its_checkpoint(
    run_config: tune.RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run_config.checkpoint_config = tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=2)
    space = {"x": tune.grid_search([1, 10]), "kill": ["00001"]}
    results = tune.Tuner(Counter, param_space=space, run_config=run_config).fit()
    assert [result.metrics["total"] for result in results] == [5, 50]
    assert "killed by signal 9 (SIGKILL)" in caplog.text
    for result in results:
        lines = read_results(Path(result.path))
        assert [line["training_iteration"] for line in lines] == [1, 2, 3, 4, 5]
        assert len(result.best_checkpoints) == 2
    since = [line["iterations_since_restore"] for line in read_results(Path(results[1].path))]
    assert since == [1, 2, 1, 2, 3]


def test_errors_are_collected_and_restarted_as_often_as_asked(run_config: tune.RunConfig) -> None:
    space = {"x": tune.grid_search([1, 10]), "raise": ["00001"]}
    run_config.checkpoint_config = tune.CheckpointConfig(checkpoint_frequency=1)
    results = tune.Tuner(Counter, param_space=space, run_config=run_config).fit()
    assert results.num_errors == 1
    assert isinstance(results.errors[0], ValueError)
    assert "as asked" in (Path(results[1].path) / "error.txt").read_text()
    assert results.get_best_result("total", "max", scope="all").metrics["total"] == 20

    resumed = tune.Tuner.restore(results.experiment_path, Counter, resume_errored=True)
    assert [result.metrics["total"] for result in resumed.fit()] == [5, 50]

    restarts = dataclasses.replace(
        run_config, name="restarts", failure_config=tune.FailureConfig(max_failures=1)
    )
    results = tune.Tuner(Counter, param_space=space, run_config=restarts).fit()
    assert [result.metrics["total"] for result in results] == [5, 50]

    raising = dataclasses.replace(
        run_config, name="raising", failure_config=tune.FailureConfig(fail_fast="raise")
    )
    with pytest.raises(ValueError, match="as asked"):
        tune.Tuner(Counter, param_space=space, run_config=raising).fit()


def test_a_function_whose_results_are_no_dicts_is_named(tmp_path: Path) -> None:
    for wrong in (lambda config: (yield {"score": 3}), lambda config: tune.report(3)):  # type: ignore[arg-type]
        running = RunningFunction(wrong, {}, TrialContext("", "", "", "", {}), None, tmp_path)
        set_running_function(running)
        with pytest.raises(ConfigurationError, match="expected a dict"):
            running.step()
        running.stop()


_DRIVER = """
import os, sys
from rlzmq import tune
from tests.tune.trainables import Counter
space = {"x": tune.grid_search([1, 10, 100, 1000]), "kill": ["00000", "00002"], "kill_driver": ["00001"],
         "driver_pid": os.getpid()}
tune.Tuner(Counter, param_space=space, tune_config=tune.TuneConfig(max_concurrent_trials=2),
    run_config=tune.RunConfig(name="search", storage_path=sys.argv[1], verbose=0,
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1))).fit()
"""


def test_a_killed_driver_is_continued_and_every_trial_ends_once(tmp_path: Path) -> None:
    driver = run_warm("-c", _DRIVER, str(tmp_path), timeout=100)
    assert driver.returncode == -9, driver.stderr
    path = tmp_path / "search"
    assert tune.Tuner.can_restore(path)
    pids = {line["pid"] for trial in path.glob("Counter_*") for line in read_results(trial)}
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not any(psutil.pid_exists(pid) for pid in pids)

    results = tune.Tuner.restore(path, Counter).fit()
    assert [result.metrics["total"] for result in results] == [5, 50, 500, 5000]
    for result in results:
        lines = read_results(Path(result.path))
        assert [line["training_iteration"] for line in lines] == [1, 2, 3, 4, 5]
        assert [line["done"] for line in lines] == [False] * 4 + [True]
    assert [result.path for result in tune.Tuner.restore(path, Counter).get_results()] == [
        r.path for r in results
    ]


def test_what_holds_code_is_passed_again(run_config: tune.RunConfig) -> None:
    space = {"x": tune.sample_from(lambda: 2)}
    tune.Tuner(score, param_space=space, run_config=run_config).fit()
    path = Path(str(run_config.storage_path)) / "search"
    with pytest.raises(CheckpointError, match=r"held code.* pass param_space="):
        tune.Tuner.restore(path, score)
    assert tune.Tuner.restore(path, score, param_space=space).fit()[0].config["x"] == 2
    with pytest.raises(CheckpointError, match=r"There is no experiment in"):
        tune.Tuner.restore(path.parent, score)


def test_another_users_search_space_neither_opens_ports_nor_writes_files(tmp_path: Path) -> None:
    config = PPOConfig().training(gamma=0.5).offline_data(output=str(tmp_path / "out"))
    stored = stored_settings({"algo": config.debugging(record_dir=str(tmp_path / "record"))})
    mine, foreign = (
        settings_from_stored(stored, Trust(is_full=is_mine))["algo"] for is_mine in (True, False)
    )
    assert (mine.output, mine.record_dir) == (config.output, config.record_dir)
    assert (foreign.output, foreign.record_dir, foreign.gamma) == (None, None, 0.5)


def test_optuna_suggests_values_by_the_results(run_config: tune.RunConfig) -> None:
    search = tune.search.OptunaSearch(metric="score", mode="max", seed=1, points_to_evaluate=[{"x": 7}])
    results = tune.Tuner(
        score,
        param_space={
            "x": tune.randint(0, 10),
            "kind": tune.choice([{"a": 1}, {"a": 2}]),
            "noise": tune.randn(),
        },
        tune_config=tune.TuneConfig(num_samples=3, search_alg=search),
        run_config=run_config,
    ).fit()
    assert results[0].config["x"] == 7
    assert results.get_best_result().metrics["score"] == max(result.metrics["score"] for result in results)
    assert all(result.config["kind"] in ({"a": 1}, {"a": 2}) for result in results)
    assert all(math.isfinite(result.config["noise"]) for result in results)


@pytest.mark.parametrize(
    "kind", [pytest.param(BasicVariantGenerator, marks=pytest.mark.slow), tune.search.OptunaSearch]
)
def test_search_objects_in_the_values_of_others_are_drawn(run_config: tune.RunConfig, kind: Any) -> None:
    inside = {"rate": tune.uniform(1, 2), "more": [tune.choice([5, tune.randint(7, 9)])]}
    space = {"x": tune.grid_search([1, tune.randint(2, 4)]), "kind": tune.choice([inside, {"rate": 0}])}
    config = tune.TuneConfig(num_samples=5, metric="score", mode="max", search_alg=kind())
    results = tune.Tuner(score, param_space=space, tune_config=config, run_config=run_config).fit()
    assert {result.config["x"] for result in results} <= {1, 2, 3}
    kinds = [result.config["kind"] for result in results]
    rates = [one["rate"] for one in kinds if "more" in one]
    assert all(1 <= rate <= 2 for rate in rates)
    assert len(set(rates)) == len(rates)
    assert all(one["more"][0] in (5, 7, 8) if "more" in one else one == {"rate": 0} for one in kinds)
    restored = tune.Tuner.restore(results.experiment_path, score).get_results()
    assert [result.config for result in restored] == [result.config for result in results]


@pytest.mark.parametrize(
    ("metric", "stop"), [("scores", None), ("nested", None), ("score", {"scores": 5, "best/score": 5})]
)
def test_a_name_that_no_result_has_ends_the_search_at_its_first_result(
    metric: str, stop: dict[str, float] | None, run_config: tune.RunConfig
) -> None:
    asked = {"param_space": {"x": tune.grid_search([1, 2, 3])}, "run_config": run_config}
    one = tune.TuneConfig(metric=metric, mode="max", max_concurrent_trials=1)
    run_config.stop = stop
    with pytest.raises(ConfigurationError, match=r"results have no '(scores|nested)'\. Did"):
        tune.Tuner(score, tune_config=one, **asked).fit()
    path = Path(run_config.storage_path) / run_config.name
    assert [file.parent.name for file in path.glob("*/result.json")] == ["score_00000"]
    run_config.stop = {"score": 2}
    named = tune.TuneConfig(metric="score", mode="max")
    results = tune.Tuner.restore(path, score, tune_config=named, run_config=run_config).fit()
    assert [result.metrics["score"] for result in results] == [2, 2, 3]


@pytest.mark.parametrize("inside", [tune.grid_search([1, 2]), tune.sample_from(lambda: 1)])
def test_grids_and_functions_are_not_inside_of_others(inside: Any, run_config: tune.RunConfig) -> None:
    with pytest.raises(ConfigurationError, match="a key of its own beside 'x'"):
        tune.Tuner(score, param_space={"x": tune.choice([inside])}, run_config=run_config).fit()


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rlzmq\[tune\]'"):
        tune.Tuner(score)


def test_parameters_and_resources_of_a_trainable(run_config: tune.RunConfig) -> None:
    def scaled(config: dict[str, Any], factor: int) -> dict[str, Any]:
        return {"value": config["x"] * factor, "cpu": tune.get_context().get_trial_resources()["cpu"]}

    trainable = tune.with_resources(tune.with_parameters(scaled, factor=5), {"CPU": 2})
    result = tune.Tuner(trainable, param_space={"x": 3}, run_config=run_config).fit()[0]
    assert (result.metrics["value"], result.metrics["cpu"]) == (15, 2)
    with pytest.raises(ConfigurationError, match="called outside of a trial"):
        tune.report({"a": 1})


# -- searches over algorithms --------------------------------------------------------------------------


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
            metric="learners/default_policy/default_optimizer_learning_rate",
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


# -- the record of a search ----------------------------------------------------------------------------


SPACE = {"x": tune.grid_search([1, 2, 3]), "y": tune.uniform(0, 1), "z": tune.randn(0, 1)}


def study(path: Path, **settings: Any) -> Study:
    return Study(f"sqlite:///{path / 'study.db'}", "s", "max", BasicVariantGenerator(**settings), SPACE)


def end(record: Study, claim: Any, status: Any = "TERMINATED", value: float | None = 1.0) -> bool:
    return record.end(claim, status, Path("/nowhere"), {"a": 1}, value, "")


def test_each_trial_is_claimed_once_and_values_follow_from_the_seed(tmp_path: Path) -> None:
    first, second = study(tmp_path, random_state=3), study(tmp_path)
    assert first.seed == second.seed == 3
    first.ensure_waiting(3)
    second.ensure_waiting(3)
    claims = [first.claim(), second.claim(), first.claim()]
    assert [claim.index for claim in claims if claim is not None] == [0, 1, 2]
    assert first.claim() is None
    assert [claim.parameters["x"] for claim in claims if claim is not None] == [1, 2, 3]
    other = tmp_path / "other"
    other.mkdir()
    again = study(other, random_state=3)
    again.ensure_waiting(1)
    same = again.claim()
    assert same is not None
    assert claims[0] is not None
    assert same.parameters == claims[0].parameters
    assert first.num_live() == 3
    for record, claim in zip((first, second, first), claims, strict=True):
        assert end(record, claim, value=None if claim is claims[0] else 2.0)
    assert second.num_live() == 0
    assert [ended.index for ended in second.ended()] == [0, 1, 2]
    assert second.ended()[0].result == {"a": 1}


def test_a_driver_whose_trial_was_taken_over_does_not_end_it(tmp_path: Path) -> None:
    slow, other = study(tmp_path), study(tmp_path)
    slow.ensure_waiting(1)
    claim = slow.claim()
    assert claim is not None
    assert other.take_over_lost() == 0  # its process lives
    slow.close()  # as if it were dead
    assert other.take_over_lost() == 1
    slow.report(claim, 1, 1.0)
    assert not end(slow, claim)
    mine = other.claim()
    assert mine is not None
    assert mine.parameters == claim.parameters
    assert end(other, mine)
    assert len(other.ended()) == 1


def test_a_trial_that_two_drivers_end_at_the_same_moment_ends_once(tmp_path: Path) -> None:
    slow, other = study(tmp_path), study(tmp_path)
    slow.ensure_waiting(1)
    claim = slow.claim()
    assert claim is not None
    slow.close()  # as if it were dead
    ends = []

    class Late(type(other._study.sampler)):  # type: ignore[misc]
        """Called when Optuna has seen that the trial runs, and before it stores the end."""

        def after_trial(self, *args: Any) -> None:
            ends.append(end(slow, claim))

    other._study.sampler = Late()
    assert other.take_over_lost() == 0
    assert ends == [True]
    assert [ended.index for ended in other.ended()] == [0]
    assert other.claim() is None


def test_a_driver_elsewhere_is_dead_when_its_heartbeat_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("rlzmq.tune.study.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("rlzmq.tune.study.process_space", lambda: "elsewhere")
    far = study(tmp_path)
    far.ensure_waiting(1)
    far.claim()
    monkeypatch.setattr("rlzmq.tune.study.process_space", lambda: "here")
    near = study(tmp_path)
    for clock[0] in (0.0, 50.0, 100.0):
        assert near.take_over_lost() == 0
        far.beat()
    clock[0] = 150.0
    assert near.take_over_lost() == 0  # it sees the last beat
    clock[0] = 209.0
    assert near.take_over_lost() == 0
    clock[0] = 211.0
    assert near.take_over_lost() == 1


def test_a_storage_that_cannot_be_used_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/missing/study.db"
    with pytest.raises(ConfigurationError, match=r"missing/study.db cannot be used"):
        Study(url, "s", "max", BasicVariantGenerator(), {})
    with pytest.raises(ConfigurationError) as caught:
        Study("nodatabase://me:secret@host/x", "s", "max", BasicVariantGenerator(), {})
    assert "secret" not in str(caught.value).partition("cannot be used")[0]


async def test_two_drivers_share_one_search(tmp_path: Path) -> None:
    def tuner(folder: str) -> tune.Tuner:
        return tune.Tuner(
            score,
            param_space={"x": tune.grid_search([1, 2, 3, 4])},
            tune_config=tune.TuneConfig(
                metric="score", mode="max", max_concurrent_trials=1, storage=f"sqlite:///{tmp_path}/shared.db"
            ),
            run_config=tune.RunConfig(name="shared", storage_path=tmp_path / folder, verbose=0),
        )

    first, second = await asyncio.gather(tuner("a").fit_async(), tuner("b").fit_async())
    assert [result.metrics["score"] for result in first] == [3, 6, 9, 12]
    assert [result.metrics for result in first] == [result.metrics for result in second]
    assert [result.path for result in first] == [result.path for result in second]
    assert first.get_best_result().config == {"x": 4}
    assert dataclasses.is_dataclass(first[0])
