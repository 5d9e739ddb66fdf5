"""Checks of a trace against the Trace Event Format, and of what its viewers assume about tracks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the kinds of events in use here.
_IDS = {"pid": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_IDS |= {"tid": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_TIMED = {**_IDS, "name": {"type": "string", "minLength": 1}, "ts": {"type": "number", "minimum": 0}}
EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "ph", "pid"],
    "oneOf": [
        {
            "properties": {
                **_TIMED,
                "ph": {"const": "X"},
                "dur": {"type": "number", "minimum": 0},
                "args": {"type": "object"},
            },
            "required": ["ts", "dur", "tid"],
            "additionalProperties": False,
        },
        {
            "properties": {
                **_TIMED,
                "ph": {"enum": ["s", "f"]},
                "cat": {"type": "string"},
                "id": {"type": "integer", "minimum": 0},
                "bp": {"const": "e"},
            },
            "required": ["ts", "tid", "cat", "id"],
            "additionalProperties": False,
        },
        {
            "properties": {
                **_IDS,
                "name": {"enum": ["process_name", "process_labels", "thread_name", "rlzmq"]},
                "ph": {"const": "M"},
                "args": {"type": "object", "minProperties": 1},
            },
            "required": ["args"],
            "additionalProperties": False,
        },
    ],
}

_ROUNDED_US = 0.2  # times are written with one decimal


def check_trace(events: Sequence[dict[str, Any]]) -> None:
    """Check that each event has the form of its kind, and that each track is named and its stages are nested."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(EVENT_SCHEMA)
    for event in events:
        assert validator.is_valid(event), (event, [error.message for error in validator.iter_errors(event)])
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
    begun = {event["id"] for event in events if event["ph"] == "s"}
    ended = [event["id"] for event in events if event["ph"] == "f"]
    assert begun.issuperset(ended)


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
