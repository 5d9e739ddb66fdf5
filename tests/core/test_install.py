"""What `pip install rlzmq` brings, and what an import costs."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
MAX_DISTRIBUTIONS = 30
MAX_IMPORT_S = 0.3


def test_the_core_install_is_at_most_thirty_distributions() -> None:
    # The project's own list, not the installed one, which an editable install keeps as it was.
    waiting = list(tomllib.loads(PROJECT.read_text())["project"]["dependencies"])
    found: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        is_of_cuda = name == "triton" or name.startswith(("nvidia-", "cuda-"))  # of torch's builds for GPUs
        if (
            name in found
            or is_of_cuda
            or (requirement.marker and not requirement.marker.evaluate({"extra": ""}))
        ):
            continue
        found.add(name)
        waiting += importlib.metadata.requires(name) or []
    assert len(found) <= MAX_DISTRIBUTIONS, sorted(found)


@pytest.mark.alone
def test_importing_the_library_takes_little_beside_torchs_import() -> None:
    code = (
        "import time, torch; begin = time.process_time()\n"
        "from rlzmq import PPOConfig; print(time.process_time() - begin)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True) for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) <= MAX_IMPORT_S
