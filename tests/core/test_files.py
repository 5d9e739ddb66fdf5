"""What a run writes cannot be changed by everybody, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlzmq.core.checkpoint_series import CheckpointSeries
from rlzmq.core.files import make_directories, write_text
from rlzmq.telemetry.run_directory import RunDirectory


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


class _Config:
    seed = 1
    env = "CartPole-v1"

    def to_toml(self) -> str:
        return ""


def test_no_file_or_directory_of_a_run_is_writable_by_others(tmp_path: Path, no_umask: None) -> None:
    root = tmp_path / "deep" / "runs"
    run = RunDirectory.create(root / "r", _Config())
    run.log({"a": 1})
    run.close()
    CheckpointSeries(run.checkpoints).write(1, {"learner/module": {"x": 1}}, {})
    make_directories(root / "private" / "journal", mode=0o700)
    write_text(root / "notes", "x")
    places = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
    assert len(places) > 10
    assert [path for path in places if path.stat().st_mode & stat.S_IWOTH] == []
    assert stat.S_IMODE((root / "private" / "journal").stat().st_mode) == 0o700


def test_a_directory_that_is_a_file_is_an_error_and_one_that_exists_is_none(tmp_path: Path) -> None:
    make_directories(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_directories(tmp_path / "file")
