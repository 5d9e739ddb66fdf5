"""Sockets that pack: fewer frames on the way, the same messages in the same order at its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from inbox import CHUNKS, Inbox

from rlzmq.core.addresses import SocketDirectory
from rlzmq.net.context import Context
from rlzmq.net.socket import DrainSocket, pack_frames, sizes_of


@pytest.fixture
def address(directory: SocketDirectory) -> str:
    return directory.address("r")


def packed(*messages: list[bytes]) -> list[Any]:
    return pack_frames([(frames, sizes_of(frames)) for frames in messages])


def pair(
    context: Context, address: str, on_router: Any, on_dealer: Any, **options: Any
) -> tuple[DrainSocket, DrainSocket]:
    router = DrainSocket(context, "ROUTER", on_router, options=CHUNKS, packs=True, **options)
    router.bind(address)
    dealer = DrainSocket(context, "DEALER", on_dealer, options=CHUNKS, packs=True, routing_id=b"d")
    dealer.connect(address)
    return router, dealer


@pytest.fixture
def num_zmq_messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Frames of each message received by a socket, as zmq delivers them."""
    received: list[int] = []
    split = DrainSocket._split
    monkeypatch.setattr(
        DrainSocket, "_split", lambda self, frames: received.append(len(frames)) or split(self, frames)
    )
    return received


async def test_answers_to_messages_that_came_together_leave_together(
    context: Context, address: str, num_zmq_messages: list[int]
) -> None:
    def answer(frames: list[Any]) -> None:
        for number in range(200):
            assert router.send([frames[0], frames[1], b"%d" % number])

    inbox = Inbox()
    router, dealer = pair(context, address, answer, inbox)
    dealer.send([b"a"])
    assert await inbox.take(200) == [[b"a", b"%d" % number] for number in range(200)]
    assert num_zmq_messages == [2, 1, 1, 1, 1, 1]  # 1, 64, 64, 64 and 7 answers
    assert router.num_queued_messages == router.num_queued_bytes == 0


async def test_each_peer_gets_its_own_in_order(context: Context, address: str) -> None:
    inboxes = [Inbox() for _ in range(3)]
    num_known = 0
    all_known = asyncio.Event()

    def answer(frames: list[Any]) -> None:
        nonlocal num_known
        num_known += 1
        if num_known == 3:
            for number in range(150):
                for peer in (b"0", b"1", b"2"):
                    assert router.send(
                        [peer, b"to " + peer, b"%d" % number, bytes(9000 * (number % 40 == 39))]
                    )
            all_known.set()

    router = DrainSocket(context, "ROUTER", answer, options=CHUNKS, packs=True)
    router.bind(address)
    for index, inbox in enumerate(inboxes):
        dealer = DrainSocket(context, "DEALER", inbox, options=CHUNKS, packs=True, routing_id=b"%d" % index)
        dealer.connect(address)
        dealer.send([b"hello"])
    for index, inbox in enumerate(inboxes):
        messages = await inbox.take(150)
        assert [frames[:2] for frames in messages] == [
            [b"to %d" % index, b"%d" % number] for number in range(150)
        ]
        assert [len(frames[2]) for frames in messages[38:41]] == [0, 9000, 0]


async def test_messages_that_came_together_are_handled_in_bounded_turns(
    context: Context, address: str
) -> None:
    handled = 0
    done = asyncio.Event()

    def on_message(frames: list[Any]) -> None:
        nonlocal handled
        handled += 1
        if handled == 64:
            done.set()

    _, dealer = pair(context, address, on_message, None, max_per_tick=4)
    dealer._try_send(packed(*[[b"x"]] * 64), None)
    most = last = 0
    while not done.is_set():
        await asyncio.sleep(0)
        most, last = max(most, handled - last), handled
    assert most <= 8
