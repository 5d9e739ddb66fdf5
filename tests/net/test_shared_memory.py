"""Segments: who holds one, what is never changed or mapped, what remains."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq.net.shared_memory import MIN_SHARED_BYTES, Segment, SegmentPool

LARGE = MIN_SHARED_BYTES


@pytest.fixture(autouse=True)
def nothing_remains() -> Iterator[None]:
    yield
    assert not list(opened_segments())
    assert "rlzmq_segment" not in Path("/proc/self/maps").read_text()
    assert not [name for name in os.listdir("/dev/shm") if "rlzmq" in name]


def opened_segments() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if "rlzmq_segment" in target:
            yield target


def segment_of(array: Any) -> Segment:
    while not isinstance(array, Segment):
        array = array.obj if isinstance(array, memoryview) else array.base
    return array


def place_of(array: Any) -> tuple[int, int, str, int]:
    segment = segment_of(array)
    return segment.pid, segment.fd, segment.nonce, len(segment)


def columns() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 255, (50, 84, 84, 4)).astype(np.uint8),
        rng.standard_normal((2, 50)),
        np.array(["2020-01-01", "2021-02-03"], "M8[D]"),
        np.array(["a", "word"]),
        np.zeros((0, 3), np.float32),
        rng.standard_normal((6, 4)).T,
        np.array(7),
    ]


def test_arrays_in_a_segment_equal_what_was_put_there() -> None:
    given = columns()
    put = SegmentPool().put(given)
    for one, other in zip(given, put, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    owners = [segment_of(array) for array in put if array.size]
    assert len({id(owner) for owner in owners}) == 1


def test_a_holder_may_write_and_nobody_else_sees_it() -> None:
    (put,) = SegmentPool().put([np.ones(LARGE, np.uint8)])
    other = Segment.hold(*place_of(put))
    mine = np.frombuffer(other, np.uint8)
    mine[-1] = 9
    assert put[-1] == 1
    put[-2] = 8
    assert mine[-2] == 1


def test_a_segment_is_filled_again_only_after_its_last_view_is_gone() -> None:
    pool = SegmentPool()
    (first,) = pool.put([np.full(LARGE, 1, np.uint8)])
    view = memoryview(Segment.hold(*place_of(first)))[64:100]
    inode = os.fstat(segment_of(first).fd).st_ino
    del first
    (second,) = pool.put([np.full(LARGE, 2, np.uint8)])
    assert os.fstat(segment_of(second).fd).st_ino != inode
    assert bytes(view) == b"\1" * 36
    del view
    (third,) = pool.put([np.full(LARGE, 3, np.uint8)])
    assert os.fstat(segment_of(third).fd).st_ino == inode
    assert (second == 2).all()
    assert (third == 3).all()


def start_process(code: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Run code that prints one line of words and then waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code) + "\nimport time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert process.stdout is not None
    process.stdout.close()


FILL = """
    import numpy as np
    from rlzmq.net.shared_memory import SegmentPool
    pool = SegmentPool()
    (array,) = pool.put([np.full({size}, 5, np.uint8)])
    segment = array.base
    while not hasattr(segment, "nonce"):
        segment = segment.obj if isinstance(segment, memoryview) else segment.base
    print(segment.pid, segment.fd, segment.nonce, len(segment), flush=True)
"""


def test_a_holder_keeps_the_data_of_an_owner_that_was_killed() -> None:
    process, (pid, fd, nonce, num_bytes) = start_process(FILL.format(size=LARGE))
    place = (int(pid), int(fd), nonce, int(num_bytes))
    segment = Segment.hold(*place)
    kill(process)
    assert (np.frombuffer(segment, np.uint8)[64:] == 5).all()
    other = Segment.hold(segment.pid, segment.fd, segment.nonce, len(segment))
    del segment
    assert (np.frombuffer(other, np.uint8)[64:] == 5).all()
    with pytest.raises(FileNotFoundError):
        Segment.hold(*place)


def test_a_holder_that_was_killed_holds_nothing() -> None:
    pool = SegmentPool()
    (array,) = pool.put([np.zeros(LARGE, np.uint8)])
    place = place_of(array)
    process, _ = start_process(f"""
    from rlzmq.net.shared_memory import Segment
    segment = Segment.hold(*{place!r})
    print("held", flush=True)
    """)
    inode = os.fstat(segment_of(array).fd).st_ino
    del array
    (other,) = pool.put([np.zeros(LARGE, np.uint8)])
    assert os.fstat(segment_of(other).fd).st_ino != inode, "the other process holds it"
    kill(process)
    (again,) = pool.put([np.zeros(LARGE, np.uint8)])
    assert os.fstat(segment_of(again).fd).st_ino == inode


def test_a_forked_child_neither_holds_nor_releases() -> None:
    pool = SegmentPool()
    (array,) = pool.put([np.zeros(LARGE, np.uint8)])
    inode = os.fstat(segment_of(array).fd).st_ino
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        segment_of(array).__del__()  # as when the child's copy of the object is collected
        os.read(reads, 1)
        os._exit(0)
    try:
        (other,) = pool.put([np.ones(LARGE, np.uint8)])
        assert os.fstat(segment_of(other).fd).st_ino != inode, "held by this process"
        del array
        (again,) = pool.put([np.ones(LARGE, np.uint8)])
        assert os.fstat(segment_of(again).fd).st_ino == inode, "not held by the child"
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def memfd(num_bytes: int, seals: int = 0) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def fifo(tmp_path: Path) -> int:
    os.mkfifo(tmp_path / "fifo")
    return os.open(tmp_path / "fifo", os.O_RDWR)


HOSTILE = {
    "a file": lambda tmp_path: os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT),
    "a fifo, whose opening could wait": fifo,
    "memory that can shrink": lambda tmp_path: memfd(4096),
    "memory that is too small": lambda tmp_path: memfd(100, seals=fcntl.F_SEAL_SHRINK),
    "memory with another beginning": lambda tmp_path: memfd(4096, seals=fcntl.F_SEAL_SHRINK),
}


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_what_is_no_segment_is_neither_mapped_nor_read(kind: str, tmp_path: Path) -> None:
    fd = HOSTILE[kind](tmp_path)
    num_open = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(OSError, match=r"shared memory|larger|filled again"):
            Segment.hold(os.getpid(), fd, "ab" * 16, 4096)
        assert len(os.listdir("/proc/self/fd")) == num_open
    finally:
        os.close(fd)
