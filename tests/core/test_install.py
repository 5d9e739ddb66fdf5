"""What `pip install rlzmq` brings, and what an import costs."""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rlzmq

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


def test_an_application_without_sources_imports_and_trains(tmp_path: Path) -> None:
    package = PROJECT.parent / "rlzmq"
    compileall.compile_dir(package, quiet=2)
    for path in package.rglob("*"):
        copy = tmp_path / path.relative_to(package.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            copy.with_suffix(".pyc").symlink_to(importlib.util.cache_from_source(path))
        elif path.is_file() and path.suffix != ".pyc":
            copy.symlink_to(path)
    code = (
        "import rlzmq; from rlzmq import PPOConfig; print(rlzmq.__file__, len(rlzmq.__all__))\n"
        "with PPOConfig.preset('CartPole-v1').env_runners(num_env_runners=1).build() as algo: algo.train()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(tmp_path / "rlzmq" / "__init__.pyc"), str(len(rlzmq.__all__))]


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
