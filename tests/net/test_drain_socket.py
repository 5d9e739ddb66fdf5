"""DrainSocket: nothing stalls, bounds hold, ends are noticed; on uvloop and on asyncio's own loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from chaos_proxy import ChaosProxy

from rlzmq.core.addresses import SocketDirectory
from rlzmq.net.context import CONTROL, Context, SocketOptions
from rlzmq.net.events import SocketEvent
from rlzmq.net.keys import Authenticator, CurveClient, CurveServer, KeyPair
from rlzmq.net.socket import DrainSocket, SendTicket, pack_frames, sizes_of
from tests.net.conftest import CHUNKS, DEADLINE_S, Inbox


@contextlib.asynccontextmanager
async def until_event(kind: str, num: int = 1) -> AsyncIterator[Callable[[SocketEvent], None]]:
    """Waits at its end until ``num`` events of a kind have come."""
    seen = asyncio.Semaphore(0)

    def on_event(event: SocketEvent) -> None:
        if event.kind == kind:
            seen.release()

    yield on_event
    for _ in range(num):
        await asyncio.wait_for(seen.acquire(), DEADLINE_S)


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("high_water_mark", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_twenty_thousand_messages_both_ways_never_stall(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], high_water_mark: int
) -> None:
    async def run() -> None:
        num = 20_000
        options = SocketOptions(
            send_high_water_mark=high_water_mark,
            receive_high_water_mark=high_water_mark,
            max_queued_messages=100,
        )
        done = asyncio.Event()
        answers: list[int] = []
        num_sent = 0

        def answer(frames: list[Any]) -> None:
            assert router.send([frames[0], b"answer", frames[1]])

        def collect(frames: list[Any]) -> None:
            answers.append(int(frames[1]))
            if len(answers) == num:
                done.set()
            pump()  # an answer shows that there is room again

        def pump() -> None:
            nonlocal num_sent
            while num_sent < num and dealer.send([b"%d" % num_sent]):
                num_sent += 1

        with Context() as context, SocketDirectory() as directory:
            router = DrainSocket(context, "ROUTER", answer, options=options)
            dealer = DrainSocket(context, "DEALER", collect, options=options, routing_id=b"d")
            dealer.connect(router.bind(directory.address("r")))
            pump()
            await asyncio.wait_for(done.wait(), DEADLINE_S)
            assert answers == list(range(num))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


@pytest.mark.parametrize("num_together", [1, 64])
async def test_a_busy_socket_leaves_turns_to_others(
    num_together: int, context: Context, directory: SocketDirectory
) -> None:
    """Messages that come one by one, or packed into one of zmq's."""
    num, done = 0, asyncio.Event()

    def on_message(frames: list[Any]) -> None:
        nonlocal num
        num += 1
        if num == 192:
            done.set()

    router = DrainSocket(context, "ROUTER", on_message, packs=True, max_per_tick=8)
    dealer = DrainSocket(context, "DEALER", None, options=replace(CONTROL, send_high_water_mark=0))
    dealer.connect(router.bind(directory.address("r")))
    for _ in range(192 // num_together):
        messages = [([b"x"], sizes_of([b"x"]))] * num_together
        dealer.send(pack_frames(messages) if num_together > 1 else [b"x"])
    most = last = 0
    while not done.is_set():
        await asyncio.sleep(0)
        most, last = max(most, num - last), num
    # One wake-up by the descriptor and one by call_soon may fall into the same turn.
    assert most <= 16


async def test_a_full_queue_refuses_until_it_was_sent(context: Context, directory: SocketDirectory) -> None:
    inbox = Inbox()
    options = replace(CONTROL, send_high_water_mark=1, max_queued_messages=5, linger_ms=100)
    dealer = DrainSocket(context, "DEALER", None, options=options)
    dealer.connect(directory.address("later"))
    taken = [dealer.send([b"%d" % number]) for number in range(20)]
    num = sum(taken)
    assert taken == [True] * num + [False] * (20 - num)
    assert dealer.num_queued_messages == 5 <= num < 20
    router = DrainSocket(context, "ROUTER", inbox)
    router.bind(directory.address("later"))
    assert [(await inbox.get())[1] for _ in range(num)] == [b"%d" % number for number in range(num)]
    assert dealer.num_queued_messages == 0
    assert dealer.send([b"5"])


async def test_a_ticket_tells_when_buffers_are_free(context: Context, directory: SocketDirectory) -> None:
    inbox = Inbox()
    push = DrainSocket(context, "PUSH", None, options=CHUNKS)
    push.connect(directory.address("t"))
    ticket = SendTicket()
    push.send([b"header", bytearray(1_000_000)], ticket)
    assert not ticket.done  # nobody listens yet
    pull = DrainSocket(context, "PULL", inbox, options=CHUNKS)
    pull.bind(directory.address("t"))
    assert len((await inbox.get())[1]) == 1_000_000

    async def poll() -> None:
        # libzmq frees it on its own thread, without an event
        while not ticket.done:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), DEADLINE_S)


async def test_an_oversize_peer_is_cut_off_and_others_are_served(
    context: Context, directory: SocketDirectory
) -> None:
    inbox = Inbox()
    async with until_event("disconnected") as on_event:
        router = DrainSocket(context, "ROUTER", inbox, on_event=on_event)
        address = router.bind(directory.address("r"))
        good = DrainSocket(context, "DEALER", None, routing_id=b"good")
        good.connect(address)
        greedy = DrainSocket(context, "DEALER", None, routing_id=b"greedy", options=CHUNKS)
        greedy.connect(address)
        greedy.send([bytes(2 * CONTROL.max_message_bytes)])
    greedy.close(linger_ms=0)
    good.send([b"still here"])
    assert await inbox.get() == [b"good", b"still here"]


async def test_who_is_silent_over_tcp_is_cut_off_and_comes_back(context: Context) -> None:
    """Its pings are answered; then nothing passes, for longer than nothing ever came."""
    keys = KeyPair.generate(), KeyPair.generate()
    come, gone = asyncio.Event(), asyncio.Event()

    def on_event(event: SocketEvent) -> None:
        {"connected": come, "disconnected": gone}.get(event.kind, asyncio.Event()).set()

    authenticator = Authenticator(context, {keys[1].public: "runner"})
    router = DrainSocket(context, "ROUTER", lambda frames: None, curve=CurveServer(keys[0]))
    async with ChaosProxy(router.bind("tcp://127.0.0.1:0")) as proxy:
        curve = CurveClient(keys[0].public, keys[1])
        dealer = DrainSocket(context, "DEALER", None, curve=curve, on_event=on_event)
        dealer.connect(proxy.address)
        await asyncio.wait_for(come.wait(), DEADLINE_S)
        await asyncio.sleep(1.5)
        assert not gone.is_set(), "pings pass"
        proxy.to_server.black_hole = proxy.to_client.black_hole = True
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
        come.clear()
        proxy.to_server.black_hole = proxy.to_client.black_hole = False
        await asyncio.wait_for(come.wait(), DEADLINE_S)
        dealer.close(0)
    router.close(0)
    authenticator.close()


async def test_each_peer_gets_its_own_in_order(context: Context, directory: SocketDirectory) -> None:
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
    address = router.bind(directory.address("r"))
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
