"""Batcher: collects requests on the event loop and computes them together on a thread.

    submit ─► pending requests ─► a batch ─► thread: one forward pass ─► on_done of each request
                     ▲                                     │
                     └──── arrive while it computes ◄──────┘

| consumes | produces | waits for | unblocked by |
|---|---|---|---|
| requests | answers | the thread; a fuller batch | the batch before it; max_batch_size rows, or batch_wait_timeout_s |
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rlzmq.core.errors import RlzmqError
from rlzmq.deploy.serve_metrics import ServeMetrics
from rlzmq.deploy.served_policy import Arrays, ServedPolicy

__all__ = ["Batcher", "OnDone", "OverloadedError"]

_log = logging.getLogger("rlzmq.serve")

OnDone: TypeAlias = Callable[[Arrays | Exception], None]
"""Called on the event loop with a request's answer, or with the error that its computation raised."""

_MAX_QUEUED_BYTES = 256 << 20


class OverloadedError(RlzmqError):
    """More requests wait than the server may hold; try again later."""


@dataclass(slots=True)
class _Request:
    inputs: Arrays
    on_done: OnDone
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

    Used on one event loop. Every request is answered, also those that wait when `close` is called (within its time).

    Args:
        max_batch_size: Most rows in a forward pass; only a single request may have more.
        batch_wait_timeout_s: How long an idle server waits for more requests than have arrived.
        metrics: Counts the batches.
    """

    def __init__(self, *, max_batch_size: int, batch_wait_timeout_s: float, metrics: ServeMetrics) -> None:
        self._max_rows = max_batch_size
        self._wait_s = batch_wait_timeout_s
        self._metrics = metrics
        self._groups: dict[tuple[int, bool], _Group] = {}
        self._num_bytes = 0
        self._is_computing = False
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._work: queue.SimpleQueue[tuple[_Group, Sequence[_Request]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="rlzmq-inference", daemon=True)
        self._thread.start()

    def submit(self, policy: ServedPolicy, inputs: Arrays, *, explore: bool, on_done: OnDone) -> None:
        """Add a request.

        Args:
            policy: Computes the answer.
            inputs: Return value of its `inputs_of`; not to be changed until the answer.
            explore: See `ServedPolicy.compute`.
            on_done: Receives the answer, never before `submit` returns.

        Raises:
            OverloadedError: Too much is waiting.
        """
        num_bytes = sum(array.nbytes for array in inputs)
        if self._num_bytes + num_bytes > _MAX_QUEUED_BYTES and self._num_bytes:
            raise OverloadedError(f"{self._num_bytes} bytes of requests are waiting: try again later")
        group = self._groups.get((id(policy), explore))
        if group is None:
            group = self._groups[id(policy), explore] = _Group(policy, explore)
        group.requests.append(_Request(inputs, on_done, len(inputs[0]), num_bytes, time.perf_counter()))
        group.num_rows += len(inputs[0])
        self._num_bytes += num_bytes
        self._idle.clear()
        if not self._is_computing:
            self._schedule()

    async def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no request is waiting or being computed; return False if that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, timeout_s: float | None = None) -> None:
        """Answer what is waiting, then end the thread. Idempotent.

        Args:
            timeout_s: Seconds after which a computation is left to itself; None: wait for it.
        """
        if await self.wait_until_idle(timeout_s) and self._thread.is_alive():
            self._work.put(None)
            await asyncio.to_thread(self._thread.join)

    # -- on the event loop ----------------------------------------------------------------------

    def _schedule(self) -> None:
        """Start the next batch when it is full, or when its first request has waited long enough."""
        group = self._first_group()
        if group is None:
            return
        left_s = group.requests[0].arrived + self._wait_s - time.perf_counter()
        is_due = group.num_rows >= self._max_rows or left_s <= 0
        if self._timer is not None:
            if not is_due:
                return
            self._timer.cancel()
        # Not at once: other requests may have arrived in this turn of the loop.
        self._timer = (
            self._loop.call_soon(self._start) if is_due else self._loop.call_later(left_s, self._start)
        )

    def _first_group(self) -> _Group | None:
        """Return the group whose first request has waited longest; forget the empty ones."""
        self._groups = {key: group for key, group in self._groups.items() if group.requests}
        return min(self._groups.values(), key=lambda group: group.requests[0].arrived, default=None)

    def _start(self) -> None:
        self._timer = None
        group = self._first_group()
        if self._is_computing or group is None:
            return
        batch = [group.requests.popleft()]
        num_rows = batch[0].num_rows
        while group.requests and num_rows + group.requests[0].num_rows <= self._max_rows:
            num_rows += group.requests[0].num_rows
            batch.append(group.requests.popleft())
        group.num_rows -= num_rows
        self._is_computing = True
        self._metrics.batch_size.observe(num_rows)
        self._work.put((group, batch))

    def _finish(self, batch: Sequence[_Request], answers: Sequence[Arrays | Exception]) -> None:
        self._is_computing = False
        self._schedule()
        for request, answer in zip(batch, answers, strict=True):
            self._num_bytes -= request.num_bytes
            try:
                request.on_done(answer)
            except Exception:  # one client's answer must not cost the others theirs
                _log.exception("an answer could not be sent")
        if not self._is_computing and not any(group.requests for group in self._groups.values()):
            self._idle.set()

    # -- on the thread --------------------------------------------------------------------------

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            group, batch = work
            answers = _answers(group.policy, [request.inputs for request in batch], group.explore)
            self._loop.call_soon_threadsafe(self._finish, batch, answers)


def _answers(policy: ServedPolicy, requests: Sequence[Arrays], explore: bool) -> Sequence[Arrays | Exception]:
    try:
        return policy.compute(requests, explore=explore)
    except Exception as error:
        if len(requests) == 1:
            _log.exception("module %r raised an error", policy.module_id)
            return [error]
        # The others are answered although one of them makes the module fail.
        return [_answers(policy, [inputs], explore)[0] for inputs in requests]
