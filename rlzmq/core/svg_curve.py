"""A small curve as SVG, which notebooks display without further packages."""

from __future__ import annotations

import html

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["svg_curve"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 160, 52, 30, 8
_MAX_POINTS = 400


def svg_curve(x: ArrayLike, y: ArrayLike, x_label: str, y_label: str) -> str:
    """Return an ``<svg>`` element with y over x; "" if there is no finite point.

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
