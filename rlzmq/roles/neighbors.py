"""Runners of one run on one host: large weights reach the host once, and not once for each of them.

```
broker ──Snapshot──► the first ──Snapshot──► the others
       ◄──request──            ◄──request──             (ipc in a directory of mode 0700, shared memory)
```

The first runner is the one that owns the directory. When it ends, however it ends, the system frees its lock, and the
next runner that lacks weights is the first. It answers requests at once, with weights or the promise of weights, as
long as the broker knows it. What stays unanswered, and is therefore asked again, goes to the broker, too. `RunnerCore`
decides when that is due, for the first's own leases and for its neighbors' requests.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlzmq.core.addresses import SocketDirectory
from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.shared_memory import SegmentPool, SharedFrames
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.wire.codec import Buffer, WireError, open_publication
from rlzmq.wire.messages import Snapshot, SnapshotRequest, decode_message, encode_message

__all__ = ["Neighbors"]


class Neighbors:
    """The other runners of the run on this host, as one of them sees them.

    Args:
        core: This runner's.
        context: Of the sockets.
        options: Of the sockets.
        ask: Sends a request to the broker.
        want: Called with a neighbor's request that only the broker can answer.
        take: Called with each publication that comes from a neighbor.
    """

    def __init__(
        self,
        core: RunnerCore,
        context: Context,
        options: SocketOptions,
        *,
        ask: Callable[[SnapshotRequest], None],
        want: Callable[[SnapshotRequest], None],
        take: Callable[[Buffer], None],
    ) -> None:
        self._core = core
        self._context = context
        self._options = options
        self._ask = ask
        self._want = want
        self._take = take
        self._name = hashlib.sha256(core.run_id.encode()).hexdigest()[:8]
        self._directory: SocketDirectory | None = None  # of the first
        self._socket: DrainSocket | None = None
        self._is_unanswered = False
        self._waiting: dict[bytes, tuple[int, int]] = {}  # neighbor -> the weights that it has
        self._newest: tuple[tuple[int, int], Buffer] = ((-1, -1), b"")
        self._segments = SegmentPool()
        self._shared = SharedFrames(self._send, lambda _, reason: self._segments.turn_off(reason))

    def request(self, request: SnapshotRequest) -> None:
        """Ask for newer weights than this runner has: a neighbor if there is one, else the broker."""
        if not self._core.lacks_connector_state:  # which is each runner's own
            if self._directory is None:
                self._meet()
            if self._directory is None and self._socket is not None:
                self._socket.send(encode_message(request))
                self._is_unanswered, is_enough = True, not self._is_unanswered
                if is_enough:
                    return
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
        if self._waiting:
            self._want(SnapshotRequest(*min(self._waiting.values())))

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
            if self._core.is_welcome:
                self._send(neighbor, encode_message(Snapshot()))
            self._want(message)

    def _give(self, neighbor: bytes) -> None:
        del self._waiting[neighbor]
        frames = [*encode_message(Snapshot()), self._newest[1]]
        self._send(neighbor, self._shared.fold(neighbor, frames))

    def _send(self, neighbor: bytes, frames: Sequence[Any]) -> None:
        assert self._socket is not None
        with contextlib.suppress(PeerLostError):
            self._socket.send([neighbor, *frames] if neighbor else frames)

    def _on_answer(self, received: list[Any]) -> None:
        frames = self._shared.unfold(b"", received)
        with contextlib.suppress(WireError):
            message, payload = decode_message(frames) if frames is not None else (None, ())
            if isinstance(message, Snapshot):
                self._is_unanswered = False
                if payload:
                    self._take(payload[0])
