"""A run's checkpoints: which is taken, which are kept, and what is left when a write fails or dies."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from rlzmq.algorithms.checkpoints import checkpoint_place
from rlzmq.core import faults
from rlzmq.core.checkpoint import read_checkpoint
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.files import FileLock
from rlzmq.core.run_dir import RunDir, find_checkpoint, num_bytes_of


def state(number: int) -> dict[str, object]:
    return {"learner": {"w": np.full(1000, number, np.float32)}, "algorithm": {"iteration": number}}


def run_of(path: Path, *scores: float | None, keep: int = 3) -> RunDir:
    run = RunDir(path, keep=keep)
    for number, score in enumerate(scores, start=1):
        run.write(number, state(number), {"score": score})
    return run


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_the_newest_few_and_the_best_are_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1.0, 9.0, 9.0, None, 2.0, 3.0, keep=2)
    assert names(run) == ["000003", "000005", "000006"]
    assert find_checkpoint(tmp_path).path == run.checkpoints / "000006"


def test_a_run_directory_a_series_and_a_checkpoint_are_all_found(tmp_path: Path) -> None:
    run = run_of(tmp_path, None)
    for place in (tmp_path, run.checkpoints, run.checkpoints / "000001", str(tmp_path)):
        assert find_checkpoint(place).path == run.checkpoints / "000001"
    assert find_checkpoint(tmp_path / "nowhere").path is None


def test_torn_and_altered_ones_are_skipped_and_said_so(tmp_path: Path) -> None:
    run = run_of(tmp_path, None, None, None)
    (run.checkpoints / "000003" / "manifest.json").write_text("{")
    weights = run.checkpoints / "000002" / "learner" / "state.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = find_checkpoint(tmp_path)
    assert found.path == run.checkpoints / "000001"
    assert [path.name for path, _ in found.skipped] == ["000003", "000002"]
    assert "torn" in found.skipped[0][1]
    assert "altered" in found.skipped[1][1]
    shutil.rmtree(found.path)
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints can be used"):
        checkpoint_place(tmp_path)


def test_a_lock_that_cannot_be_written_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: FileLock, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileLock, "write", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        RunDir(tmp_path / "run").take()
    assert list((tmp_path / "run").iterdir()) == []


def test_what_another_lineage_left_is_set_aside(tmp_path: Path) -> None:
    run = run_of(tmp_path, None, None, None)
    again = RunDir(tmp_path)
    again.write(2, state(20), {})
    assert names(again) == ["000001", "000002", "000003.abandoned"]
    assert find_checkpoint(tmp_path).path == run.checkpoints / "000002"
    again.write(3, state(21), {})
    assert find_checkpoint(tmp_path).path == run.checkpoints / "000003"


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, None)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 100))
    with pytest.raises(CheckpointError, match=r"needs about \d+ bytes, 100 are free"):
        run.write(2, state(2), {})
    assert names(run) == ["000001"]


def test_the_size_of_a_state_is_not_underestimated(tmp_path: Path) -> None:
    run = run_of(tmp_path, None)
    on_disk = sum(file.stat().st_size for file in run.checkpoints.rglob("*") if file.is_file())
    assert on_disk < num_bytes_of(state(1)) + (1 << 20)


@pytest.mark.parametrize("action", ["kill", "enospc"])
def test_a_fault_at_any_place_of_a_write_leaves_something_to_load(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child writes the second checkpoint; at its N-th file boundary it is killed, or the disk fails."""
    num_faults = 0
    while True:
        place = tmp_path / f"{num_faults}"
        run_of(place, None, keep=1)
        log = tmp_path / f"{num_faults}.log"
        monkeypatch.setenv("RLZMQ_FAULT", f"checkpoint.boundary:{action}:{num_faults + 1}")
        monkeypatch.setenv("RLZMQ_FAULT_LOG", str(log))
        pid = os.fork()
        if pid == 0:
            try:
                faults.arm("writer")
                RunDir(place, keep=1).write(2, state(2), {})
                os._exit(0)
            except BaseException:
                os._exit(1)
        os.waitpid(pid, 0)
        if not log.exists():
            break
        num_faults += 1
        path = find_checkpoint(place).path
        assert path is not None
        number = int(path.name)
        assert read_checkpoint(path)["algorithm"] == {"iteration": number}
        # And the next process can write there, whatever is lying about.
        after = RunDir(place, keep=1)
        after.write(3, state(3), {})
        assert names(after) == ["000003"]
    assert num_faults > 20


def _crafted(path: Path, text: bytes) -> None:
    path.mkdir()
    (path / "manifest.json").write_bytes(text)


def _signed(**changes: object) -> bytes:
    manifest = {"format": "rlzmq-checkpoint", "version": 1, "about": {}, "files": {}, **changes}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}).encode()


_ENTRY = {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}


@pytest.mark.parametrize(
    "manifest",
    [
        b"[" * 200_000,
        b"\xff\xfe",
        b" " * (17 << 20),
        _signed(files=[["a", 1]]),
        _signed(files={"a/state.json": {"bytes": -1, "sha256": "x"}}),
        _signed(files={"../state.json": _ENTRY}),
        _signed(files={"a\ud800/state.json": _ENTRY}),
        _signed(files={"pipe": _ENTRY}),
        _signed(files={"zero": {"bytes": 1 << 40, "sha256": "x"}}),
    ],
)
def test_a_crafted_manifest_is_skipped_with_a_reason(tmp_path: Path, manifest: bytes) -> None:
    """Deep, huge, of odd types, or naming what never ends: the older checkpoint is taken."""
    run = run_of(tmp_path, 5.0)
    crafted = run.checkpoints / "000002"
    _crafted(crafted, manifest)
    os.mkfifo(crafted / "pipe")
    os.symlink("/dev/zero", crafted / "zero")
    found = find_checkpoint(tmp_path)
    assert found.path == run.checkpoints / "000001"
    assert [path for path, why in found.skipped if why] == [crafted]
    RunDir(tmp_path).write(1, state(1), {})  # tidying up reads none of it


@pytest.mark.parametrize("text", [b"[" * 100_000 + b"]" * 100_000, b'{"__tuple__": 3}'])
def test_a_crafted_state_is_skipped_with_a_reason(tmp_path: Path, text: bytes) -> None:
    run = run_of(tmp_path, 5.0)
    entry = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    _crafted(run.checkpoints / "000002", _signed(files={"a/state.json": entry}))
    (run.checkpoints / "000002" / "a").mkdir()
    (run.checkpoints / "000002" / "a" / "state.json").write_bytes(text)
    found = find_checkpoint(tmp_path)
    assert found.path == run.checkpoints / "000001"
    assert len(found.skipped) == 1
