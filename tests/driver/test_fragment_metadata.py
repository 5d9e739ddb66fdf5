"""What runners and ranks say beside the data: usable or left out, counted once, never the end of the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlzmq import MeanStdFilter, PPOConfig, SingleAgentEnvRunner
from rlzmq.driver.async_env_runner_group import MergedConnectors
from rlzmq.driver.driver_link import MetaCheck, ReportReader
from rlzmq.protocol.driver_core import Report
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import pack_blob
from tests.support.runs import small

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
