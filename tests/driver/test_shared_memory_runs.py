"""Runs whose fragments are large enough for shared memory: the same numbers, no losses, nothing left."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import test_nemesis
from recovery_runs import large

from rlzmq import PPOConfig
from scripts.nemesis import ROLES, Nemesis
from tests.support.fault_history import check_history, read_history

history = test_nemesis.history


def segments_in(pid: int) -> set[int]:
    """Inodes of the segments that a process has opened."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "rlzmq_segment" in os.readlink(path):
                inodes.add(path.stat().st_ino)
        except FileNotFoundError:
            continue
    return inodes


def train(config: PPOConfig, check: Callable[[], None] | None = None) -> dict[str, np.ndarray]:
    with config.build() as algo:
        for _ in range(3):
            algo.train()
        if check is not None:
            check()
        return dict(algo.get_module().get_state())


@pytest.fixture(scope="module")
def serial_weights() -> dict[str, np.ndarray]:
    return train(large(0, 0))


@pytest.mark.parametrize(
    ("num_env_runners", "num_learners"), [(1, 1), pytest.param(1, 0, marks=pytest.mark.slow), (0, 1)]
)
def test_fragments_in_shared_memory_are_trained_bit_for_bit_as_in_a_serial_run(
    num_env_runners: int, num_learners: int, serial_weights: dict[str, np.ndarray]
) -> None:
    def check() -> None:
        runners = psutil.Process().children(recursive=True) if num_env_runners else [psutil.Process()]
        assert any(segments_in(process.pid) for process in runners), "else this test shows nothing"

    np.testing.assert_equal(train(large(num_env_runners, num_learners), check), serial_weights)
    gc.collect()
    assert segments_in(os.getpid()) == set()


def test_without_shared_memory_the_run_is_the_same(
    monkeypatch: pytest.MonkeyPatch, serial_weights: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", refuse)  # the runner is in this process
    np.testing.assert_equal(train(large(0, 1)), serial_weights)
    assert len([text for text in caplog.messages if "No space left on device" in text]) == 1


@pytest.mark.timeout(300)
async def test_kills_of_all_roles_lose_nothing_and_leave_nothing(history: Path) -> None:
    async with large(2, 2).training(staleness=1).build_async() as algo:
        nemesis = Nemesis(algo, num_kills=6, roles=list(ROLES), seed=5, how="kill", is_impatient=True)
        await nemesis.run()
        children = psutil.Process().children(recursive=True)
        assert any(segments_in(child.pid) for child in children), "else this test shows nothing"
    assert "0 lost, 0 trained twice" in str(check_history(read_history(history)))
    gc.collect()
    assert segments_in(os.getpid()) == set()
    assert not any(child.is_running() and segments_in(child.pid) for child in children)
    assert not [name for name in os.listdir("/dev/shm") if "rlzmq" in name]
