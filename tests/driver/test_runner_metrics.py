"""What runners measure and log reaches the results, in one process and out of several, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import Algorithm, EnvRunnerGroup, StatsBase
from tests.support.runs import ShortEnv, small


class Distinct(StatsBase):
    """How many different values there were, in the whole run."""

    def __init__(self) -> None:
        self.values: set[int] = set()

    def push(self, value: int) -> None:
        self.values.add(value)

    def peek(self) -> int:
        return len(self.values)

    def merge(self, incoming_stats: Sequence[Distinct]) -> None:
        for other in incoming_stats:
            self.values |= other.values

    def get_state(self) -> dict[str, Any]:
        return {"values": sorted(self.values)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.values = set(state["values"])


def log_who_samples(*, env_runner: Any, metrics_logger: Any, samples: Any, **kwargs: Any) -> None:
    metrics_logger.log_value("runners", env_runner.worker_index, reduce="distinct")
    metrics_logger.log_value("steps", samples.num_env_steps, reduce="sum")


def make_config(num_env_runners: int) -> Any:
    config = small(num_env_runners=num_env_runners, train_batch_size_per_learner=160)
    return config.callbacks(on_sample_end=log_who_samples).reporting(
        custom_stats_cls_lookup={"distinct": Distinct}
    )


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_timers_and_custom_stats_are_in_results_and_checkpoints(num_env_runners: int, tmp_path: Path) -> None:
    with make_config(num_env_runners).build() as algo:
        for _ in range(100):  # a runner may join late
            if algo.train()["env_runners"]["runners"] == max(num_env_runners, 1):
                break
        result = algo.train()["env_runners"]
        path = algo.save(tmp_path)
    assert result["runners"] == max(num_env_runners, 1)
    assert result["steps"] == result["num_env_steps_sampled"]
    stages = [result["env_step_timer"], result["rlmodule_inference_timer"]]
    stages += [
        result[f"{name}_connector"]["connector_pipeline_timer"] for name in ("env_to_module", "module_to_env")
    ]
    assert all(0 < seconds < result["sample"] for seconds in stages)
    assert result["time_between_sampling"] > 0
    assert "env_reset_timer" not in result  # that was in the first iteration
    with Algorithm.from_checkpoint(path, config=make_config(num_env_runners)) as restored:
        assert restored.metrics.peek(("env_runners", "runners")) == result["runners"]


class OneStep(ShortEnv):
    length = 1


def log_a_video(*, metrics_logger: Any, **kwargs: Any) -> None:
    metrics_logger.log_value("video", np.full((30, 3, 40, 60), 7, np.uint8), reduce="item_series")


def test_what_a_fragment_reports_may_be_larger_than_a_messages_header() -> None:
    config = make_config(1).environment(OneStep).callbacks(on_sample_end=log_a_video)
    config.training(train_batch_size_per_learner=8000, minibatch_size=8000)
    with config.build() as algo:
        result = algo.train()["env_runners"]
    assert result["video"][0].shape == (30, 3, 40, 60)
    assert (result["video"][0] == 7).all()
    assert result["num_episodes"] == 8000


def test_a_group_without_a_run_has_what_callbacks_logged_in_its_own_metrics() -> None:
    group = EnvRunnerGroup(config=make_config(0))
    episodes = group.sample(num_timesteps=50)
    assert group.get_metrics()[0]["steps"] == sum(map(len, episodes))
    group.stop()


def test_a_lookup_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.custom_stats_cls_lookup"):
        make_config(0).reporting(custom_stats_cls_lookup={"distinct": set}).build()
