"""Checkpoints that a run writes by itself, and going on from them with one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import Algorithm, CheckpointError, latest_checkpoint
from rlzmq.core import faults
from tests.support.runs import small


def config(**checkpointing: Any) -> Any:
    return small(train_batch_size_per_learner=100, **checkpointing)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_run_is_begun_and_gone_on_with_by_the_same_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config="):
        Algorithm.resume(tmp_path)
    for first in (1, 4, 7):
        with Algorithm.resume(tmp_path, config=config(checkpoint_every_s=0.0, checkpoint_keep=2)) as algo:
            assert algo.training_iteration == first - 1
            for _ in range(3):
                result = algo.train()
            newest = algo.save_checkpoint()
            assert newest == algo.save_checkpoint(), "one of this iteration is there"
            assert algo._async._keeper.num_written >= 1
        assert newest.name == f"{first + 2:06d}"
        assert latest_checkpoint(tmp_path) == newest
        assert result["num_env_steps_trained_lifetime"] >= 100 * (first + 2)
        assert len(names(tmp_path)) in (2, 3), "two, and the best"
    assert "num_checkpoints" in result["fault_tolerance"]
    assert result["fault_tolerance"]["num_failed_checkpoints"] == 0


def test_the_state_written_is_that_of_its_iteration(tmp_path: Path) -> None:
    with Algorithm.resume(tmp_path, config=config(checkpoint_every_s=0.0)) as algo:
        algo.train()
        at_one = algo.get_module().get_state()
        algo._async._keeper.wait()
        algo.train()  # changes weights in place
    with Algorithm.from_checkpoint(tmp_path / "checkpoints" / "000001") as restored:
        for name, value in restored.get_module().get_state().items():
            np.testing.assert_array_equal(value, at_one[name])


def test_a_failed_write_is_counted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", "checkpoint.boundary:enospc:60")
    faults.arm("driver")
    try:
        with Algorithm.resume(tmp_path, config=config(checkpoint_every_s=0.0)) as algo:
            for _ in range(3):
                result = algo.train()
                algo._async._keeper.wait()
            result = algo.train()
    finally:
        monkeypatch.delenv("RLZMQ_FAULT")
        faults.arm("driver")
    assert result["fault_tolerance"]["num_failed_checkpoints"] == 1
    assert "No space left" in caplog.text
    assert "000001" in names(tmp_path)
    assert "000002" not in names(tmp_path)
    assert latest_checkpoint(tmp_path) is not None
