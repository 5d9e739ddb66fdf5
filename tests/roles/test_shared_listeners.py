"""The broker's doors: shared memory for local peers alone, and a bounded outbox for those from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from rlzmq.core.addresses import SocketDirectory
from rlzmq.core.errors import PeerLostError
from rlzmq.driver.join_files import JoinKeys, listen_addresses
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.keys import CurveClient
from rlzmq.net.shared_memory import MIN_SHARED_BYTES, Segment, SegmentPool, SharedFrames
from rlzmq.net.socket import DrainSocket, SendTicket
from rlzmq.roles import listeners as module
from rlzmq.roles.listeners import BrokerListeners, Outbox
from rlzmq.wire.codec import (
    FOLDED,
    SchemaError,
)
from rlzmq.wire.messages import decode_message

OPTIONS = SocketOptions(max_message_bytes=1 << 26, linger_ms=500)
HEADER = b"\2\7shard"


class Door:
    """A broker's listeners; `received` has (peer, frames)."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[bytes, Any]] = asyncio.Queue()
        self.keys = JoinKeys.generate()
        self.listeners = BrokerListeners(
            lambda peer, role, frames: self.received.put_nowait((peer, frames)), lambda: None
        )
        self._directory = SocketDirectory()
        self.addresses = self.listeners.open(
            {name: self._directory.address(name) for name in ("data", "weights")},
            listen_addresses("tcp://127.0.0.1:0"),
            self.keys.curve,
            self.keys.roles,
        )
        self.context = Context()

    def connect(self, role: str, *, from_outside: bool = False) -> tuple[DrainSocket, asyncio.Queue[Any]]:
        """Return a peer's socket and what it receives."""
        received: asyncio.Queue[Any] = asyncio.Queue()
        curve = CurveClient(self.keys.server.public, self.keys.clients[role]) if from_outside else None
        socket = DrainSocket(
            self.context,
            "DEALER",
            received.put_nowait,
            options=OPTIONS,
            curve=curve,
            routing_id=role.encode(),
            packs=True,
        )
        socket.connect(self.addresses["remote_data" if from_outside else "data"])
        return socket, received

    async def get(self) -> tuple[bytes, Any]:
        return await asyncio.wait_for(self.received.get(), 20)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door()
    yield door
    door.context.close()
    door.listeners.close()
    await door.listeners.wait_closed()
    door._directory.close()


def large() -> list[Any]:
    return SegmentPool().put([np.arange(MIN_SHARED_BYTES, dtype=np.uint8)])


def nothing(*args: Any) -> None:
    raise AssertionError(args)


async def test_a_local_peer_gets_the_place_and_a_peer_from_outside_the_frames(door: Door) -> None:
    local, from_broker = door.connect("learner")
    outside, from_afar = door.connect("learner", from_outside=True)
    for socket in (local, outside):
        socket.send([b"hello"])
    peers = {(await door.get())[0] for _ in range(2)}
    (column,) = large()
    for peer in peers:
        door.listeners.send(peer, [HEADER, column])
    folded = await asyncio.wait_for(from_broker.get(), 20)
    assert folded[0][1] == FOLDED
    assert sum(map(len, folded)) < 500
    unfolded = SharedFrames(nothing, nothing).unfold(b"", folded)
    assert unfolded is not None
    whole = await asyncio.wait_for(from_afar.get(), 20)
    assert bytes(whole[0]) == HEADER
    assert bytes(whole[1]) == bytes(unfolded[1]) == column.tobytes()


async def test_a_place_from_outside_is_refused_unopened(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, answers = door.connect("runner", from_outside=True)
    column = large()
    folded = SharedFrames(nothing, nothing).fold(b"", [HEADER, *column])
    assert folded[0][1] == FOLDED
    monkeypatch.setattr(Segment, "hold", nothing)
    outside.send(folded)
    _, frames = await door.get()
    with pytest.raises(SchemaError):
        decode_message(frames)
    outside.send([b"more"])
    await door.get()
    assert answers.empty()


SMALL, LARGE = b"\x01\x05" + bytes(100), b"\x01\x06" + bytes(100_000)
OTHER_LARGE = b"\x01\x07" + bytes(100_000)


class _Ticket:
    def __init__(self) -> None:
        self.done = False


class _Wire:
    """Peers that read what is sent to them when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "SendTicket", _Ticket)
        self.unread: dict[bytes, list[tuple[bytes, _Ticket | None]]] = {}
        self.gone: set[bytes] = set()
        self.outbox = Outbox(self.take)

    def take(self, peer: bytes, frames: Sequence[Any], ticket: SendTicket | None) -> None:
        if peer in self.gone:
            raise PeerLostError("gone")
        self.unread.setdefault(peer, []).append((frames[0], ticket))  # type: ignore[arg-type]

    def read(self, peer: bytes, num: int | None = None) -> None:
        messages = self.unread.get(peer, [])
        for _, ticket in messages[:num]:
            if ticket is not None:
                ticket.done = True
        del messages[:num]

    def num_bytes(self, peer: bytes) -> int:
        return sum(len(frame) for frame, _ in self.unread.get(peer, []))


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> _Wire:
    return _Wire(monkeypatch)


def test_small_messages_that_nobody_reads_are_bounded(wire: _Wire) -> None:
    results = [wire.outbox.send(b"a", [SMALL]) for _ in range(5000)]
    assert sum(results) <= 1024 + 32
    assert not results[-1]
    assert wire.outbox.send(b"b", [SMALL]), "another peer has a budget of its own"
    wire.read(b"a")
    assert wire.outbox.send(b"a", [SMALL]), "it has read: all is well"


def test_large_messages_leave_one_at_a_time_and_the_newest_of_a_kind_waits(wire: _Wire) -> None:
    for number in range(100):
        assert wire.outbox.send(b"a", [LARGE + bytes([number])])
        assert wire.outbox.send(b"a", [OTHER_LARGE])
    assert len(wire.unread[b"a"]) == 1
    assert wire.outbox.send(b"a", [SMALL]), "what is small does not wait for it"
    wire.outbox.flush()
    assert len(wire.unread[b"a"]) == 2
    kinds = []
    for _ in range(2):
        wire.read(b"a")
        wire.outbox.flush()
        ((frame, _),) = wire.unread[b"a"]
        kinds.append(frame[1])
        assert frame[1] == 7 or frame[-1] == 99, "the newest"
    assert sorted(kinds) == [6, 7]
    wire.read(b"a")
    wire.outbox.flush()
    assert wire.unread[b"a"] == []
    assert wire.outbox.num_bytes == 0
