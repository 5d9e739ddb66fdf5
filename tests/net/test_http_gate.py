"""What passes the gate in front of an HTTP server; tests/deploy/test_serve_http.py asks a real one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlzmq.net.http_server import RequestFilter


class Asked:
    """One request to a gate, in ASGI's messages."""

    def __init__(self, *bodies: bytes | None, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self._bodies = list(bodies)
        self._headers = (
            [(b"host", b"here"), (b"authorization", b"Bearer secret")] if headers is None else headers
        )
        self.received: bytes | None = None
        self.status = 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        self.received = message["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive(self) -> Any:
        body = self._bodies.pop(0)
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body, "more_body": bool(self._bodies)}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]

    async def run(self) -> int:
        gate = RequestFilter(self.app, token="secret", hosts=["here"], max_body_bytes=10, body_timeout_s=0.05)
        scope = {"type": "http", "path": "/", "headers": self._headers}
        await gate(scope, self.receive, self.send)
        return self.status


@pytest.mark.parametrize(
    ("bodies", "headers", "status"),
    [
        ([b"01234", None], None, 408),
        ([None], None, 408),
        ([b""], [(b"host", b"here"), (b"host", b"there"), (b"authorization", b"Bearer secret")], 403),
        ([b""], [(b"host", b"here"), (b"authorization", b"Bearer secre")], 401),
        ([b""], [(b"host", b"here"), (b"authorization", b"Basic secret")], 401),
        ([b""], [(b"host", b"here"), *[(b"authorization", b"Bearer secret")] * 2], 401),
    ],
)
async def test_others_are_refused_and_the_application_is_not_called(
    bodies: list[bytes | None], headers: Any, status: int
) -> None:
    asked = Asked(*bodies, headers=headers)
    assert await asked.run() == status
    assert asked.received is None
