"""What the dashboard computes: columns from growing files, and curves for a width."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.telemetry.dashboard.panels import curves_for_width
from rlzmq.telemetry.dashboard.watched import MetricsTail


def line(iteration: int, value: float | None) -> str:
    result = {"training_iteration": iteration, "num_env_steps_sampled_lifetime": iteration * 10}
    return json.dumps({**result, "env_runners": {"episode_return_mean": value}}) + "\n"


def read(tail: MetricsTail) -> list[list[float]]:
    while tail.read():
        pass
    columns = tail.columns()
    return [columns[name].tolist() for name in ("iterations", "steps", "mean")]


def test_a_file_is_read_on_as_it_grows_and_a_torn_line_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert not tail.read()
    whole = line(1, 1.0) + line(2, 2.0)
    path.write_text(whole[:-20])
    assert read(tail) == [[1], [10], [1]]
    with path.open("a") as file:
        file.write(whole[-20:] + "not json\n[]\n" + line(3, None))
    iterations, _, returns = read(tail)
    assert iterations == [1, 2, 3]
    assert returns[:2] == [1, 2]
    assert math.isnan(returns[2])
    assert tail.newest["training_iteration"] == 3


def test_iterations_that_are_repeated_after_a_resume_replace_those_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(iteration, float(iteration)) for iteration in range(1, 3001)))
    tail = MetricsTail(path)
    read(tail)
    before = tail.columns()["mean"]
    with path.open("a") as file:
        file.write(line(2000, -1.0) + line(2001, -2.0))
    iterations, _, returns = read(tail)
    assert iterations == list(range(1, 2002))
    assert returns[-3:] == [1999, -1, -2]
    assert before[1999] == 2000  # of whoever still draws them


def columns(x: list[float], mean: list[float], spread: float = 1.0) -> dict[str, np.ndarray]:
    values = np.array(mean)
    return {"x": np.array(x), "mean": values, "low": values - spread, "high": values + spread}


@settings(max_examples=40)
@given(
    st.integers(1, 1000),
    st.integers(10, 60),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["even", "crowded", "steps"]),
)
def test_no_extreme_is_lost_between_pixels(count: int, width: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    x = {
        "even": np.arange(count) * 10.0,
        "crowded": np.sort(rng.exponential(1.0, count)),
        "steps": np.sort(rng.integers(0, 50, count)).astype(float),
    }[kind]
    run = columns(x.tolist(), rng.normal(size=count).tolist())
    drawn, (curve,) = curves_for_width([run], width)
    assert len(drawn) <= 4 * width
    assert (np.diff(drawn) > 0).all()
    if kind != "steps":
        assert np.nanmin(curve["mean"]) == run["mean"].min()
        assert np.nanmax(curve["mean"]) == run["mean"].max()
        assert np.nanmax(curve["high"]) == run["high"].max()
    assert set(curve["mean"][np.isfinite(curve["mean"])]) <= set(run["mean"])
