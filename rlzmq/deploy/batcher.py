"""Batcher: collects requests on the event loop and computes them together on a thread.

    submit ─► pending requests ─► a batch ─► thread: one forward pass ─► the future of each request
                     ▲                                     │
                     └──── arrive while it computes ◄──────┘

| consumes | produces | waits for | unblocked by |
|---|---|---|---|
| requests | answers | the thread; a fuller batch | the previous batch; max_batch_size rows, or batch_wait_timeout_s |
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlzmq.core.errors import RlzmqError
from rlzmq.core.imports import import_optional
from rlzmq.deploy.served_policy import Arrays, ServedPolicy

__all__ = [
    "Batcher",
    "OverloadedError",
    "ServeMetrics",
]

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ServeMetrics:
    """Metrics of one server.

    Attributes:
        registry: Holds them for `prometheus_client.generate_latest`.
        batch_size: Number of rows of each forward pass.
        reloads: Newer checkpoints, by what happened to them: "loaded" or "skipped".

    Raises:
        MissingPackageError: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        import_optional("prometheus_client", "Serving over HTTP", "rlzmq[serve]")
        from prometheus_client import CollectorRegistry, Counter, Histogram, Info

        self.registry: CollectorRegistry = CollectorRegistry()
        self._requests = Counter(
            "rlzmq_serve_requests", "Answered requests, by HTTP code.", ("code",), registry=self.registry
        )
        self._latency_s = Histogram(
            "rlzmq_serve_latency_seconds",
            "Time from a request's arrival to its answer.",
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.batch_size: Histogram = Histogram(
            "rlzmq_serve_batch_size",
            "Observations per forward pass.",
            buckets=_BATCH_SIZES,
            registry=self.registry,
        )
        self._checkpoint = Info(
            "rlzmq_serve_checkpoint", "The checkpoint that is served, as a label.", registry=self.registry
        )
        self.reloads: Counter = Counter(
            "rlzmq_serve_reloads",
            "Newer checkpoints, by what happened to them.",
            ("result",),
            registry=self.registry,
        )
        for result in ("loaded", "skipped"):
            self.reloads.labels(result)  # a rate needs a value before the first one

    def answered(self, code: int, latency_s: float) -> None:
        """Count a request.

        Args:
            code: As in HTTP: 200, 400 a malformed request, 404 an unknown module, 503 overloaded, 500 an error.
            latency_s: Time from its arrival to its answer.
        """
        self._requests.labels(code).inc()
        self._latency_s.observe(latency_s)

    def serves(self, checkpoint: str) -> None:
        """Record the name of the served checkpoint."""
        self._checkpoint.info({"checkpoint": checkpoint})


_log = logging.getLogger("rlzmq.serve")

_MAX_QUEUED_BYTES = 256 << 20


class OverloadedError(RlzmqError):
    """Too many requests are waiting; try again later."""


@dataclass(slots=True)
class _Request:
    inputs: Arrays
    answer: asyncio.Future[Arrays]
    num_rows: int
    num_bytes: int
    arrived: float


@dataclass(slots=True)
class _Group:
    """Waiting requests that one forward pass can answer."""

    policy: ServedPolicy
    explore: bool
    requests: deque[_Request] = field(default_factory=deque)
    num_rows: int = 0


class Batcher:
    """Answers requests in batches, in the order of their arrival for each policy.

    Used on one event loop. Every request is answered, including those that wait when `close` is called (within its
    timeout).

    Args:
        max_batch_size: Maximum number of rows in a forward pass; only a single request may exceed it.
        batch_wait_timeout_s: How long a request may wait for further requests while nothing is computed.
        metrics: Counts the batches.
    """

    def __init__(self, *, max_batch_size: int, batch_wait_timeout_s: float, metrics: ServeMetrics) -> None:
        self._max_rows = max_batch_size
        self._wait_s = batch_wait_timeout_s
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._num_bytes = 0
        # The thread fetches its next batch itself when it has finished one, without waiting for the event loop.
        self._changed = threading.Condition()
        self._groups: dict[tuple[int, bool], _Group] = {}
        self._wakes_at = (
            0.0  # the thread is woken when a group has this many rows; infinite while it computes
        )
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="rlzmq-inference", daemon=True)
        self._thread.start()

    def submit(self, policy: ServedPolicy, inputs: Arrays, *, explore: bool) -> asyncio.Future[Arrays]:
        """Submit a request; return the future of its answer, or of the error that its computation raised.

        Args:
            policy: Computes the answer.
            inputs: The result of `policy.inputs_of`. Do not change it before the answer arrives.
            explore: See `ServedPolicy.compute`.

        Raises:
            OverloadedError: Too many requests are waiting.
        """
        num_bytes = sum([array.nbytes for array in inputs])
        if self._num_bytes + num_bytes > _MAX_QUEUED_BYTES and self._num_bytes:
            raise OverloadedError(f"{self._num_bytes} bytes of requests are waiting: try again later")
        answer: asyncio.Future[Arrays] = self._loop.create_future()
        request = _Request(inputs, answer, len(inputs[0]), num_bytes, time.perf_counter())
        self._num_bytes += num_bytes
        with self._changed:
            group = self._groups.get((id(policy), explore))
            if group is None:
                group = self._groups[id(policy), explore] = _Group(policy, explore)
            group.requests.append(request)
            group.num_rows += request.num_rows
            if group.num_rows >= self._wakes_at:
                self._changed.notify()
        return answer

    async def close(self, timeout_s: float | None = None) -> None:
        """Answer all waiting requests, then end the thread. Idempotent.

        Args:
            timeout_s: Seconds after which a running computation is abandoned; None: wait for it.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _finish(self, batch: Sequence[_Request], answers: Sequence[Arrays | Exception]) -> None:
        self._metrics.batch_size.observe(sum([request.num_rows for request in batch]))
        for request, answer in zip(batch, answers, strict=True):
            self._num_bytes -= request.num_bytes
            if request.answer.done():  # the client is gone
                continue
            if isinstance(answer, Exception):
                request.answer.set_exception(answer)
            else:
                request.answer.set_result(answer)

    # -- on the thread --------------------------------------------------------------------------

    def _serve(self) -> None:
        while (taken := self._next_batch()) is not None:
            group, batch = taken
            answers = _answers(group.policy, [request.inputs for request in batch], group.explore)
            self._loop.call_soon_threadsafe(self._finish, batch, answers)

    def _next_batch(self) -> tuple[_Group, Sequence[_Request]] | None:
        """Wait until a batch is full or its first request has waited long enough; None: the thread should end."""
        with self._changed:
            while True:
                group = min(self._groups.values(), key=lambda group: group.requests[0].arrived, default=None)
                if group is None:
                    if self._is_closing:
                        return None
                    self._wakes_at = 0
                    self._changed.wait()
                    continue
                left_s = group.requests[0].arrived + self._wait_s - time.perf_counter()
                if left_s <= 0 or group.num_rows >= self._max_rows or self._is_closing:
                    break
                self._wakes_at = self._max_rows
                self._changed.wait(left_s)
            self._wakes_at = math.inf
            batch = [group.requests.popleft()]
            num_rows = batch[0].num_rows
            while group.requests and num_rows + group.requests[0].num_rows <= self._max_rows:
                num_rows += group.requests[0].num_rows
                batch.append(group.requests.popleft())
            group.num_rows -= num_rows
            if not group.requests:
                del self._groups[id(group.policy), group.explore]
            return group, batch


def _answers(policy: ServedPolicy, requests: Sequence[Arrays], explore: bool) -> Sequence[Arrays | Exception]:
    try:
        return policy.compute(requests, explore=explore)
    except Exception as error:
        if len(requests) == 1:
            _log.exception("module %r raised an error", policy.module_id)
            return [error]
        # If one request makes the module fail, the others are still answered.
        return [_answers(policy, [inputs], explore)[0] for inputs in requests]
