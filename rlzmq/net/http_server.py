"""The bounds of rlzmq's HTTP servers: number of connections, size and time of a request's header, idle time.

A client may hold a connection open without asking anything. So beyond the bound the connection that has been idle, or
has sent its header, for longest is closed, and a client that asks at once gets an answer however many others wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

__all__ = ["server_config"]

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
