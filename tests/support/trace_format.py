"""Checks of a trace against the Trace Event Format, and of what its viewers assume about tracks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the kinds of events in use here,
# what each must have, and what it may have.
_COMMON, _TIMED = {"name", "ph", "pid"}, {"name", "ph", "pid", "tid", "ts"}
_KINDS: dict[str, tuple[set[str], set[str]]] = {
    "X": (_TIMED | {"dur"}, {"args"}),
    "s": (_TIMED | {"cat", "id"}, set()),
    "f": (_TIMED | {"cat", "id"}, {"bp"}),
    "M": (_COMMON | {"args"}, {"tid"}),
}

_ROUNDED_US = 0.2  # times are written with one decimal


def check_trace(events: Sequence[dict[str, Any]]) -> None:
    """Check that each event has the form of its kind, and that each track is named and its stages are nested."""
    for event in events:
        must, may = _KINDS[event["ph"]]
        assert must <= event.keys() <= must | may, event
        assert all(0 <= event[key] < 2**32 for key in ("pid", "tid") if key in event), event
        assert all(event[key] >= 0 for key in ("ts", "dur") if key in event), event
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert len({tid for _, tid in threads}) == len(threads), "thread ids are unique in the file"
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            assert event["pid"] in named
            assert (event["pid"], event["tid"]) in threads
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for stages in tracks.values():
        check_nesting(stages)


def check_nesting(stages: Sequence[dict[str, Any]]) -> None:
    """Check that of any two stages of a track, either one contains the other, or one ends before the other begins."""
    in_order = sorted(stages, key=lambda stage: (stage["ts"], -stage["dur"]))
    assert all(first["ts"] <= second["ts"] for first, second in pairwise(in_order))
    open_stages: list[dict[str, Any]] = []
    for stage in in_order:
        while open_stages and _end(open_stages[-1]) <= stage["ts"] + _ROUNDED_US:
            open_stages.pop()
        if open_stages:
            assert _end(stage) <= _end(open_stages[-1]) + _ROUNDED_US, (open_stages[-1], stage)
        open_stages.append(stage)


def _end(stage: dict[str, Any]) -> float:
    return float(stage["ts"] + stage["dur"])
