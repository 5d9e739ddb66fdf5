"""Messages from a runner through a broker to a learner, which acknowledges them: rlzmq's sockets against zmq's own.

Three processes; the broker forwards payload frames untouched. 64 messages may be under way, and every 16th is
acknowledged with all before it. "rlzmq": the event loop and sockets of a run; "plain": blocking sockets and loops that
do nothing else; "asyncio": zmq.asyncio. "small": seven frames of 2.3 kB in all, as 50 steps of CartPole; "large": of
1.4 MB; both over ipc. "keys": small messages over TCP with CURVE. This is the way of the bytes alone: no ledger, no
decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from scripts.bench._core import Comparison, Side, Turn

WINDOW, ACKNOWLEDGED_EVERY = 64, 16
SIZES = {"small": 2_300, "large": 1_400_000}
NUM_FRAMES = 6  # besides the header

Handler = Callable[[list[Any]], None]


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for title, size, has_keys, goal in (
        ("small", "small", False, ""),
        ("large", "large", False, ""),
        ("small, keys", "small", True, "≥ 0.6"),
    ):
        sides = {
            kind: Side(runner, {"kind": kind, "size": size, "has_keys": has_keys})
            for kind in ("rlzmq", "plain", "asyncio")
        }
        yield Comparison(title, sides, unit="messages/s", goal=goal, turns=9, turn_s=1.0)


def runner(kind: str, size: str, has_keys: bool) -> Turn:
    """Start broker and learner; a turn sends, and counts messages until all are acknowledged."""
    keys = make_keys() if has_keys else None
    address = "tcp://127.0.0.1:*" if has_keys else f"ipc://{os.getcwd()}/broker"
    if kind == "rlzmq":
        address = address.replace("*", "0")
    address = started("broker", kind, keys, address)
    started("learner", kind, keys, address)
    frames = [b"learner", *(bytes(SIZES[size] // NUM_FRAMES) for _ in range(NUM_FRAMES))]
    num_sent = num_acknowledged = 0
    end = 0.0

    def send() -> None:
        nonlocal num_sent
        while num_sent - num_acknowledged < WINDOW and (
            time.perf_counter() < end or num_sent % ACKNOWLEDGED_EVERY
        ):
            socket.send(frames)
            num_sent += 1

    def on_message(received: list[Any]) -> None:
        nonlocal num_acknowledged
        num_acknowledged = int(bytes(received[1]))
        send()

    socket = socket_of(kind, "runner", keys, address, on_message)

    def turn(seconds: float) -> float:
        nonlocal end
        first, start = num_sent, time.perf_counter()
        end = start + seconds
        send()
        socket.run_until(lambda: num_sent == num_acknowledged and time.perf_counter() >= end)
        return (num_sent - first) / (time.perf_counter() - start)

    return turn


def make_keys() -> dict[str, list[str]]:
    from rlzmq.net.keys import KeyPair

    pairs = {name: KeyPair.generate() for name in ("broker", "runner", "learner")}
    return {name: [pair.public, pair.secret] for name, pair in pairs.items()}


def started(role: str, kind: str, keys: Any, address: str) -> str:
    """Start a process that runs a function of this module until this one ends; return the address it prints."""
    code = f"import json, sys; from {__name__} import {role}\n{role}(*json.loads(sys.argv[1]))"
    command = [sys.executable, "-c", code, json.dumps([kind, keys, address])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().strip()


# -- the processes -----------------------------------------------------------------------------------------


def broker(kind: str, keys: Any, address: str) -> None:
    """Pass each message to the peer that it names, with the sender's name in place of that."""
    socket = socket_of(
        kind, "broker", keys, address, lambda frames: socket.send([frames[1], frames[0], *frames[2:]])
    )
    print(socket.address, flush=True)
    socket.run_until(lambda: False)


def learner(kind: str, keys: Any, address: str) -> None:
    """Acknowledge all messages at every 16th."""
    num_received = 0

    def on_message(frames: list[Any]) -> None:
        nonlocal num_received
        num_received += 1
        if num_received % ACKNOWLEDGED_EVERY == 0:
            socket.send([frames[0], b"%d" % num_received])

    socket = socket_of(kind, "learner", keys, address, on_message)
    print(address, flush=True)
    socket.run_until(lambda: False)


class Loop:
    """One socket in the event loop of a run."""

    def __init__(self, kind: str, name: str, keys: Any, address: str, handler: Handler) -> None:
        import uvloop

        self._is_done: Callable[[], bool] = lambda: False
        self._handler = handler
        self._kind, self._keys = kind, keys
        self._loop = uvloop.new_event_loop()
        self._ended = self._loop.create_future()
        self.address: str = self._loop.run_until_complete(self._open(name, address))

    async def _open(self, name: str, address: str) -> str:
        from rlzmq.net.authenticator import Authenticator
        from rlzmq.net.context import Context
        from rlzmq.net.keys import CurveClient, CurveServer, KeyPair
        from rlzmq.net.options import CHUNKS
        from rlzmq.net.socket import DrainSocket

        context = Context()
        pairs = {key: KeyPair(*pair) for key, pair in (self._keys or {}).items()}
        curve: Any = None
        if pairs and name == "broker":
            self._guard = Authenticator(context, {pair.public: key for key, pair in pairs.items()})
            curve = CurveServer(pairs["broker"])
        elif pairs:
            curve = CurveClient(pairs["broker"].public, pairs[name])
        is_broker = name == "broker"
        self._socket = DrainSocket(
            context,
            "ROUTER" if is_broker else "DEALER",
            self._on_message,
            options=CHUNKS,
            routing_id=None if is_broker else name.encode(),
            curve=curve,
        )
        if is_broker:
            return self._socket.bind(address)
        self._socket.connect(address)
        return address

    def send(self, frames: list[Any]) -> None:
        if not self._socket.send(frames):
            raise SystemExit("the socket's queue is full")

    def _on_message(self, frames: list[Any]) -> None:
        self._handler(frames)
        if self._is_done() and not self._ended.done():
            self._ended.set_result(None)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Handle messages until a condition holds after one."""
        self._is_done, self._ended = is_done, self._loop.create_future()
        self._loop.run_until_complete(self._ended)


class Plain:
    """One blocking socket, or one of zmq.asyncio, with zmq's own options."""

    def __init__(self, kind: str, name: str, keys: Any, address: str, handler: Handler) -> None:
        import zmq
        import zmq.asyncio

        self._handler = handler
        self._loop = asyncio.new_event_loop() if kind == "asyncio" else None
        asyncio.set_event_loop(self._loop)
        context: Any = zmq.asyncio.Context() if self._loop else zmq.Context()
        is_broker = name == "broker"
        self._socket = context.socket(zmq.ROUTER if is_broker else zmq.DEALER)
        self._socket.set_hwm(0)
        if keys:
            self._socket.curve_publickey, self._socket.curve_secretkey = (
                part.encode() for part in keys[name]
            )
            if is_broker:
                self._socket.curve_server = True
            else:
                self._socket.curve_serverkey = keys["broker"][0].encode()
        if is_broker:
            self._socket.bind(address)
        else:
            self._socket.routing_id = name.encode()
            self._socket.connect(address)
        self.address: str = self._socket.last_endpoint.decode()

    def send(self, frames: list[Any]) -> None:
        self._socket.send_multipart(frames, copy=len(frames[-1]) < 1 << 14)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Handle messages until a condition holds after one."""
        if self._loop is not None:
            self._loop.run_until_complete(self._run_until(is_done))
            return
        while not is_done():
            self._handler(_buffers(self._socket.recv_multipart(copy=False)))

    async def _run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._handler(_buffers(await self._socket.recv_multipart(copy=False)))


def _buffers(frames: list[Any]) -> list[Any]:
    """Return small frames as bytes, large ones uncopied."""
    return [frame if len(frame) >= 1 << 14 else frame.bytes for frame in frames]


def socket_of(kind: str, name: str, keys: Any, address: str, handler: Handler) -> Loop | Plain:
    return (Loop if kind == "rlzmq" else Plain)(kind, name, keys, address, handler)
