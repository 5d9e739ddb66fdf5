"""Those who knock at a broker's door without its keys, each in its own way."""

from __future__ import annotations

import contextlib
import socket

import zmq

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # ZMTP 3.0, up to the mechanism's name


CURVE = _GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
KINDS: dict[str, bytes] = {
    "garbage": bytes(range(256)) * 2,
    "http": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "silence": b"",
    "no key": _GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
    "oversize": CURVE + b"\x06" + (8 << 30).to_bytes(8, "big") + b"x" * 512,  # a command that claims 8 GiB
}


def knock(host: str, port: int, kind: str, *, timeout_s: float = 5.0) -> bytes:
    """Connect, say it, read what comes back until the other side hangs up, or nothing more comes."""
    heard = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout=timeout_s) as connection,
    ):
        if data := KINDS[kind]:
            connection.sendall(data)
        with contextlib.suppress(TimeoutError):
            while chunk := connection.recv(4096):
                heard += chunk
    return heard


def wrong_keys(address: str, server_public: str | None, *, wait_ms: int = 300) -> bool:
    """A zmq client with a fresh key (or none at all): whether it was ever answered or could send."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.set(zmq.LINGER, 0)
    client.set(zmq.IMMEDIATE, 1)
    if server_public is not None:
        public, secret = zmq.curve_keypair()
        client.set(zmq.CURVE_SERVERKEY, server_public.encode())
        client.set(zmq.CURVE_PUBLICKEY, public)
        client.set(zmq.CURVE_SECRETKEY, secret)
    client.connect(address)
    try:
        with contextlib.suppress(zmq.Again):
            client.set(zmq.SNDTIMEO, wait_ms)
            client.send(b"hello")
        return bool(client.poll(wait_ms))
    finally:
        client.close(0)
        context.term()
