"""Statistics of a few scores: the interquartile mean, bootstrap confidence intervals, and a curve of them.

Source: Agarwal et al., *Deep Reinforcement Learning at the Edge of the Statistical Precipice*, NeurIPS 2021
(arXiv:2108.13264), section 4. Its reference implementation is the library rliable.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["bootstrap_interval", "interquartile_mean", "mean", "svg_curve"]

_MAX_VALUES_AT_ONCE = 1_000_000  # values of resamples, so that memory stays below about 20 MB

Statistic = Callable[[NDArray[np.float64], int], Any]


def mean(values: NDArray[np.float64], axis: int = 0) -> Any:
    """Return the mean along an axis."""
    return values.mean(axis=axis)


def interquartile_mean(values: ArrayLike, axis: int = 0) -> Any:
    """Return the mean of the middle half: without the lowest and the highest quarter, each rounded down in size.

    Args:
        values: Scores, at least one along the axis.
        axis: The axis of the scores.
    """
    ordered = np.sort(np.asarray(values, np.float64), axis=axis)
    num = ordered.shape[axis]
    cut = num // 4
    return np.take(ordered, range(cut, num - cut), axis=axis).mean(axis=axis)


def bootstrap_interval(
    values: ArrayLike,
    statistic: Statistic = mean,
    *,
    strata: ArrayLike | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Return the percentile bootstrap interval of a statistic: its quantiles over resamples with replacement.

    With few scores the interval is too narrow. With 3 scores it is never wider than their range.

    Args:
        values: Scores ``[N, …]``: independent along the first axis, resampled together along the others.
        statistic: `mean` or `interquartile_mean`, called with resamples ``[R, N, …]`` and axis 1.
        strata: ``[N]``: the stratum of each score, e.g. the number of its task; scores are resampled among those of
            their stratum. None: all are of one.
        confidence: Fraction of resamples within the interval.
        num_resamples: Number of resamples.
        seed: Seed of the resamples, so that equal scores give equal intervals.

    Returns:
        Lower and upper end, each of shape ``[…]``; NaN if there are fewer than two scores.
    """
    scores = np.asarray(values, np.float64)
    num = len(scores)
    if num < 2:
        nothing = np.full(scores.shape[1:], np.nan)[()]
        return nothing, nothing
    labels = np.zeros(num) if strata is None else np.asarray(strata)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    generator = np.random.default_rng(seed)
    at_once = max(1, min(num_resamples, _MAX_VALUES_AT_ONCE // scores.size))
    found = []
    for begin in range(0, num_resamples, at_once):
        count = min(at_once, num_resamples - begin)
        drawn = [own[generator.integers(0, len(own), (count, len(own)))] for own in members]
        found.append(statistic(scores[np.concatenate(drawn, axis=1)], 1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(found), (tail, 1 - tail), axis=0)
    return low, high


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 160, 52, 30, 8
_MAX_POINTS = 400


def svg_curve(x: ArrayLike, y: ArrayLike, x_label: str, y_label: str) -> str:
    """Return an ``<svg>`` element with y over x, which notebooks show; "" if there is no finite point.

    Args:
        x: ``[N]``, ascending.
        y: ``[N]``; values that are not finite are left out.
        x_label, y_label: Names of the axes.
    """
    points = np.stack([np.asarray(x, np.float64), np.asarray(y, np.float64)], axis=1)
    points = points[np.isfinite(points).all(axis=1)]
    if not len(points):
        return ""
    points = points[np.unique(np.linspace(0, len(points) - 1, _MAX_POINTS).round().astype(int))]
    low, high = points.min(axis=0), points.max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    scaled = (points - low) / span
    left = _LEFT + scaled[:, 0] * (_WIDTH - _LEFT - 8)
    top = _TOP + (1 - scaled[:, 1]) * (_HEIGHT - _TOP - _BOTTOM)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(left, top, strict=True))
    floor = _HEIGHT - _BOTTOM
    texts = [
        (_LEFT - 4, _TOP + 8, "end", f"{high[1]:.4g}"),
        (_LEFT - 4, floor, "end", f"{low[1]:.4g}"),
        (_LEFT, floor + 12, "start", f"{low[0]:,.0f}"),
        (_WIDTH - 8, floor + 12, "end", f"{high[0]:,.0f}"),
        ((_WIDTH + _LEFT) / 2, floor + 24, "middle", f"{y_label} by {x_label}"),
    ]
    labels = "".join(
        f'<text x="{a:g}" y="{b:g}" text-anchor="{anchor}">{html.escape(text)}</text>'
        for a, b, anchor, text in texts
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-size="10" '
        f'font-family="sans-serif" fill="currentColor"><path d="M{_LEFT},{_TOP}V{floor}H{_WIDTH - 8}" '
        f'fill="none" stroke="currentColor" opacity="0.4"/><polyline points="{line}" fill="none" '
        f'stroke="#1f77b4" stroke-width="1.5"/>{labels}</svg>'
    )
