"""Health: injected faults are named with cause and remedy, runs that learn are left alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rlzmq import PPOConfig
from rlzmq.algorithms.health import HealthWatch
from rlzmq.algorithms.registry import Preset, get_config_class
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


def preset_runs(preset: Preset, num_env_steps: int, seed: int) -> Any:
    config: Any = get_config_class(preset.algorithm)().debugging(seed=seed)
    preset.apply(config)
    config.env_runners(num_env_runners=0).learners(num_learners=0)
    with config.build() as algo:
        while True:
            result = algo.train()
            yield result
            if result["num_env_steps_sampled_lifetime"] >= num_env_steps:
                return


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", learn.TASKS)
def test_runs_of_presets_are_healthy(name: str) -> None:
    try:
        results = [result["health"] for result in preset_runs(learn.TASKS[name], 20_000, seed=1)]
    except Exception as error:  # its library is an extra
        pytest.skip(str(error))
    assert not any(results)


def test_two_iterations_in_a_row_are_no_finding_and_a_healthy_one_begins_anew() -> None:
    watch = HealthWatch(PPOConfig())

    def examine(share: float) -> dict[str, Any]:
        return watch.examine(
            {
                "env_runners": {"episode_return_mean": 1.0, "num_episodes_lifetime": 1},
                "learners": {"default_policy": {"clip_fraction": share}, "__all_modules__": {}},
                "num_env_steps_sampled_lifetime": 100,
                "accounting": {"dropped": {}},
            }
        )

    assert [bool(examine(share)) for share in (0.9, 0.9, 0.1, 0.9, 0.9, 0.9)] == [False] * 5 + [True]
