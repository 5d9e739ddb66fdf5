"""Metrics in Prometheus' text format, version 0.0.4.

Example::

    latency = Histogram(LATENCY_S)
    latency.observe(0.003)
    text = prometheus_text([
        Metric("rlzmq_requests_total", "counter", "Answered requests.", {(("code", "200"),): 7}),
        Metric("rlzmq_latency_seconds", "histogram", "Time from request to answer.", {(): latency}),
    ])
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["CONTENT_TYPE", "LATENCY_S", "Histogram", "Labels", "Metric", "prometheus_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of a response with such a text."""

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of a histogram of durations, in seconds."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Label names and values, e.g. ``(("role", "runner"),)``."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Histogram:
    """Counts of observed values by upper bound, and their sum.

    Args:
        bounds: Upper bounds of the buckets, ascending; a last bucket without a bound is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[tuple[str, Labels, float]]:
        """Yield (suffix of the name, additional labels, value) of each sample."""
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            yield "_bucket", (("le", _number(bound)),), total
        yield "_sum", (), self._sum
        yield "_count", (), total


@dataclass(frozen=True)
class Metric:
    """A metric: its description and its values.

    Attributes:
        name: In snake case, with the unit at its end (``_seconds``, ``_bytes``), then ``_total`` for counters.
        kind: One of Prometheus' metric types.
        help: A one-line description.
        values: Labels -> value, a `Histogram` for histograms; ``{(): value}`` for a metric without labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    values: Mapping[Labels, float | Histogram]


def prometheus_text(metrics: Iterable[Metric]) -> str:
    """Return the metrics with their current values as text.

    Raises:
        ValueError: The name of a metric or of a label is malformed.
    """
    lines = []
    for metric in metrics:
        if not _NAME.fullmatch(metric.name):
            raise ValueError(f"name of a metric: expected letters, digits, _ and :, got {metric.name!r}")
        about = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {metric.name} {about}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.values.items():
            samples = value.samples() if isinstance(value, Histogram) else [("", (), value)]
            for suffix, more, number in samples:
                lines.append(f"{metric.name}{suffix}{_braces((*labels, *more))} {_number(number)}")
    return "\n".join(lines) + "\n"


def _braces(labels: Labels) -> str:
    for name, _ in labels:
        if not _LABEL.fullmatch(name):
            raise ValueError(f"name of a label: expected letters, digits and _, got {name!r}")
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
