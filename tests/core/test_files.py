"""What a run writes cannot be changed by everybody, whatever the umask."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlzmq.core.checkpoint_series import CheckpointSeries
from rlzmq.core.files import lock_file, make_directories, write_text
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
    make_directories(root / "private" / "quarantine", mode=0o700)
    write_text(root / "notes", "x")
    places = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
    assert len(places) > 10
    assert [path for path in places if path.stat().st_mode & stat.S_IWOTH] == []
    assert stat.S_IMODE((root / "private" / "quarantine").stat().st_mode) == 0o700


def test_a_directory_that_is_a_file_is_an_error_and_one_that_exists_is_none(tmp_path: Path) -> None:
    make_directories(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_directories(tmp_path / "file")


def test_a_locked_file_is_refused_with_its_holders_words_and_free_when_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = lock_file(path)
    try:
        os.write(fd, b"pid 7\x1b[2J\n")
        with pytest.raises(BlockingIOError) as caught:
            lock_file(path)
        assert caught.value.strerror == r"pid 7\x1b[2J"
    finally:
        os.close(fd)
    os.close(lock_file(path, create=False))


def test_a_lock_is_that_of_the_file_that_others_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder removes the file between our opening and our lock."""
    path = tmp_path / "lock"
    lock_now = fcntl.flock

    def removed_meanwhile(fd: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock_now)
        path.unlink()
        lock_now(fd, how)

    monkeypatch.setattr("fcntl.flock", removed_meanwhile)
    fd = lock_file(path)
    try:
        assert os.path.samestat(os.fstat(fd), path.stat())
    finally:
        os.close(fd)


def test_no_lock_is_taken_through_a_link_or_made_where_none_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        lock_file(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        lock_file(tmp_path / "none", create=False)
    assert not (tmp_path / "target").exists()
