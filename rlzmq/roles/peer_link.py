"""A peer's connection to the broker: a protocol core, a DEALER socket and a timer.

Runners, learners and the driver share it. The core is a pure state machine; its instructions are messages to send.

    process ──TRACE_EVENTS──► broker ──► driver: `trace.add_events`

The stages of processes on other hosts are placed by the wall clocks of both hosts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import gymnasium as gym

from rlzmq.core import faults, trace, version
from rlzmq.core.errors import DeadlineError
from rlzmq.core.patience import HEARTBEAT_S, TICK_S, FairClock
from rlzmq.core.spaces import space_to_plain
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.keys import CurveClient
from rlzmq.net.shared_memory import SegmentPool, SharedFrames
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol.core import Instruction, Received, Send, Stop
from rlzmq.roles.listeners import MAX_MESSAGE_BYTES, MAX_REMOTE_MESSAGE_BYTES
from rlzmq.wire.codec import Buffer, SchemaError, WireError
from rlzmq.wire.messages import Goodbye, TraceEvents, decode_message
from rlzmq.wire.payloads import pack_blob, unpack_blob

__all__ = [
    "MAX_MESSAGE_BYTES",
    "PeerLink",
    "PeerRole",
    "add_to_trace",
    "digest_of",
    "ends_link",
    "new_peer_id",
    "package_version",
    "spaces_digest",
]


_DIGEST_CHARACTERS = 16


def package_version() -> str:
    """Return the version of this rlzmq installation."""
    return version.__version__


def digest_of(data: bytes) -> str:
    """Return a short hex digest of the data."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]


def spaces_digest(spaces: tuple[Any, Any]) -> str:
    """Return a digest of (observation space, action space), each possibly a dict by agent.

    The result is "" if a space is not one of Gymnasium's own.
    """
    try:
        return digest_of(bytes(pack_blob([_plain(space) for space in spaces])))
    except (TypeError, ValueError):
        return ""  # a custom space: the weights' layout is still compared


def _plain(space: gym.Space[Any]) -> Any:
    if isinstance(space, Mapping) and not hasattr(space, "sample"):
        return [
            [str(key), space_to_plain(sub)]
            for key, sub in sorted(space.items(), key=lambda item: str(item[0]))
        ]
    return space_to_plain(space)


_MAX_EVENTS = 2000  # per message, about 100 kB


def add_to_trace(message: TraceEvents, payload: Sequence[Buffer]) -> None:
    """Add a process's stages to this process's trace.

    Raises:
        WireError: The payload is malformed.
    """
    events = unpack_blob(payload[0]) if payload else {}
    try:
        offset_s = float(events["offset_s"]) - trace.WALL_OFFSET_S
        trace.add_events(message.source, events, offset_s)
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"TraceEvents of {message.source[:60]}: {error}") from None


_log = logging.getLogger("rlzmq")

P = ParamSpec("P")
Link = TypeVar("Link", bound="PeerLink")


def new_peer_id() -> str:
    """Return a new id for a process's connection."""
    return uuid.uuid4().hex


def ends_link(callback: Callable[Concatenate[Link, P], None]) -> Callable[Concatenate[Link, P], None]:
    """Decorate a callback of the event loop: an exception in it ends the link, as nobody else would notice it."""

    def guarded(link: Link, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(link, *args, **kwargs)
        except Exception as error:
            link.fail(error)

    return guarded


class PeerLink:
    """Connects a core to the broker; used on one event loop.

    Args:
        core: RunnerCore, LearnerCore or DriverCore.
        address: The broker's data address.
        curve: Keys for a broker reached by TCP.

    Attributes:
        num_refused: Number of received messages that were refused, by reason.
        ended: Resolved with (reason, detail) when the core stops, or with an exception when a job fails.
    """

    def __init__(self, core: Any, address: str, curve: CurveClient | None = None) -> None:
        self.core = core
        self._address = address
        self.curve = curve
        self._context: Context | None = None
        self._socket: DrainSocket | None = None
        self._shared: SharedFrames | None = None
        self._segments: SegmentPool | None = None  # for what this process sends
        if self.is_local:
            self._segments = SegmentPool()
            self._shared = SharedFrames(lambda _, frames: self._send(frames), self._on_frames_needed)
        self._loop = asyncio.get_running_loop()
        self._clock = FairClock(TICK_S)
        self._timer: asyncio.TimerHandle | None = None
        self._traced_at = float("-inf")
        self.num_refused: Counter[str] = Counter()
        self.ended: asyncio.Future[tuple[str, str]] = self._loop.create_future()

    @property
    def role(self) -> str:
        """The peer's role: its name without the number."""
        return str(self.core.name).partition("-")[0]

    @property
    def is_local(self) -> bool:
        """Whether the broker is on this host."""
        return self._address.startswith("ipc:")

    def open_sockets(self, context: Context) -> None:
        """Open further sockets; subclasses extend it."""

    async def start(self) -> None:
        """Connect and register; return before the broker has answered."""
        self._context = Context()
        options = SocketOptions(
            max_message_bytes=MAX_MESSAGE_BYTES if self.is_local else MAX_REMOTE_MESSAGE_BYTES,
            max_queued_bytes=MAX_MESSAGE_BYTES,
            receive_high_water_mark=0,  # bounded by credits; see `SocketOptions`
            linger_ms=500,
            reconnect_interval_max_ms=500,
        )
        self._socket = DrainSocket(
            self._context,
            "DEALER",
            self._on_message,
            options=options,
            routing_id=f"{self.core.name}.{self.core.uuid}".encode()[:255],
            curve=self.curve,
            packs=True,
            name=self.core.name,
        )
        self._socket.connect(self._address)
        self.open_sockets(self._context)
        self.register()
        self._tick()

    def _on_frames_needed(self, peer: bytes, reason: str) -> None:
        """Send nothing more in shared memory."""
        if self._segments is not None:
            self._segments.turn_off(f"the broker cannot open it ({reason})")

    def register(self) -> None:
        """Send HELLO; a learner does so once its group is formed."""
        self.do(self.core.start(self.now()))

    def now(self) -> float:
        """Return the time of the core, in seconds in which this process ran."""
        return self._clock.now()

    def leave(self, reason: str = "leaving") -> None:
        """Take no more work from the broker, and say GOODBYE after finished work."""
        self.do(self.core.leave(self.now(), reason))

    def handle(self, event: Received) -> None:
        """Pass a message to the core and perform its instructions; refuse a payload that it cannot decode."""
        try:
            instructions = self.core.handle(event, self.now())
        except WireError as error:
            self._refuse(error)
            return
        self.do(instructions)

    def do(self, instructions: list[Instruction]) -> None:
        """Perform a core's instructions, in order."""
        for instruction in instructions:
            if isinstance(instruction, Send):
                if isinstance(instruction.message, Goodbye):
                    self._send_stages()  # the last ones
                frames = instruction.frames
                self._send(frames if self._shared is None else self._shared.fold(b"", frames))
            elif isinstance(instruction, Stop) and not self.ended.done():
                self.ended.set_result((instruction.reason, instruction.detail))

    def _send(self, frames: Sequence[Any]) -> None:
        if self._socket is not None and not self._socket.closed:
            self._socket.send(frames)  # False: full; the core sends again

    def fail(self, error: BaseException) -> None:
        """End the link with an error, which is raised to those who await `ended`."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def when_done(self, job: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        """Call ``then(job)`` when a job has ended, unless it was cancelled; an error of `then` ends the link."""

        @ends_link
        def call(link: PeerLink, done: asyncio.Future[Any]) -> None:
            if not done.cancelled():
                then(done)

        job.add_done_callback(lambda done: call(self, done))

    @ends_link
    def _on_message(self, received: list[Any]) -> None:
        frames = received if self._shared is None else self._shared.unfold(b"", received)
        if frames is None:
            return
        try:
            message, _ = decode_message(frames)
        except WireError as error:
            self._refuse(error)
            return
        if faults.is_armed:
            faults.at(f"{self.role}.{type(message).__name__}")
        self.handle(Received(b"", message, tuple(frames)))

    def _send_stages(self) -> None:
        """Send the newest stages for the run's trace, from another host than the driver's."""
        self._traced_at = time.perf_counter()
        if self.core.is_welcome and (events := trace.take_events(_MAX_EVENTS)) is not None:
            self.do([Send(b"", TraceEvents(), (pack_blob(events),))])

    def _refuse(self, error: WireError) -> None:
        self.num_refused[error.reason] += 1
        _log.warning("%s refused a message: %s", self.core.name, error)

    def data_moves(self) -> None:
        """Note that a part of a message of the broker has arrived."""
        self.core.data_moves(self.now())

    @ends_link
    def _tick(self) -> None:
        if self._socket is not None and self._socket.take_moving():
            self.data_moves()
        self.do(self.core.tick(self.now()))
        if trace.is_on and trace.is_remote() and time.perf_counter() - self._traced_at >= HEARTBEAT_S:
            self._send_stages()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    async def stop(self) -> None:
        """Deliver finished work, send GOODBYE and close; a lease that is still sampled is given up."""
        if not self.core.is_stopped:
            self.leave()
        if not self.core.is_stopped:
            self.do([Send(b"", Goodbye("before its last fragment was finished"))])
        await self.close()

    async def close(self) -> None:
        """Close the sockets; sent messages are delivered for up to half a second. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.close()
        if self._context is not None:
            context, self._context = self._context, None
            await context.aclose()
        if not self.ended.done():
            self.ended.set_result(("closed", ""))
        elif not self.ended.cancelled() and self.ended.exception() is not None:
            self.ended.exception()  # seen


class PeerRole:
    """Base class of the actors of runners and learners: their thread, their heartbeat, and their end."""

    _link: Any = None
    _run_blocking: Any = None

    def close(self) -> None:
        """Release what the actor's thread uses; runs on it."""

    def use_actor_thread(self, run: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]) -> None:
        """Set the function that runs another one on the actor's thread; called by the actor's host."""
        self._run_blocking = lambda function: asyncio.ensure_future(run(function))

    def _report_hang(self, error: DeadlineError) -> None:
        """End the link because user code hangs; called on the watching thread."""
        if (link := self._link) is not None:
            link._loop.call_soon_threadsafe(link.fail, error)

    async def disconnect(self) -> None:
        """Send GOODBYE to the broker, after data that was not sent yet."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.stop()

    async def stop(self) -> None:
        """Leave the broker and release all resources; called when the actor ends."""
        await self.disconnect()
        await self._run_blocking(self.close)
