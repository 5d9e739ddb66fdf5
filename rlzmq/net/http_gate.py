"""HttpGate: what every request to one of rlzmq's HTTP servers passes: host, token, size and time of its body.

A web page in a browser on this machine can send requests to loopback, and by DNS rebinding read the answers: so the
Host header must name this server, and all but the open paths need a token that no browser adds by itself.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["HttpGate", "host_name"]

_BODY_TIMEOUT_S = 30.0
_MAX_BODIES = 16  # of the largest size, which may arrive at the same time


class HttpGate:
    """ASGI middleware that answers what may not pass (401, 403, 408, 413, 503); `app` gets whole requests only.

    No body is read before the token was checked, and none on open paths.

    Args:
        app: The application.
        token: Must be in the header ``Authorization: Bearer TOKEN``.
        hosts: Names in the Host header that are this server's, without port.
        open_paths: Paths that need no token.
        max_body_bytes: Largest body.
        body_timeout_s: Seconds in which the body must arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        hosts: Collection[str],
        open_paths: Collection[str] = (),
        max_body_bytes: int,
        body_timeout_s: float = _BODY_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._hosts = frozenset(host.lower() for host in hosts)
        self._open_paths = frozenset(open_paths)
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._too_large = f"the body is larger than {max_body_bytes} bytes"
        self._num_bytes = 0  # of the bodies that are arriving or used

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection of ASGI."""
        if scope["type"] != "http":
            return
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        names = [host_name(value.decode("latin-1")) for value in headers.get(b"host", [])]
        if len(names) != 1 or names[0] not in self._hosts:
            await _refuse(send, 403, f"this host name is not served here; expected {sorted(self._hosts)}")
            return
        if scope["path"] in self._open_paths:
            await self._app(scope, _Replay(b"", receive), send)
            return
        given = headers.get(b"authorization", [])
        if len(given) != 1 or not secrets.compare_digest(given[0], self._expected):
            await _refuse(
                send,
                401,
                "expected the header Authorization: Bearer TOKEN, with this server's token",
                [(b"www-authenticate", b"Bearer")],
            )
            return
        lengths = headers.get(b"content-length", [])
        if lengths and lengths[0].isdigit() and int(lengths[0]) > self._max_body_bytes:
            await _refuse(send, 413, self._too_large)
            return
        body = bytearray()
        try:
            refusal = await self._read(receive, body)
            if refusal is None:
                await self._app(scope, _Replay(bytes(body), receive), send)
            else:
                await _refuse(send, *refusal)
        finally:
            self._num_bytes -= len(body)

    async def _read(self, receive: Receive, body: bytearray) -> tuple[int, str] | None:
        """Read the whole body; return the code and text of a refusal."""
        try:
            async with asyncio.timeout(self._body_timeout_s):
                has_more = True
                while has_more:
                    message = await receive()
                    if message["type"] != "http.request":  # the client is gone: what is answered goes nowhere
                        return None
                    part = message.get("body", b"")
                    if len(body) + len(part) > self._max_body_bytes:
                        return 413, self._too_large
                    if self._num_bytes + len(part) > _MAX_BODIES * self._max_body_bytes:
                        return 503, "too many large bodies are arriving: try again later"
                    body += part
                    self._num_bytes += len(part)
                    has_more = message.get("more_body", False)
                return None
        except TimeoutError:
            return 408, f"the body did not arrive within {self._body_timeout_s:g} s"


class _Replay:
    """Gives the application the body that was received already."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def host_name(header: str) -> str:
    """Return the host of a Host header or address, in lower case, without port; an IPv6 address without brackets."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdigit() and ":" not in name else text


async def _refuse(send: Send, status: int, text: str, headers: Collection[tuple[bytes, bytes]] = ()) -> None:
    body = json.dumps({"error": text}).encode()
    about = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*about, *headers]})
    await send({"type": "http.response.body", "body": body})
