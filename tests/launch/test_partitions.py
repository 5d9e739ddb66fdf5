"""Cables between machines are pulled while they train (``scripts/partitions.py``, in small)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machines import why_no_machines

SCRIPT = Path(__file__).parents[2] / "scripts" / "partitions.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_no_machines()), reason=why_no_machines() or "namespaces work"),
]


@pytest.mark.parametrize(
    "arguments",
    [
        "notice --repeat 1",
        "learners --repeat 1",
        "heal --cut 10 --repeat 1",
        "narrow --runners 3 --seconds 15",
    ],
)
def test_what_the_reliability_page_says_of_partitions(arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if arguments.startswith("heal"):
        assert "0 lost, 0 trained twice" in result.stdout
