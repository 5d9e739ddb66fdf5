"""The text that a Prometheus server reads."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlzmq.telemetry.prometheus import Histogram, Metric, prometheus_text


def test_counters_and_gauges_with_labels() -> None:
    requests = Metric(
        "rlzmq_requests_total",
        "counter",
        "Answered requests.\nBy code.",
        {(("code", "200"), ("path", 'a"b\\c\n')): 7, (("code", "400"),): 0},
    )
    size = Metric("rlzmq_size_bytes", "gauge", "A size.", {(): 0.1})
    assert prometheus_text([requests, size]) == (
        "# HELP rlzmq_requests_total Answered requests.\\nBy code.\n"
        "# TYPE rlzmq_requests_total counter\n"
        'rlzmq_requests_total{code="200",path="a\\"b\\\\c\\n"} 7\n'
        'rlzmq_requests_total{code="400"} 0\n'
        "# HELP rlzmq_size_bytes A size.\n"
        "# TYPE rlzmq_size_bytes gauge\n"
        "rlzmq_size_bytes 0.1\n"
    )


def test_histograms_count_values_up_to_each_bound() -> None:
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 2, 99):
        histogram.observe(value)
    text = prometheus_text([Metric("rlzmq_wait_seconds", "histogram", "A wait.", {(("a", "b"),): histogram})])
    assert text.splitlines()[1:] == [
        "# TYPE rlzmq_wait_seconds histogram",
        'rlzmq_wait_seconds_bucket{a="b",le="1"} 2',
        'rlzmq_wait_seconds_bucket{a="b",le="2.5"} 3',
        'rlzmq_wait_seconds_bucket{a="b",le="+Inf"} 4',
        'rlzmq_wait_seconds_sum{a="b"} 102.5',
        'rlzmq_wait_seconds_count{a="b"} 4',
    ]


def test_values_that_are_not_finite() -> None:
    values = {(("a", "1"),): math.inf, (("a", "2"),): -math.inf, (("a", "3"),): math.nan}
    lines = prometheus_text([Metric("x", "gauge", "X.", values)]).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["+Inf", "-Inf", "NaN"]


@pytest.mark.parametrize(("name", "label"), [("a-b", "c"), ("1a", "c"), ("", "c"), ("a", "c:d"), ("a", "")])
def test_malformed_names_are_refused(name: str, label: str) -> None:
    with pytest.raises(ValueError, match="expected letters, digits"):
        prometheus_text([Metric(name, "gauge", "X.", {((label, "x"),): 1})])


def test_the_text_is_what_prometheus_own_parser_reads() -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.1)
    metrics = [
        Metric("rlzmq_a_total", "counter", "A.", {(("code", 'a"b\\c\n'),): 7}),
        Metric("rlzmq_b_seconds", "histogram", "B.", {(): histogram}),
    ]
    counter, buckets = text_string_to_metric_families(prometheus_text(metrics))
    assert (counter.name, counter.type, counter.samples[0].value) == ("rlzmq_a", "counter", 7)
    assert counter.samples[0].labels == {"code": 'a"b\\c\n'}
    assert [sample.value for sample in buckets.samples] == [1, 1, 1, 0.1, 1]
