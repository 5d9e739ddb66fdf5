"""Runners of one run on one host: large weights reach the host once, and not once for each of them.

```
broker ──Snapshot──► the first ──Snapshot──► the others
       ◄──request──            ◄──request──             (ipc in a directory of mode 0700, shared memory)
```

The first runner is the one that owns the directory. When it ends, however it ends, the system frees its lock, and the
next runner that lacks weights is the first. It answers requests at once, with weights or the promise of weights, as
long as it hears from the broker itself. Requests that stay unanswered go to the broker, too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlzmq.core.addresses import SocketDirectory
from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.shared_memory import SegmentPool, SharedFrames
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.protocol.weights import open_publication
from rlzmq.wire.codec import Buffer
from rlzmq.wire.errors import WireError
from rlzmq.wire.messages import Snapshot, SnapshotRequest, decode_message, encode_message

__all__ = ["Neighbors"]

_MAX_UNANSWERED = 2


class Neighbors:
    """The other runners of the run on this host, as one of them sees them.

    Args:
        core: This runner's.
        context: Of the sockets.
        options: Of the sockets.
        now: Returns the core's time.
        ask: Sends a request to the broker.
        take: Called with each publication that comes from a neighbor.
    """

    def __init__(
        self,
        core: RunnerCore,
        context: Context,
        options: SocketOptions,
        *,
        now: Callable[[], float],
        ask: Callable[[SnapshotRequest], None],
        take: Callable[[Buffer], None],
    ) -> None:
        self._core = core
        self._context = context
        self._options = options
        self._now = now
        self._ask = ask
        self._take = take
        self._name = hashlib.sha256(core.run_id.encode()).hexdigest()[:8]
        self._directory: SocketDirectory | None = None  # of the first
        self._socket: DrainSocket | None = None
        self._num_unanswered = 0
        self._waiting: dict[bytes, tuple[int, int]] = {}  # neighbor -> the weights that it has
        self._newest: tuple[tuple[int, int], Buffer] = ((-1, -1), b"")
        self._announced = self._asked_for = (-1, -1)
        self.moved_at = float("-inf")
        """When something of the broker's last answer arrived, or it was asked."""
        self._segments = SegmentPool()
        self._shared = SharedFrames(self._send, lambda _, reason: self._segments.turn_off(reason))

    def request(self, request: SnapshotRequest) -> None:
        """Ask for newer weights than this runner has: a neighbor if there is one, else the broker."""
        if self._core.lacks_connector_state:  # which is each runner's own
            self._ask(request)
            return
        if self._directory is None:
            self._meet()
        if self._directory is not None:
            self._fetch(request)
            return
        if self._socket is not None:
            self._socket.send(encode_message(request))
        self._num_unanswered += 1
        if self._socket is None or self._num_unanswered > _MAX_UNANSWERED:
            self._ask(request)

    def offer(self, frame: Buffer) -> None:
        """Take a publication that came from the broker, or its announcement."""
        try:
            header, _ = open_publication(frame)
        except WireError:  # the core counts it
            return
        if header.has_body and self._directory is not None and header.order > self._newest[0]:
            self._newest = header.order, self._segments.put([np.frombuffer(frame, np.uint8)])[0]
            for neighbor in [peer for peer, order in self._waiting.items() if order < header.order]:
                self._give(neighbor)
        self._announced = max(self._announced, header.order)
        if self._waiting:
            self._fetch(SnapshotRequest(*min(self._waiting.values())))

    def close(self) -> None:
        """Close the socket; the last runner removes the directory. Idempotent."""
        if self._directory is None and self._socket is not None:
            self._meet()
        if self._socket is not None:
            self._socket.close()
        if self._directory is not None:
            self._directory.close()

    # ------------------------------------------------------------------ private

    def _meet(self) -> None:
        """Become the first, or connect to it."""
        try:
            directory = SocketDirectory(name=self._name)
        except BlockingIOError as error:
            if self._socket is None:
                self._socket = self._open("DEALER", self._on_answer)
                self._socket.connect(f"ipc://{Path(error.filename).with_name('weights')}")
            return
        except (OSError, ConfigurationError):  # each runner by itself
            return
        if self._socket is not None:
            self._socket.close()
        self._socket, self._directory = self._open("ROUTER", self._on_request), directory
        self._socket.bind(directory.address("weights"))

    def _open(self, zmq_type: str, on_message: Callable[[list[Any]], None]) -> DrainSocket:
        name = f"{self._core.name} neighbors"
        return DrainSocket(self._context, zmq_type, on_message, options=self._options, name=name)

    def _fetch(self, request: SnapshotRequest) -> None:
        """Ask the broker, once for what was announced, and again if nothing arrives."""
        now = self._now()
        if self._announced == self._asked_for and now - self.moved_at < self._core.timers.resend_s:
            return
        self._asked_for, self.moved_at = self._announced, now
        self._ask(request)

    def _on_request(self, frames: list[Any]) -> None:
        neighbor = bytes(frames[0])
        received = self._shared.unfold(neighbor, frames[1:])
        with contextlib.suppress(WireError):
            message = decode_message(received)[0] if received is not None else None
            if not isinstance(message, SnapshotRequest):
                return
            self._waiting[neighbor] = (message.generation, message.version)
            if self._newest[0] > self._waiting[neighbor]:
                self._give(neighbor)
                return
            if self._now() - self._core.heard_at < self._core.timers.resend_s:
                self._send(neighbor, encode_message(Snapshot(-1, -1)))
            self._fetch(message)

    def _give(self, neighbor: bytes) -> None:
        del self._waiting[neighbor]
        order, frame = self._newest
        self._send(neighbor, self._shared.fold(neighbor, [*encode_message(Snapshot(*order)), frame]))

    def _send(self, neighbor: bytes, frames: Any) -> None:
        assert self._socket is not None
        with contextlib.suppress(PeerLostError):
            self._socket.send([neighbor, *frames] if neighbor else frames)

    def _on_answer(self, received: list[Any]) -> None:
        frames = self._shared.unfold(b"", received)
        with contextlib.suppress(WireError):
            message, payload = decode_message(frames) if frames is not None else (None, ())
            if isinstance(message, Snapshot):
                self._num_unanswered = 0
                if payload:
                    self._take(payload[0])
