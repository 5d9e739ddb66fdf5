"""Messages from a runner through a broker to a learner, which acknowledges them: rlzmq's sockets against zmq's own.

Three processes; the broker forwards payload frames untouched. 64 messages may be under way, and every 16th is
acknowledged with all before it. "rlzmq": the event loop and sockets of a run; "memory": the same, and columns are put
in shared memory, as a run does with large ones on one host; "plain": blocking sockets and loops that do nothing else;
"asyncio": zmq.asyncio. "small": seven frames of 2.3 kB in all, as 50 steps of CartPole; "large": of 1.4 MB, which the
learner reads; both over ipc. "keys": small messages over TCP with CURVE. This is the way of the bytes alone: no ledger,
no decoding.
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
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scripts.bench._core import Comparison, Side, Turn

WINDOW, ACKNOWLEDGED_EVERY = 64, 16
NUM_COLUMNS = 6
READ_BYTES = 16 << 10  # columns that are so large are read by the learner

Handler = Callable[[list[Any]], None]


def add_options(group: Any) -> None:
    group.add_argument("--num-bytes", type=int, help="size of the messages (default: the comparison's)")


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for title, num_bytes, has_keys, goal in (
        ("small", 2_300, False, ""),
        ("large", 1_400_000, False, ""),
        ("small, keys", 2_300, True, "≥ 0.6"),
    ):
        kinds = ["memory", "rlzmq", "plain", "asyncio"] if title == "large" else ["rlzmq", "plain", "asyncio"]
        settings = {"num_bytes": options.num_bytes or num_bytes, "has_keys": has_keys}
        sides = {kind: Side(runner, {"kind": kind, **settings}) for kind in kinds}
        yield Comparison(title, sides, unit="messages/s", goal=goal, turns=9, turn_s=1.0)


def runner(kind: str, num_bytes: int, has_keys: bool) -> Turn:
    """Start broker and learner; a turn sends, and counts messages until all are acknowledged."""
    keys = make_keys() if has_keys else None
    address = "tcp://127.0.0.1:*" if has_keys else f"ipc://{os.getcwd()}/broker"
    if kind in ("rlzmq", "memory"):
        address = address.replace("*", "0")
    address = started("broker", kind, keys, address)
    started("learner", kind, keys, address)
    columns = [np.zeros(num_bytes // NUM_COLUMNS, np.uint8) for _ in range(NUM_COLUMNS)]
    num_sent = num_acknowledged = 0
    end = 0.0

    def send() -> None:
        nonlocal num_sent
        while num_sent - num_acknowledged < WINDOW and (
            time.perf_counter() < end or num_sent % ACKNOWLEDGED_EVERY
        ):
            socket.send([b"learner", *columns])
            num_sent += 1

    def on_message(received: list[Any]) -> None:
        nonlocal num_acknowledged
        num_acknowledged = int(bytes(received[1]))
        socket.release(num_acknowledged)
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

    def on_message(frames: list[Any]) -> None:
        sender, peer, *rest = frames
        if peer == b"runner":
            socket.release(int(bytes(rest[0])))
        socket.send([peer, sender, *rest])

    socket = socket_of(kind, "broker", keys, address, on_message)
    print(socket.address, flush=True)
    socket.run_until(lambda: False)


def learner(kind: str, keys: Any, address: str) -> None:
    """Acknowledge all messages at every 16th."""
    num_received = 0

    def on_message(frames: list[Any]) -> None:
        nonlocal num_received
        num_received += 1
        for column in frames[1:]:
            if len(column) >= READ_BYTES:
                np.frombuffer(column, np.uint8)[::64].sum()
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
        self._keys = keys
        self._has_memory, self._is_broker = kind == "memory", name == "broker"
        self._kept: deque[list[Any]] = deque()  # what the learner has not acknowledged
        self._num_released = 0
        self._loop = uvloop.new_event_loop()
        self._ended = self._loop.create_future()
        self.address: str = self._loop.run_until_complete(self._open(name, address))

    async def _open(self, name: str, address: str) -> str:
        from rlzmq.net.context import Context, SocketOptions
        from rlzmq.net.keys import Authenticator, CurveClient, CurveServer, KeyPair
        from rlzmq.net.shared_memory import SegmentPool, SharedFrames
        from rlzmq.net.socket import DrainSocket

        context = Context()
        pairs = {key: KeyPair(*pair) for key, pair in (self._keys or {}).items()}
        curve: Any = None
        if pairs and name == "broker":
            self._guard = Authenticator(context, {pair.public: key for key, pair in pairs.items()})
            curve = CurveServer(pairs["broker"])
        elif pairs:
            curve = CurveClient(pairs["broker"].public, pairs[name])
        self._segments = SegmentPool()
        self._shared = SharedFrames(self._end, self._end)
        self._socket = DrainSocket(
            context,
            "ROUTER" if self._is_broker else "DEALER",
            self._on_message,
            options=SocketOptions(max_message_bytes=64 << 20, max_queued_bytes=256 << 20),
            routing_id=None if self._is_broker else name.encode(),
            curve=curve,
            packs=True,
        )
        if self._is_broker:
            return self._socket.bind(address)
        self._socket.connect(address)
        return address

    def _end(self, *arguments: Any) -> None:
        raise SystemExit(f"shared memory cannot be opened: {arguments}")

    def send(self, frames: list[Any]) -> None:
        if self._has_memory and len(frames) > NUM_COLUMNS:
            ids = frames[: int(self._is_broker)]
            columns = frames[-NUM_COLUMNS:] if self._is_broker else self._segments.put(frames[-NUM_COLUMNS:])
            self._kept.append(columns)
            frames = [*ids, *self._shared.fold(b"", [frames[len(ids)], *columns])]
        if not self._socket.send(frames):
            raise SystemExit("the socket's queue is full")

    def release(self, num: int) -> None:
        """Free the memory of the first so many messages."""
        while self._kept and self._num_released < num:
            self._kept.popleft()
            self._num_released += 1

    def _on_message(self, frames: list[Any]) -> None:
        if self._has_memory:
            ids = frames[: int(self._is_broker)]
            frames = [*ids, *(self._shared.unfold(b"", frames[len(ids) :]) or ())]
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
        self._socket.send_multipart(frames, copy=len(frames[-1]) < READ_BYTES)

    def release(self, num: int) -> None:
        """Do nothing: zmq holds what it sends."""

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
    return [frame if len(frame) >= READ_BYTES else frame.bytes for frame in frames]


def socket_of(kind: str, name: str, keys: Any, address: str, handler: Handler) -> Loop | Plain:
    return (Loop if kind in ("rlzmq", "memory") else Plain)(kind, name, keys, address, handler)
