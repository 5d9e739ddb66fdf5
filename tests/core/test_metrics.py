"""MetricsLogger: each reduction, nested keys, merging across processes, state."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch

from rlzmq.core.metrics import MetricsLogger, ReducedMetrics, Stat, StatsBase


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", 2.0),
        ("sum", 6),
        ("min", 1),
        ("max", 3),
        ("lifetime_sum", 6),
        ("item", 3),
        ("item_series", [1, 2, 3]),
    ],
)
def test_each_reduction_of_three_values(reduce: str, expected: object) -> None:
    logger = MetricsLogger()
    for value in (1, 2, 3):
        logger.log_value("x", value, reduce=reduce)
    assert logger.peek("x") == expected
    assert logger.reduce() == {"x": expected}


def test_window_survives_reduce_and_is_bounded() -> None:
    logger = MetricsLogger()
    for value in range(10):
        logger.log_value("x", value, window=3)
    assert logger.reduce() == {"x": 8.0}
    logger.log_value("x", 100)
    assert logger.peek("x") == (8 + 9 + 100) / 3


def test_values_that_were_put_are_merged_by_their_reductions() -> None:
    root = MetricsLogger()
    for loss, num in ((1.0, 3), (2.0, 5)):
        reduced = ReducedMetrics({}, {})
        reduced.put("mean", {"loss": loss}, "p0")
        reduced.put("sum", {"steps": {"p0": num}, "rate": loss}, "all", "buffer")
        reduced.put("item", {"lifetime": 10 * num}, "all")
        root.aggregate([reduced], key="learners")
    of_all = {"buffer": {"steps": {"p0": 8}, "rate": 1.5}, "lifetime": 50}
    assert root.reduce() == {"learners": {"p0": {"loss": 1.5}, "all": of_all}}


def test_an_ema_that_another_process_reports_in_parts_is_that_of_all_values() -> None:
    worker, root, alone = MetricsLogger(), MetricsLogger(), MetricsLogger()
    for part, num in enumerate((1, 200, 0, 3, 50)):
        for i in range(num):
            for logger in (worker, alone):
                logger.log_value("x", float(part * 10 + i % 3), reduce="ema", ema_coeff=0.05)
        root.aggregate([worker.reduce(compile=False)])
        assert root.peek("x") == pytest.approx(alone.peek("x"))
        root.reduce()


def test_several_statistics_of_one_value() -> None:
    logger = MetricsLogger()
    for value in (1, 2, 6):
        logger.log_value(("a", "x"), value, stats=("mean", "min", "max"))
    assert logger.reduce() == {"a": {"x_mean": 3.0, "x_min": 1, "x_max": 6}}


@pytest.mark.parametrize("compile_", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max", "lifetime_sum", "item_series"])
def test_workers_send_every_value_once(reduce: str, window: int | None, compile_: bool) -> None:
    workers, root, alone = [MetricsLogger(), MetricsLogger()], MetricsLogger(), MetricsLogger()
    for values in ((4.0, 1.0), (), (3.0, 9.0)):
        for worker, value in zip(workers, values, strict=False):
            worker.log_value("x", value, reduce=reduce, window=window)
            alone.log_value("x", value, reduce=reduce, window=window)
        root.aggregate([worker.reduce(compile=compile_) for worker in workers], key="env_runners")
    assert root.peek(("env_runners", "x")) == alone.peek("x")


def test_mistakes_are_named() -> None:
    logger = MetricsLogger()
    logger.log_value("loss", 1.0)
    with pytest.raises(ValueError, match="Did you mean 'mean'"):
        logger.log_value("y", 1.0, reduce="meann")
    with pytest.raises(ValueError, match="was logged with reduce='mean'"):
        logger.log_value("loss", 1.0, reduce="sum")
    with pytest.raises(KeyError, match="Did you mean 'loss'"):
        logger.peek("los")
    with pytest.raises(ValueError, match="both a value and a group"):
        logger.log_value(("loss", "inner"), 1.0)
    assert logger.peek("nothing", default=7) == 7


@pytest.mark.parametrize("value", ["text", None, {"a": 1.0}, [1.0]])
def test_what_is_not_a_number_is_refused_where_it_is_logged(value: object) -> None:
    logger = MetricsLogger()
    logger.log_value("any", value, reduce="item")
    with pytest.raises(TypeError, match=r"'mine/name'.*reduce='mean'.*log_dict"):
        logger.log_value(("mine", "name"), value)
    assert list(logger.reduce()) == ["any"]


def test_percentiles_lie_linearly_between_values() -> None:
    logger = MetricsLogger()
    for value in (8.0, 1.0, 4.0, 2.0):
        logger.log_value("p", value, reduce="percentiles", percentiles=[0, 10, 50, 75, 100])
        logger.log_value("default", value, reduce="percentiles", percentiles=True)
    assert logger.peek("p") == pytest.approx({0: 1.0, 10: 1.3, 50: 3.0, 75: 5.0, 100: 8.0})
    assert logger.peek("default")[90] == pytest.approx(6.8)


def test_an_ema_coeff_asks_for_an_ema() -> None:
    logger = MetricsLogger()
    for value in (1.0, 2.0, 4.0, 8.0):
        logger.log_value("ema", value, ema_coeff=0.5)
        logger.log_dict({"of": {"many": value}}, ema_coeff=0.5)
        logger.log_value("rllibs", value, reduce="mean", ema_coeff=0.5)
    assert logger.reduce() == {"ema": 5.375, "of": {"many": 5.375}, "rllibs": 5.375}
    with pytest.raises(ValueError, match=r"ema_coeff=0.5 needs reduce='ema'"):
        logger.log_value("max", 1.0, reduce="max", ema_coeff=0.5)
    with pytest.raises(ValueError, match=r"an .ema. has no window"):
        logger.log_value("windowed", 1.0, window=3, ema_coeff=0.5)
    with pytest.raises(ValueError, match="Did you mean 'mean'"):
        Stat("meen")


def test_clear_on_reduce_empties_windows_and_makes_sums_last() -> None:
    logger = MetricsLogger()
    results = []
    for value in (1.0, 5.0):
        logger.log_value("window", value, window=9, clear_on_reduce=True)
        logger.log_value("lasting", value, reduce="sum", clear_on_reduce=False)
        logger.log_value("sum", value, reduce="sum", clear_on_reduce=True)
        logger.log_value("mean", value, clear_on_reduce=True)
        with logger.log_time("seconds", clear_on_reduce=True):
            pass
        restored = MetricsLogger()
        restored.set_state(logger.get_state())
        logger = restored
        results.append(logger.reduce())
    wanted = [{"window": 1.0, "lasting": 1.0, "sum": 1.0, "mean": 1.0}]
    wanted.append({"window": 5.0, "lasting": 6.0, "sum": 5.0, "mean": 5.0})
    assert [{name: result[name] for name in wanted[0]} for result in results] == wanted


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"reduce": "lifetime_sum"}])
def test_throughput_is_the_sum_of_new_values_with_and_without_a_window(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    worker, root = MetricsLogger(), MetricsLogger()
    worker.reduce()
    for _ in range(2):
        for _ in range(5):
            worker.log_value("n", 4, **{"reduce": "sum", **options}, with_throughput=True)
        now += 2.0
        root.aggregate([worker.reduce(compile=False)])
        assert worker.peek("n", throughput=True) == 10.0
        assert root.reduce()["n_throughput"] == 10.0
    now += 2.0
    assert root.reduce()["n_throughput"] == 0.0


class Histogram(StatsBase):
    """Counts of whole numbers."""

    def __init__(self, window: int = 4) -> None:
        self.size = window
        self.clear()

    def clear(self) -> None:
        self.counts = np.zeros(self.size, np.int64)

    def push(self, value: int) -> None:
        self.counts[value] += 1

    def peek(self) -> list[int]:
        return list(map(int, self.counts))

    def merge(self, incoming_stats: Sequence[Histogram]) -> None:
        for other in incoming_stats:
            self.counts += other.counts

    def get_state(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.counts = state["counts"]


def with_histogram() -> MetricsLogger:
    return MetricsLogger(stats_cls_lookup={"histogram": Histogram})


def test_custom_stats_are_reduced_merged_and_restored() -> None:
    root, workers = with_histogram(), [with_histogram(), with_histogram()]
    for _ in range(2):
        for worker, value in zip(workers, (1, 2), strict=True):
            worker.log_value(("a", "h"), value, reduce="histogram", window=3)
        states = [msgpack.unpackb(msgpack.packb(worker.reduce(compile=False))) for worker in workers]
        root.aggregate(states, key="env_runners")
    assert workers[0].peek(("a", "h")) == [0, 0, 0]
    other = with_histogram()
    other.set_state(msgpack.unpackb(msgpack.packb(root.get_state())))
    assert other.reduce() == root.reduce() == {"env_runners": {"a": {"h": [0, 2, 2]}}}
    assert other.peek(("env_runners", "a", "h")) == [0, 0, 0]


def test_mistakes_with_custom_stats_are_named() -> None:
    logger = with_histogram()
    with pytest.raises(ValueError, match="Did you mean 'histogram'"):
        logger.log_value("x", 1, reduce="histgram")
    with pytest.raises(TypeError, match=r"Histogram\(ema_coeff=0.1\)"):
        logger.log_value("x", 1, reduce="histogram", ema_coeff=0.1)
    logger.log_value("x", 1, reduce="histogram")
    with pytest.raises(ValueError, match="custom_stats_cls_lookup"):
        MetricsLogger().set_state(logger.get_state())
    other = with_histogram()
    other.log_value("x", 1.0)
    with pytest.raises(ValueError, match="reduce='histogram' elsewhere"):
        other.aggregate([logger.reduce(compile=False)])

    class KeepsAnObject(Histogram):
        def get_state(self) -> dict[str, Any]:
            return {"me": self}

    logger = MetricsLogger(stats_cls_lookup={"h": KeepsAnObject})
    logger.log_value("x", 1, reduce="h")
    with pytest.raises(TypeError, match=r"KeepsAnObject's state\['me'\]"):
        logger.get_state()


@pytest.mark.parametrize(
    "reduce", ["mean", "ema", "min", "max", "sum", "lifetime_sum", "item", "item_series"]
)
@pytest.mark.parametrize("window", [None, 3])
def test_tensors_and_numpy_numbers_become_plain_numbers(reduce: str, window: int | None) -> None:
    window = None if reduce == "ema" else window
    logger, remote = MetricsLogger(), MetricsLogger()
    weight = torch.ones((), requires_grad=True)
    for value in (weight * 2.0, np.float32(2.0), np.full((1,), 2.0), torch.tensor([2.0])):
        for each in (logger, remote):
            each.log_value(("p0", "mine"), value, reduce=reduce, window=window, with_throughput=True)
    state = remote.reduce(compile=False)
    json.dumps(state.states if hasattr(state, "states") else state)
    json.dumps(remote.get_state())
    merged = MetricsLogger()
    merged.aggregate([state])
    here, there = logger.reduce()["p0"], merged.reduce()["p0"]
    assert here["mine"] == there["mine"]
    json.dumps([here, there])
