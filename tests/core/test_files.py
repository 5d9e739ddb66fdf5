"""What a run writes cannot be changed by everybody, whatever the umask."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlzmq import PPOConfig
from rlzmq.core.files import holder_of, lock_file, make_directories, write_text
from rlzmq.telemetry.run_directory import RunDirectory


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_no_file_or_directory_of_a_run_is_writable_by_others(tmp_path: Path, no_umask: None) -> None:
    root = tmp_path / "deep" / "runs"
    run = RunDirectory.create(root / "r", PPOConfig().environment("CartPole-v1"))
    run.log({"a": 1})
    run.close()
    run.write(1, {"learner/module": {"x": 1}}, {})
    make_directories(root / "private" / "quarantine", mode=0o700)
    write_text(root / "notes", "x")
    places = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
    assert len(places) > 10
    assert [path for path in places if path.stat().st_mode & stat.S_IWOTH] == []
    assert stat.S_IMODE((root / "private" / "quarantine").stat().st_mode) == 0o700


def test_a_locked_file_is_refused_with_its_holders_words_and_free_when_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = lock_file(path)
    lock.write("pid 7\x1b[2J\n")
    with pytest.raises(BlockingIOError) as caught:
        lock_file(path)
    assert caught.value.strerror == holder_of(path) == r"pid 7\x1b[2J"
    lock.release()
    assert holder_of(path) is None
    lock_file(path, create=False).release(remove=True)
    assert not path.exists()
    assert holder_of(path) is None


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    lock = lock_file(tmp_path / "lock")
    goes_on, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        os.read(goes_on, 1)
        os._exit(0)
    try:
        assert holder_of(tmp_path / "lock") is not None
        lock.release()
        lock_file(tmp_path / "lock").release()
    finally:
        os.close(ends)
        os.close(goes_on)
        os.waitpid(child, 0)


def test_who_looks_at_a_lock_keeps_nobody_from_it(tmp_path: Path) -> None:
    """A reader shares the lock for the moment of its look."""
    path = tmp_path / "lock"
    path.touch()
    reader = os.open(path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    looking = threading.Timer(0.01, os.close, [reader])
    looking.start()
    lock_file(path).release()
    looking.join()


def test_a_lock_is_that_of_the_file_that_others_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder removes the file between our opening and our lock."""
    path = tmp_path / "lock"
    lock_now = fcntl.flock

    def removed_meanwhile(fd: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock_now)
        path.unlink()
        lock_now(fd, how)

    monkeypatch.setattr("fcntl.flock", removed_meanwhile)
    lock = lock_file(path)
    assert holder_of(path) is not None
    lock.release()
    assert holder_of(path) is None


def test_a_text_is_replaced_at_once_and_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "notes").symlink_to(tmp_path / "secret")
    write_text(tmp_path / "notes", "new")
    assert ((tmp_path / "notes").read_text(), (tmp_path / "secret").read_text()) == ("new", "mine")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "notes", "x" * 100_000 + "\udc80")
    with pytest.raises(OSError, match=str(tmp_path / "gone")):
        write_text(tmp_path / "gone" / "notes", "new")
    assert (tmp_path / "notes").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "secret"]


def test_no_lock_is_taken_through_a_link_or_made_where_none_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        lock_file(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        lock_file(tmp_path / "none", create=False)
    assert not (tmp_path / "target").exists()
