"""Random kills during training: nothing accepted is lost, nothing is trained twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "nemesis.py"


def nemesis(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(600)
def test_sixty_kills_each_long_before_everybody_is_back() -> None:
    out = nemesis("--kills", "60", "--impatient", "--seed", "3")
    assert "60 killed" in out
    assert "0 lost, 0 trained twice" in out
