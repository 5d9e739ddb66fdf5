"""RemoteTrace: sends the stages of a process on another host to the driver, which writes them into its trace.

    process ──TRACE_EVENTS──► broker ──► driver: `trace.add_events`
    process ◄──TRACE_CLOCK─── broker ◄── driver

Each answer holds the driver's clock, so the first exchanges, without events, measure the offset of the clocks: half of
the shortest round trip is the largest possible error. At most one message is unanswered, which bounds the traffic; the
stages between lost messages are lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlzmq.core import trace
from rlzmq.wire.codec import Buffer
from rlzmq.wire.errors import SchemaError
from rlzmq.wire.messages import TraceClock, TraceEvents, WireMessage
from rlzmq.wire.values import pack_blob, unpack_blob

__all__ = ["SENT_EVERY_S", "RemoteTrace", "add_to_trace"]

_NUM_EXCHANGES = 16  # until the offset is known
SENT_EVERY_S = 0.25
"""Interval at which stages are sent."""

_RETRY_S = 2.0  # after which an answer counts as lost
_MAX_EVENTS = 2000  # per message, about 100 kB


class RemoteTrace:
    """Sends this process's stages. Used on one event loop."""

    def __init__(self, send: Callable[[WireMessage, Sequence[Buffer]], None]) -> None:
        self._send = send
        self._sent_at = float("-inf")
        self._is_answered = True
        self._num_exchanges = 0
        self._shortest_s = float("inf")
        self._offset_s = 0.0

    def tick(self) -> None:
        """Send what is due; call it regularly."""
        now = time.perf_counter()
        if now - self._sent_at >= (SENT_EVERY_S if self._is_answered else _RETRY_S):
            self._say(now)

    def flush(self) -> None:
        """Send the newest stages, before this process leaves."""
        self._say(time.perf_counter())

    def on_clock(self, answer: TraceClock) -> None:
        """Handle the driver's answer."""
        now = time.perf_counter()
        if self._is_answered or answer.sent_s != self._sent_at:
            return
        self._is_answered = True
        if self._num_exchanges == _NUM_EXCHANGES:
            return
        self._num_exchanges += 1
        if now - self._sent_at < self._shortest_s:
            self._shortest_s = now - self._sent_at
            self._offset_s = answer.now_s - (self._sent_at + now) / 2
        if self._num_exchanges < _NUM_EXCHANGES:
            self._say(now)

    def _say(self, now: float) -> None:
        payload: tuple[Buffer, ...] = ()
        if self._num_exchanges == _NUM_EXCHANGES:
            events = trace.take_events(_MAX_EVENTS)
            if events is None:
                return
            payload = (pack_blob({**events, "offset_s": self._offset_s}),)
        self._sent_at, self._is_answered = now, False
        self._send(TraceEvents(sent_s=now), payload)


def add_to_trace(message: TraceEvents, payload: Sequence[Buffer]) -> TraceClock:
    """Add a process's stages to this process's trace; return the answer.

    Raises:
        WireError: The payload is malformed.
    """
    answer = TraceClock(message.source, message.sent_s, time.perf_counter())
    for blob in payload:
        events = unpack_blob(blob)
        try:
            trace.add_events(message.source, events, float(events["offset_s"]))
        except (KeyError, TypeError, ValueError) as error:
            raise SchemaError(f"TraceEvents of {message.source[:60]}: {error}") from None
    return answer
