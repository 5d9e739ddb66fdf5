"""The bounds of rlzmq's HTTP servers: number of connections, size and time of a request's header, idle time.

A client may hold a connection open without asking anything. So beyond the bound the connection that has been idle, or
has sent its header, for longest is closed, and a client that asks at once gets an answer however many others wait.

A web page in a browser on this machine can send requests to loopback, and by DNS rebinding read the answers: so the
Host header must name this server, and all but the open paths need a token that no browser adds by itself.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestFilter", "host_name", "server_config"]


_MAX_CONNECTIONS = 256
_HEADER_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 60
_MAX_HEADER_BYTES = 32 * 1024
# Connections that are accepted in one turn of the event loop, before those beyond the bound are closed.
_BACKLOG = 128


def server_config(app: ASGIApp, **settings: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application, within the bounds.

    Args:
        app: The application.
        settings: Further settings of `uvicorn.Config`.
    """
    return uvicorn.Config(
        app,
        http=type("BoundedProtocol", (_BoundedProtocol,), {"waiting": {}}),
        ws="none",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_TIMEOUT_S,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        backlog=_BACKLOG,
        **settings,
    )


class _BoundedProtocol(H11Protocol):
    """One connection. It is idle until its first request, and between two requests."""

    waiting: ClassVar[dict[_BoundedProtocol, None]]  # the server's idle connections, longest idle first
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.waiting[self] = None
        self._expect_header()
        if len(self.connections) > _MAX_CONNECTIONS:
            next(iter(self.waiting)).close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_asked()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_idle = self.timeout_keep_alive_task is not None
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_asked()
        elif was_idle:
            self._expect_header()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self.waiting[self] = None

    def close(self) -> None:
        """Close the connection at once."""
        self._is_asked()
        self.connections.discard(self)
        self.transport.abort()

    def _expect_header(self) -> None:
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(_HEADER_TIMEOUT_S, self.close)

    def _is_asked(self) -> None:
        self.waiting.pop(self, None)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


_BODY_TIMEOUT_S = 30.0
_MAX_BODIES = 16  # of the largest size, which may arrive at the same time


class RequestFilter:
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
            await self._app(scope, _ReceivedBody(b"", receive), send)
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
                await self._app(scope, _ReceivedBody(bytes(body), receive), send)
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


class _ReceivedBody:
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
