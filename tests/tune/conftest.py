"""Searches whose trials are forked from the tests' warm server, in a directory of the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlzmq import tune


@pytest.fixture(autouse=True)
def no_process_is_left(fork_server: None) -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    names = {child.pid: child.name() for child in left if child.name() != "rlzmq-forks"}
    _, alive = psutil.wait_procs([child for child in left if child.pid in names], timeout=10)
    assert not alive, names


@pytest.fixture
def run_config(tmp_path: Path) -> tune.RunConfig:
    return tune.RunConfig(name="search", storage_path=tmp_path, verbose=0)
