"""What runners say beside the data: usable or left out, never the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlzmq import PPOConfig
from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.core.metrics import MetricsLogger, StatsBase
from rlzmq.driver.driver_link import MetaCheck
from rlzmq.driver.updates import ConnectorSync
from rlzmq.wire.payloads import pack_blob


def _config() -> PPOConfig:
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .networking(listen="tcp://127.0.0.1:0")
        .env_runners(
            num_env_runners=0, env_to_module_connector=lambda env, spaces, device=None: MeanStdFilter()
        )
    )


def _spaces() -> dict[str, Any]:
    single = _config().single_spaces()
    return {"__env_single__": single, "__env__": single}


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    """A real runner's meta."""
    config = _config()
    runner = config.env_runner_cls(config=config) if config.env_runner_cls else None
    if runner is None:
        from rlzmq import SingleAgentEnvRunner

        runner = SingleAgentEnvRunner(config=config)
    runner.metrics.log_value("mine", 1.0, reduce="sum")
    return dict(runner.take_fragment(300).meta)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_runners_meta_is_as_it_packed_it(good: dict[str, Any], is_trusted: bool) -> None:
    opened = MetaCheck(_config(), _spaces()).open(pack_blob(good), is_trusted=is_trusted)
    assert opened.keys() == good.keys()
    assert {"connector_delta", "custom_metrics", "episode_metrics"} <= good.keys()


class Product(StatsBase):
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.product = 1.0

    def push(self, value: Any) -> None:
        self.product *= value

    def peek(self) -> Any:
        return self.product

    def merge(self, incoming_stats: Any) -> None:
        for other in incoming_stats:
            self.product *= other.product

    def get_state(self) -> dict[str, Any]:
        return {"product": self.product}

    def set_state(self, state: Any) -> None:
        self.product = state["product"]


def test_reductions_of_ones_own_are_known(good: dict[str, Any]) -> None:
    lookup: dict[str, Any] = {"product": Product}
    logger = MetricsLogger(stats_cls_lookup=lookup)
    logger.log_value("mine", 3.0, reduce="product")
    meta = {**good, "custom_metrics": logger.reduce(compile=False)}
    config = _config().reporting(custom_stats_cls_lookup=lookup)
    assert MetaCheck(config, _spaces()).open(pack_blob(meta), is_trusted=False)
    with pytest.raises(ValueError, match="product"):
        MetaCheck(_config(), _spaces()).open(pack_blob(meta), is_trusted=False)


def _with(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda good: {**good, **fields}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: 7,
        lambda good: [good],
        _with(num_env_steps="many"),
        _with(module_steps=3),
        _with(module_steps={"default_policy": "x"}),
        _with(timers=5),
        _with(episode_metrics={"returns": 3}),
        _with(custom_metrics={"mine": 3}),
        _with(connector_delta=3),
        _with(connector_delta={"env_to_module_connector": {"no_such_piece": 1}}),
    ],
)
def test_what_is_no_meta_is_refused(good: dict[str, Any], spoil: Callable[[dict[str, Any]], Any]) -> None:
    check = MetaCheck(_config(), _spaces())
    with pytest.raises(ValueError, match=r".+"):
        check.open(pack_blob(spoil(good)), is_trusted=False)
    assert check.open(pack_blob(good), is_trusted=False), "the next one is as good as before"


def test_bytes_that_are_no_value_are_refused() -> None:
    with pytest.raises(ValueError, match=r".+"):
        MetaCheck(_config(), _spaces()).open(b"\x93junk", is_trusted=True)


def test_a_delta_with_nan_does_not_spoil_the_merged_state(good: dict[str, Any], caplog: Any) -> None:
    sync = ConnectorSync(_config(), _spaces())
    delta = good["connector_delta"]
    before = sync.merge([delta])

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [spoil(item) for item in value]
        return np.full_like(value, np.nan) if isinstance(value, np.ndarray) else value

    after = sync.merge([spoil(delta)])
    assert "NaN or infinity: ignored" in caplog.text
    np.testing.assert_equal(after, before)
