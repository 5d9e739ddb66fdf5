"""Dashboards in processes of their own, what asks them, and a broker whose status is made up."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol.broker.core import BrokerCore, BrokerOptions
from rlzmq.roles.peer_link import MAX_MESSAGE_BYTES
from rlzmq.wire.messages import Hello, Status, StatusRequest, Welcome, decode_message, encode_message
from rlzmq.wire.payloads import pack_blob
from tests.support.runs import Command


class Served(Command):
    """``rlzmq dashboard …`` on a free port."""

    def __init__(self, cwd: Path, *arguments: str) -> None:
        super().__init__(cwd, "dashboard", *arguments, "--port", "0")
        self.wait_for("\n")
        self.link = self.output.split()[1]
        self.port = int(urlsplit(self.link).port or 0)
        self.cookie = ""

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Send a request, by default as a browser that has entered does: (status, headers, body)."""
        given = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, headers=given)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)

    def enter(self) -> Self:
        """Open the link."""
        status, headers, _ = self.ask(self.link.partition(str(self.port))[2])
        assert status == 200
        self.cookie = headers["set-cookie"].partition(";")[0]
        return self

    def events(self, run: str = "r0") -> Iterator[tuple[str, Any]]:
        """Yield (name, content) of the stream's events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", f"/api/stream?run={run}", headers={"Cookie": self.cookie})
            answer = connection.getresponse()
            assert answer.headers["content-type"].startswith("text/event-stream")
            name = ""
            while line := answer.readline().decode():
                key, _, value = line.rstrip("\n").partition(": ")
                if key == "event":
                    name = value
                elif key == "data":
                    yield name, json.loads(value)
        finally:
            connection.close()


class MadeUpBroker:
    """Answers status requests at ``DIRECTORY/data`` as a broker with so many runners would.

    Args:
        directory: Where its socket is.
        num_runners: How many runners it tells of.
    """

    def __init__(self, directory: Path, num_runners: int) -> None:
        self.path = directory / "data"
        self.num_asked = 0
        self.status = made_up_status(num_runners)
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="made-up broker")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        context = Context()
        options = SocketOptions(max_message_bytes=MAX_MESSAGE_BYTES)
        self._socket = DrainSocket(
            context, "ROUTER", self._answer, options=options, packs=True, name="made-up"
        )
        self._socket.bind(f"ipc://{self.path}")
        self._is_up.set()
        await self._ended.wait()
        self._socket.close(0)
        context.close()

    def _answer(self, frames: list[Any]) -> None:
        peer, *rest = frames
        message, _ = decode_message(rest)
        if isinstance(message, Hello):
            answer = encode_message(Welcome("made up", message.hello_id, 1, 1, 1.0))
        elif isinstance(message, StatusRequest):
            self.num_asked += 1
            answer = encode_message(Status(), [pack_blob(self.status)])
        else:
            return
        self._socket.send([peer, *answer])


def made_up_status(num_runners: int) -> dict[str, Any]:
    status = BrokerCore(BrokerOptions("made up", 1)).status()
    status["runners"] = [
        {
            "name": f"runner-{index}",
            "incarnation": 1,
            "num_leases": index % 3,
            "oldest_lease_s": 0.25,
            "env_steps_per_s": 100.0,
            "num_uncommitted": 1,
            "num_env_steps": 1000 + index,
            "num_bad": 0,
            "is_suspect": index % 50 == 49,
        }
        for index in range(num_runners)
    ]
    status["loop_lag_s"] = 0.001
    return status


def until(events: Iterator[tuple[str, Any]], name: str, is_met: Any, timeout_s: float = 60.0) -> Any:
    """Return the content of the first event of this name that meets a condition."""
    deadline = time.monotonic() + timeout_s
    for given, content in events:
        if given == name and is_met(content):
            return content
        assert time.monotonic() < deadline
    raise AssertionError("the stream has ended")
