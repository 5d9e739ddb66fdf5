"""Segments: who holds one, what is never changed or mapped, what remains; messages in them."""

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

from rlzmq.net.shared_memory import MIN_SHARED_BYTES, Segment, SegmentPool, SharedFrames
from rlzmq.wire.codec import FOLDED, Buffer, WireError, encode_opaque
from rlzmq.wire.messages import decode_message

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


HEADER = b"\2\7header"


class Side:
    """One end of a connection; what it answers is in `answers`, why it sends frames in `reasons`."""

    def __init__(self) -> None:
        self.answers: list[list[Buffer]] = []
        self.reasons: list[str] = []
        self.shared = SharedFrames(
            lambda peer, frames: self.answers.append(frames), lambda peer, reason: self.reasons.append(reason)
        )

    def sends(self, frames: list[Buffer]) -> list[Buffer]:
        return [bytes(memoryview(frame).cast("B")) for frame in self.shared.fold(b"", frames)]


def message(*, inline: bytes = b"meta", num_bytes: int = MIN_SHARED_BYTES) -> list[Buffer]:
    columns = [
        np.arange(num_bytes, dtype=np.uint8),
        np.arange(20, dtype=np.float32).reshape(4, 5),
        np.array(["a", "word"]),
        np.array(True),
    ]
    return [HEADER, *SegmentPool().put(columns), inline]


def contents(frames: Any) -> list[bytes]:
    return [bytes(memoryview(frame).cast("B")) for frame in frames]


def test_a_received_message_is_sent_on_without_a_copy() -> None:
    broker = Side()
    frames = message(num_bytes=2 * MIN_SHARED_BYTES)
    received = broker.shared.unfold(b"", Side().sends(frames))
    assert received is not None
    shard = [b"\2\10shard", *received]
    # as the broker cuts a part of a fragment: views of its columns
    column = np.frombuffer(received[1], np.uint8)
    part = [b"\2\10shard", HEADER, column[64 : 64 + MIN_SHARED_BYTES], received[5]]
    for sent in (shard, part):
        wire = broker.sends(sent)
        assert sum(map(len, wire)) < 500
        last = Side().shared.unfold(b"", wire)
        assert last is not None
        assert contents(last) == contents(sent)


def test_who_cannot_open_it_says_so_and_gets_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = Side(), Side()
    frames = message()
    wire = sender.sends(frames)
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "open", lambda *args: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
        assert receiver.shared.unfold(b"", wire) is None
    (answer,) = receiver.answers
    assert sender.shared.unfold(b"", contents(answer)) is None
    assert sender.shared.unfold(b"", contents(answer)) is None
    assert sender.reasons == ["PermissionError: Permission denied"]
    assert sender.shared.fold(b"", frames) is frames
    assert sender.shared.fold(b"another peer", frames) is not frames


FIELDS: dict[str, Any] = {
    "pid": 1, "fd": 0, "nonce": "00" * 16, "num_bytes": 4096, "offsets": [64, -1], "lengths": [10, 0],
}  # fmt: skip
MALFORMED = [
    {name: value for name, value in FIELDS.items() if name != "nonce"},
    {**FIELDS, "more": 1},
    {**FIELDS, "pid": "../1"},
    {**FIELDS, "fd": -1},
    {**FIELDS, "offsets": [64]},
    {**FIELDS, "offsets": [-2, -1]},
    {**FIELDS, "offsets": [4090, -1]},
    {**FIELDS, "lengths": [-1, 0]},
    {**FIELDS, "lengths": [4097, 0]},
    {**FIELDS, "offsets": [2**40] * 2000, "lengths": [1] * 2000},
]


@pytest.mark.parametrize("header", MALFORMED)
def test_malformed_ones_are_left_to_the_codec_which_refuses_them(header: dict[str, Any]) -> None:
    side = Side()
    frames = encode_opaque(FOLDED, header, [HEADER, b"meta"])
    assert side.shared.unfold(b"", frames) is frames
    assert side.answers == []
    with pytest.raises(WireError):
        decode_message(frames)


def test_a_folded_message_within_a_folded_one_is_refused() -> None:
    sender, receiver = Side(), Side()
    frames = message()
    inner = sender.shared.fold(b"", frames)
    outer = sender.sends([inner[0], *frames[1:]])
    received = receiver.shared.unfold(b"", outer)
    assert received is not None
    with pytest.raises(WireError):
        decode_message(received)
