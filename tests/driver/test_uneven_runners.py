"""Runners of different speed: nobody waits for equal parts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlzmq import PPOConfig


class SleepyEnv(gymnasium.Env[Any, Any]):
    """One step of the second runner takes as long as twenty of the first one, unless `step_s` says otherwise."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self._step_s = config.get("step_s") or (0.04 if config.worker_index == 2 else 0.002)
        self._steps_path = config.get("steps_path")
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self._num_steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        self._num_steps += 1
        if self._steps_path is not None:
            with open(self._steps_path, "ab") as file:
                file.write(b".")
        return np.zeros(2, np.float32), 1.0, False, self._num_steps == 30, {}


def count_steps(*, env_runner: Any, metrics_logger: Any, samples: Any, **kwargs: Any) -> None:
    metrics_logger.log_value(f"runner-{env_runner.worker_index}", samples.num_env_steps, reduce="sum")


def test_a_slow_runner_samples_its_part_of_a_batch_not_an_equal_one() -> None:
    config = (
        PPOConfig()
        .environment(SleepyEnv)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=1, rollout_fragment_length=50)
        .training(train_batch_size_per_learner=400, minibatch_size=400, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .callbacks(on_sample_end=count_steps)
    )
    counts = {"runner-1": 0, "runner-2": 0}
    with config.build() as algo:
        algo.train()  # their pace is not known before
        for _ in range(3):
            result = algo.train()
            assert result["accounting"]["dropped"].get("surplus", 0) <= 40
            for name in counts:
                counts[name] += result["env_runners"].get(name, 0)
    assert sum(counts.values()) >= 3 * 400
    assert 0 < counts["runner-2"] <= 0.2 * sum(counts.values()), "a twenty-first part by its pace"


@pytest.mark.parametrize("num_env_runners", [1, 3])
def test_slow_environments_waste_nothing(num_env_runners: int, tmp_path: Path) -> None:
    """A batch takes three times as long as a runner may be without progress; so does a single lease."""
    step_s, batch, steps_path = 0.05, 60 * num_env_runners, tmp_path / "steps"
    config = (
        PPOConfig()
        .environment(SleepyEnv, env_config={"step_s": step_s, "steps_path": str(steps_path)})
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=1, sample_timeout_s=1.0)
        .training(train_batch_size_per_learner=batch, minibatch_size=batch, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [8]})
    )
    with config.build() as algo:
        account = algo.train()["accounting"]
        num_steps = steps_path.stat().st_size  # runners wait now: there are no leases beyond the batch
    assert account["trained"] >= batch
    assert account["dropped"].get("surplus", 0) <= 2 * (num_env_runners - 1), "the last steps of the batch"
    assert num_steps <= batch + 4 * num_env_runners, "an expired lease's steps are sampled twice"
