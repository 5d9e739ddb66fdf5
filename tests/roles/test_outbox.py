"""What the broker keeps for peers from outside: bounded, whether they read it or not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from rlzmq.core.errors import PeerLostError
from rlzmq.net.socket import SendTicket
from rlzmq.roles import listeners as module
from rlzmq.roles.listeners import Outbox

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


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_the_counts_are_right(wire: _Wire, seed: int) -> None:
    draw = random.Random(seed)
    peers = [b"a", b"b", b"c"]
    for _ in range(2000):
        peer = draw.choice(peers)
        what = draw.random()
        if what < 0.6:
            wire.outbox.send(peer, [draw.choice([SMALL, SMALL, SMALL, LARGE, OTHER_LARGE])])
        elif what < 0.9:
            wire.read(peer, draw.randrange(1, 60))
        else:
            wire.outbox.flush()
        for name in peers:
            assert sum(len(f) >= 65_536 for f, _ in wire.unread.get(name, [])) <= 1
    for _ in range(4):
        for peer in peers:
            wire.read(peer)
        wire.outbox.flush()
    assert (wire.outbox.num_bytes, wire.outbox._peers) == (0, {})
