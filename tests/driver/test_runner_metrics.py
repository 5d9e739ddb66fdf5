"""What runners and ranks measure and log: in results and checkpoints, counted once, never the end of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import Algorithm, EnvRunnerGroup, MeanStdFilter, PPOConfig, SingleAgentEnvRunner, StatsBase
from rlzmq.driver.async_env_runner_group import MergedConnectors
from rlzmq.driver.driver_link import MetaCheck, ReportReader
from rlzmq.protocol.driver_core import Report
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import pack_blob
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


CONFIG: PPOConfig = small(
    listen="tcp://127.0.0.1:0", env_to_module_connector=lambda env, spaces, device=None: MeanStdFilter()
)
SPACES = {"__env_single__": CONFIG.single_spaces(), "__env__": CONFIG.single_spaces()}


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    """A real runner's meta."""
    runner = SingleAgentEnvRunner(config=CONFIG)
    runner.metrics.log_value("mine", 1.0, reduce="sum")
    return dict(runner.take_fragment(300).meta)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_runners_meta_is_as_it_packed_it(good: dict[str, Any], is_trusted: bool) -> None:
    opened = MetaCheck(CONFIG, SPACES).open(pack_blob(good), is_trusted=is_trusted)
    assert opened.keys() == good.keys() >= {"connector_delta", "custom_metrics", "episode_metrics"}


@pytest.mark.parametrize(
    "spoiled",
    [
        7,
        {"num_env_steps": "many"},
        {"module_steps": {"default_policy": "x"}},
        {"timers": 5},
        {"episode_metrics": {"returns": 3}},
        {"custom_metrics": {"mine": 3}},
        {"connector_delta": 3},
        {"connector_delta": {"env_to_module_connector": {"no_such_piece": 1}}},
    ],
)
def test_what_is_no_meta_is_refused(good: dict[str, Any], spoiled: Any) -> None:
    check = MetaCheck(CONFIG, SPACES)
    with pytest.raises(ValueError, match=r".+"):
        check.open(pack_blob({**good, **spoiled} if isinstance(spoiled, dict) else spoiled), is_trusted=False)
    assert check.open(pack_blob(good), is_trusted=False), "the next one is as good as before"


def test_a_delta_with_nan_does_not_spoil_the_merged_state(good: dict[str, Any], caplog: Any) -> None:
    sync = MergedConnectors(CONFIG, SPACES)
    before = sync.merge([good["connector_delta"]])

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [spoil(item) for item in value]
        return np.full_like(value, np.nan) if isinstance(value, np.ndarray) else value

    after = sync.merge([spoil(good["connector_delta"])])
    assert "NaN or infinity: ignored" in caplog.text
    np.testing.assert_equal(after, before)


def test_a_fragment_that_two_brokers_report_is_new_once_and_what_cannot_be_read_is_left_out(
    good: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    reader = ReportReader(MetaCheck(CONFIG, SPACES), {"runner"})
    seqs = []
    for reported in ((0, 1), (1, 2)):
        fragments = [(FragmentId("runner", 1, seq), 10, b"") for seq in reported]
        report: Any = Report(None, fragments, [], {})  # type: ignore[arg-type]
        seqs.append([item[0].seq for item in reader.take_new(report)])
    assert seqs == [[0, 1], [2]]
    assert reader.open_meta(FragmentId("runner", 1, 0), pack_blob(good)).keys() == good.keys()
    assert reader.open_meta(FragmentId("from outside", 1, 1), b"bad") == {}
    assert reader.open_meta(FragmentId("runner", 1, 1), b"bad") == {}
    results = {"default_policy": {"total_loss": 1.0}}
    assert reader.open_results([pack_blob(results), b"junk", pack_blob(3)]) == [results, {}, {}]
    assert "the results of rank 1 are unusable" in caplog.text
