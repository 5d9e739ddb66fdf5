"""Clocks may jump: nothing is ordered, awaited or expired by the wall clock."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "rlzmq"

# Labels for people; numbers that rise by themselves and only begin at the wall clock's; a file's age; where another
# host's stages stand in a trace.
ALLOWED = {
    "algorithms/checkpoints.py",
    "net/keys.py",
    "launch/k8s.py",
    "core/run_dir.py",
    "core/addresses.py",
    "core/trace.py",
    "roles/broker_role.py",
    "driver/broker_pipeline.py",
    "replay/shards.py",
    "telemetry/run_directory.py",
    "telemetry/runs.py",
    "cli/runs.py",
    "tune/tuner.py",
}
WALL = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "strftime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
}


def reads_the_wall_clock(source: str) -> bool:
    # most files name none of these functions, and need not be parsed
    return any(f".{name}" in source for _, name in WALL) and any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL
        for node in ast.walk(ast.parse(source))
    )


def test_the_wall_clock_is_read_where_it_is_known_to_do_no_harm() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if reads_the_wall_clock(path.read_text())
    }
    assert readers == ALLOWED
