"""Floods: what clients with and without a key or token send to make a process large, slow or full.

Each function sends one flood, bounded in size and time, and returns when it is over or was cut.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import zmq

from rlzmq.core.addresses import split_tcp
from rlzmq.net.keys import JoinFile
from rlzmq.net.socket import PACKED, PART, PART_BYTES, pack_frames, sizes_of, unpack_frames
from rlzmq.wire.codec import WireMessage
from rlzmq.wire.messages import (
    Fragment,
    Hello,
    Refused,
    Status,
    StatusRequest,
    Welcome,
    decode_message,
    encode_message,
)
from rlzmq.wire.payloads import encode_fragment
from tests.security.strangers import CURVE

_MIB = 1 << 20


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process has had."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024


class Pauses:
    """Asks again and again, on a thread; `longest_s` is the longest time to an answer. A context manager."""

    def __init__(self, ask: Callable[[], object], every_s: float = 0.05) -> None:
        self._ask, self._every_s = ask, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._asked_at = 0.0
        self.longest_s = 0.0
        self.num_answers = 0

    def __enter__(self) -> Pauses:
        self._asked_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(120)
        self.longest_s = max(self.longest_s, time.monotonic() - self._asked_at)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._ask()
                self.num_answers += 1
                now = time.monotonic()
                self.longest_s = max(self.longest_s, now - self._asked_at)
                self._asked_at = now


# -- with a runner's key -----------------------------------------------------------------------------


@contextlib.contextmanager
def client(
    join: JoinFile,
    routing_id: bytes,
    name: str = "data",
    kind: int = zmq.DEALER,
    receive_high_water_mark: int = 1000,
) -> Iterator[Any]:
    """A zmq socket with the keys of a join file."""
    with zmq.Context() as context, context.socket(kind) as own:
        own.set(zmq.LINGER, 0)
        own.set(zmq.SNDHWM, 0)
        own.set(zmq.RCVHWM, receive_high_water_mark)
        own.set(zmq.RECONNECT_IVL, 50)
        own.set(zmq.ROUTING_ID, routing_id)
        keys = join.curve()
        assert keys is not None
        keys.apply(own)
        own.connect(join.addresses[name])
        yield own


def is_let_in(join: JoinFile, timeout_s: float = 3.0) -> bool:
    """Return whether a new connection with the key is answered."""
    with client(join, os.urandom(8)) as own:
        own.send_multipart(
            encode_message(Hello("runner", "knocks@elsewhere", os.urandom(4).hex(), num_envs=1))
        )
        return bool(own.poll(1000 * timeout_s))


@contextlib.contextmanager
def _watched(join: JoinFile, name: str) -> Iterator[tuple[Any, Callable[[float], bool]]]:
    """An observer's socket, and a function that waits so many seconds for its connection to be cut."""
    with client(join, name.encode()) as own:
        monitor = own.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        own.send_multipart(encode_message(Hello("observer", name, name)))
        own.poll(5000)
        yield own, lambda timeout_s: bool(monitor.poll(1000 * timeout_s))
        own.disable_monitor()
        monitor.close()


def many_frames(join: JoinFile, num: int, num_bytes: int, *, timeout_s: float = 20.0) -> bool:
    """Send one message of many frames; return whether the connection was cut."""
    frame = bytes(num_bytes)
    with _watched(join, "flood") as (own, is_cut):
        for left in range(num - 1, -1, -1):
            own.send(frame, zmq.SNDMORE if left else 0, copy=num_bytes < 1 << 16)
        return is_cut(timeout_s)


def unfinished_parts(join: JoinFile, num_bytes: int, *, timeout_s: float = 20.0) -> bool:
    """Send parts of one message that has no end; return whether the connection was cut."""
    data = bytes(PART_BYTES)
    with _watched(join, "parts") as (own, is_cut):
        deadline = time.monotonic() + timeout_s
        for index in range(num_bytes // PART_BYTES):
            own.send_multipart([struct.pack("<2sIIB", PART, 1, index, 0), data], copy=False)
            if is_cut(0.0) or time.monotonic() > deadline:
                break
        return is_cut(timeout_s)


def subscriptions(join: JoinFile, num: int, *, timeout_s: float = 10.0) -> None:
    """Subscribe to ever new topics of the weights."""
    with client(join, b"topics", "weights", zmq.XSUB) as own:
        deadline = time.monotonic() + timeout_s
        for number in range(num):
            own.send(b"\1" + b"%200d" % number)
            if time.monotonic() > deadline:
                break
        time.sleep(1.0)


def claimed_counts(join: JoinFile, num: int, *, timeout_s: float = 20.0) -> int:
    """Send fragments that claim env steps which they do not hold; return how many were sent."""
    with client(join, b"claims") as own:
        own.send_multipart(encode_message(Hello("runner", "claims@elsewhere", "claims", num_envs=1)))
        incarnation = next(
            message.incarnation for message in _messages(own, timeout_s) if isinstance(message, Welcome)
        )
        for seq in range(num):
            claim = Fragment("claims", incarnation, seq, 0, 4000, 0, 0, {})
            frames = encode_fragment(claim, [np.zeros(4000, np.uint8)])
            own.send_multipart(pack_frames([(frames, sizes_of(frames))]))
        own.send_multipart(encode_message(StatusRequest()))
        for message in _messages(own, timeout_s):
            if isinstance(message, Refused | Status):
                break
    return num


def _messages(own: Any, timeout_s: float) -> Iterator[WireMessage]:
    while own.poll(1000 * timeout_s):
        frames = own.recv_multipart()
        if frames[0][:2] == PART:
            continue
        for message in unpack_frames(frames) if frames[0][:2] == PACKED else [frames]:
            yield decode_message(message)[0]


# -- without a key -----------------------------------------------------------------------------------


def handshake_frames(address: str, num: int, num_bytes: int, *, timeout_s: float = 10.0) -> int:
    """Open connections that each send a frame of this size as their handshake; return the bytes that were taken."""
    begin = CURVE + b"\x06" + num_bytes.to_bytes(8, "big") + b"\x05HELLO"
    chunk = bytes(_MIB)
    taken = [0] * num

    def one(index: int) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError), socket.create_connection(split_tcp(address), timeout=2) as own:
            own.sendall(begin)
            while taken[index] < num_bytes - 16 and time.monotonic() < deadline:
                taken[index] += own.send(chunk[: num_bytes - 16 - taken[index]])
            own.recv(64)
            while own.recv(4096):
                pass

    _all(one, num)
    return sum(taken)


# -- HTTP --------------------------------------------------------------------------------------------


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=2)


@contextlib.contextmanager
def unfinished_headers(
    url: str, num: int, header: bytes = b"GET /healthz HTTP/1.1\r\nHost: "
) -> Iterator[int]:
    """Hold connections open that have sent the beginning of a request; give how many were accepted."""
    with contextlib.ExitStack() as stack:
        num_open = 0
        for _ in range(num):
            with contextlib.suppress(OSError):
                own = stack.enter_context(_connect(url))
                if header:
                    own.sendall(header)
                num_open += 1
        yield num_open


def unread_bodies(url: str, path: str, num: int, num_bytes: int, *, headers: str = "") -> None:
    """Send bodies that never end to a path."""
    host = urlsplit(url).netloc
    chunk = bytes(64 * 1024)

    def one(_: int) -> None:
        deadline = time.monotonic() + 3
        with contextlib.suppress(OSError), _connect(url) as own:
            own.sendall(
                f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Content-Length: {num_bytes}\r\n\r\n".encode()
            )
            for _ in range((num_bytes - 1) // len(chunk)):
                own.sendall(chunk)
                if time.monotonic() > deadline:
                    break
            time.sleep(max(0.0, min(0.5, deadline - time.monotonic())))

    _all(one, num)


def large_json(url: str, token: str, num_bytes: int, num: int = 1) -> int:
    """Send large bodies that take long to parse; return the last answer's code."""
    body = b'{"observations":[' + b"[1]," * (num_bytes // 4 - 8) + b"[1]]}"
    code = 0
    for _ in range(num):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.request("POST", "/v1/act", body, {"Authorization": f"Bearer {token}"})
        code = connection.getresponse().status
        connection.close()
    return code


def _all(one: Callable[[int], None], num: int) -> None:
    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
