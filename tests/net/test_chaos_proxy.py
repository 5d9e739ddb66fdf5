"""The proxy that other tests rely on does what it says, and says that it did."""

from __future__ import annotations

import asyncio
from typing import Any

from chaos_proxy import ChaosProxy

from rlzmq.core.addresses import SocketDirectory
from rlzmq.net.context import Context
from rlzmq.net.socket import DrainSocket

DEADLINE_S = 20


async def received_through(
    context: Context, seed: int, num: int = 200, **faults: float
) -> tuple[list[int], Any]:
    """What a PULL gets of ``num`` messages through a proxy with faults, and what the proxy counted."""
    received: list[int] = []
    end = asyncio.Event()

    def on_message(frames: list[Any]) -> None:
        assert frames[0] == b"header"
        number = int(frames[1])
        if number < 0:
            end.set()
        else:
            received.append(number)

    with SocketDirectory() as directory:
        pull = DrainSocket(context, "PULL", on_message)
        server = pull.bind(directory.address("server"))
        async with ChaosProxy(server, listen=directory.address("proxy"), seed=seed) as proxy:
            for name, value in faults.items():
                setattr(proxy.to_server, name, value)
            push = DrainSocket(context, "PUSH", None)
            push.connect(proxy.address)
            for number in range(num):
                push.send([b"header", b"%d" % number])
            while not end.is_set():  # the end mark itself may be dropped: say it until it is heard
                push.send([b"header", b"-1"])
                await asyncio.sleep(0.01)
            push.close(linger_ms=0)
        pull.close()
    return received, proxy.fired


async def test_without_faults_it_changes_nothing(context: Context) -> None:
    received, fired = await received_through(context, 0)
    assert received == list(range(200))
    assert not {name for name, num in fired.items() if num and name != "cut"}


async def test_drops_are_counted(context: Context) -> None:
    received, fired = await received_through(context, 1, drop=0.2)
    assert 200 > len(received) >= 200 - fired["drop"]
    assert received == sorted(received)


async def test_duplicates_are_counted(context: Context) -> None:
    received, fired = await received_through(context, 2, duplicate=0.2)
    assert set(received) == set(range(200))
    assert 200 < len(received) <= 200 + fired["duplicate"]


async def test_reordering_loses_nothing(context: Context) -> None:
    received, fired = await received_through(context, 3, reorder=0.2)
    assert fired["reorder"] > 0
    assert received != sorted(received)
    assert sorted(received) == list(range(200))


async def test_a_cut_and_a_half_close_end_connections_and_peers_come_back(context: Context) -> None:
    events: asyncio.Queue[str] = asyncio.Queue()
    with SocketDirectory() as directory:
        pull = DrainSocket(context, "PULL", lambda frames: None)
        server = pull.bind(directory.address("server"))
        async with ChaosProxy(server, listen=directory.address("proxy")) as proxy:
            push = DrainSocket(context, "PUSH", None, on_event=lambda event: events.put_nowait(event.kind))
            push.connect(proxy.address)
            for fault in (proxy.cut, proxy.half_close):
                assert await asyncio.wait_for(events.get(), DEADLINE_S) == "connected"
                fault()
                assert await asyncio.wait_for(events.get(), DEADLINE_S) == "disconnected"
                while (kind := await asyncio.wait_for(events.get(), DEADLINE_S)) == "retrying":
                    pass
                events.put_nowait(kind)
            assert proxy.fired == {"cut": 1, "half_close": 1}
            push.close(linger_ms=0)


async def test_delays_delay(context: Context) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    received, fired = await received_through(context, 0, num=5, delay_s=0.1)
    assert received == list(range(5))
    assert loop.time() - start >= 0.1
    assert fired["delay"]
