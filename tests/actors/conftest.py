"""Every test of actors leaves no process, run directory or open socket behind."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from actor_checks import is_gone

from rlzmq.actors import forkserver
from rlzmq.actors.system import ActorSystem


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where run directories of this test are made; empty again at its end."""
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    yield path
    # An actor that ends leaves its own actors' directory to its fork server, which ends after it.
    deadline = time.monotonic() + 5
    while (left := list(path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(path)
    assert left == []
    assert living_actors() == []


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem() as running:
        yield running


def living_actors() -> list[psutil.Process]:
    """Children of the fork server that live although they should not."""
    server = psutil.Process(forkserver.get_fork_server().pid)
    return [process for process in server.children(recursive=True) if not is_gone(process)]
