"""Health: injected faults are named with cause and remedy, runs that learn are left alone; what limits a run."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import pytest

from rlzmq import ConfigurationError, PPOConfig
from rlzmq.algorithms.health import HealthWatch, judge
from rlzmq.envs.registry import make_env
from rlzmq.runners.episode_metrics import EpisodeMetrics
from scripts import learn
from scripts.health import FAULTS, found_in


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_named_with_cause_and_remedy(fault: str, caplog: Any) -> None:
    names, make = FAULTS[fault]
    with caplog.at_level(logging.WARNING, "rlzmq.algorithms"):
        found = found_in(make)
    assert next(iter(found), None) in names, found
    first = next(iter(found.values()))
    told = [record for record in caplog.messages if first["cause"] in record]
    assert len(told) == 1  # once
    assert first["remedy"] in told[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", learn.TASKS)
def test_runs_of_presets_are_healthy(name: str) -> None:
    config = learn.configure(learn.TASKS[name], "serial", seed=1)
    try:
        make_env(config.env_entry()).close()
    except ConfigurationError as error:  # its library is an extra
        pytest.skip(str(error))
    with config.build() as algo:
        while (result := algo.train())["num_env_steps_sampled_lifetime"] < 20_000:
            assert not result["health"]


def test_two_iterations_in_a_row_are_no_finding_and_a_healthy_one_begins_anew() -> None:
    watch = HealthWatch(PPOConfig())

    def examine(share: float) -> dict[str, Any]:
        return watch.examine(
            {
                "env_runners": {"episode_return_mean": 1.0, "num_episodes_lifetime": 1},
                "learners": {"default_policy": {"clip_fraction": share}, "__all_modules__": {}},
                "num_env_steps_sampled_lifetime": 100,
                "accounting": {"dropped": {"buffer_lost": 900}},
            }
        )

    assert [bool(examine(share)) for share in (0.99, 0.99, 0.9, 0.99, 0.99, 0.99)] == [False] * 5 + [True]


def result(
    *, speed: dict[str, Any] | None = None, is_serial: bool = False, **seconds: float
) -> dict[str, Any]:
    """A result of updates in which these took so many seconds, one after the other."""
    took = defaultdict(float, seconds)
    steps = took["env"] + took["inference"] + took["connectors"]
    sample = steps + took["other"]
    learn = took["connector"] + took["forward"] + took["backward"] + took["reduce"]
    cycle = sample + learn + took["driver"] + took["transport"]
    runners = {
        "sample": sample,
        "time_between_sampling": cycle - sample,
        "num_vector_steps_per_sample": 10.0,
        "env_step_timer": took["env"] / 10,
        "rlmodule_inference_timer": took["inference"] / 10,
        "env_to_module_connector": {"connector_pipeline_timer": took["connectors"] / 20},
        "module_to_env_connector": {"connector_pipeline_timer": took["connectors"] / 20},
        "vector_steps_timer": steps,
        "fragment_delivery_timer": 0.0,
    }
    timers = {
        "env_runner_sampling_timer": sample + took["transport"],
        "learner_update_timer": learn,
        "synch_weights" if is_serial else "update": 0.0,
        "learner_thread_update_timer": learn,
        "learner_thread_in_queue_wait_timer": cycle - learn,
        "learner_connector_timer": took["connector"],
        "learner_forward_timer": took["forward"],
        "learner_backward_timer": took["backward"],
        "learner_reduce_timer": took["reduce"],
    }
    if speed is not None:
        runners["runner_speed"] = speed
    return {"env_runners": runners if sample else {}, "timers": timers}


@pytest.mark.parametrize(
    ("figures", "stage", "setting"),
    [
        ({"env": 3.0, "inference": 1.0, "forward": 2.0}, "env", "num_env_runners"),
        ({"env": 1.0, "inference": 3.0, "forward": 2.0}, "inference", "num_envs_per_env_runner"),
        ({"env": 1.0, "connectors": 3.0, "forward": 2.0}, "connectors", "connector_timers"),
        ({"env": 1.0, "other": 3.0, "forward": 2.0}, "callbacks", "rollout_fragment_length"),
        ({"env": 1.0, "forward": 1.0, "backward": 2.0}, "learner", "num_epochs"),
        ({"env": 1.0, "connector": 3.0, "backward": 1.0}, "learner", "learner_connector"),
        ({"env": 1.0, "backward": 1.0, "reduce": 3.0}, "reduce", "minibatch_size"),
        ({"env": 1.0, "backward": 1.0, "transport": 2.5}, "transport", "staleness"),
        ({"env": 1.0, "backward": 1.0, "driver": 2.5}, "driver", "evaluation_parallel_to_training"),
        ({"env": 1.0, "backward": 1.0, "driver": 2.5, "is_serial": True}, "driver", "callbacks"),
        ({"backward": 1.0, "driver": 0.5}, "learner", "num_learners"),
    ],
)
def test_the_longest_part_of_an_update_is_the_bottleneck(
    figures: dict[str, Any], stage: str, setting: str
) -> None:
    verdict = judge(result(**figures))
    assert verdict["stage"] == stage
    assert setting in verdict["advice"]
    assert sum(verdict["shares"]["update"].values()) == pytest.approx(1.0)
    for role in verdict["shares"]:
        assert sum(verdict["shares"][role].values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("speeds", "stage"),
    [
        ([100.0, 10.0], "one slow runner"),
        ([100.0, 60.0], "env"),
        ([100.0] * 7 + [10.0], "env"),  # a faster env gains more than a faster eighth runner
        ([100.0, 110.0, 90.0, 5.0], "env"),
        ([100.0, 110.0, 5.0], "one slow runner"),
    ],
)
def test_a_slow_runner_is_the_bottleneck_if_most_could_be_gained_there(
    speeds: list[float], stage: str
) -> None:
    metrics = EpisodeMetrics()
    for index, speed in enumerate(speeds, 1):
        timers = {"sample": [1, 1.0], "time_between_sampling": [1, 0.25]}
        metrics.add_fragment({"worker_index": index, "num_env_steps": int(speed), "timers": timers})
    found = metrics.reduce()["runner_speed"]
    assert (found["min"], found["slowest"]) == (min(speeds), speeds.index(min(speeds)) + 1)
    assert (found["busy_mean"], found["busy_max"]) == (pytest.approx(0.8), 0.8)
    verdict = judge(result(env=4.0, forward=1.0, speed=found))
    assert verdict["stage"] == stage
    assert ("Env runner" in verdict["advice"]) == (stage == "one slow runner")


def test_waiting_for_a_slow_runner_counts_even_among_many() -> None:
    speed = {"min": 10, "median": 100, "mean": 92, "slowest": 3, "busy_mean": 0.2, "busy_max": 0.9}
    verdict = judge(result(env=2.0, transport=7.0, forward=1.0, speed=speed))
    assert verdict["stage"] == "one slow runner"
    assert verdict["shares"]["update"]["slow_runners"] == pytest.approx(0.7)
    assert "Env runner 3 samples 10 env steps/s, the median is 100" in verdict["advice"]


def test_nothing_timed_is_no_verdict() -> None:
    assert judge({})["stage"] == judge({"env_runners": {}, "timers": {}})["stage"] == "unknown"
    untimed = result(env=4.0, forward=1.0)
    untimed["env_runners"]["env_step_timer"] = 0.0
    assert judge(untimed)["stage"] == "unknown"


@pytest.mark.parametrize("number", [-1.0, 0.0, 1e300, float("nan"), float("inf")])
def test_absurd_numbers_of_an_external_runner_raise_nothing(number: float) -> None:
    for name in result(env=3.0, forward=1.0)["env_runners"]:
        absurd = result(env=3.0, forward=1.0)
        if not name.endswith("_connector"):
            absurd["env_runners"][name] = number
        assert judge(absurd)["advice"]
    speed = dict.fromkeys(("min", "median", "mean", "slowest", "busy_mean", "busy_max"), number)
    assert judge(result(env=3.0, forward=1.0, speed=speed))["advice"]
