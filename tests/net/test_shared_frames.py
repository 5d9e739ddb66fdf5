"""Messages in shared memory: as they were when unfolded; who cannot open it gets frames."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from rlzmq.net.shared_memory import MIN_SHARED_BYTES, SegmentPool, SharedFrames
from rlzmq.wire.codec import FOLDED, Buffer, WireError, encode_opaque
from rlzmq.wire.messages import decode_message

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
