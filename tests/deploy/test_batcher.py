"""Requests that wait together are computed together, and each gets its own answer or error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlzmq.deploy import batcher as batcher_module
from rlzmq.deploy.batcher import Batcher, OverloadedError, ServeMetrics


class FakePolicy:
    """Doubles its inputs; each computation waits for `gate`; 13 makes it fail."""

    module_id = "fake"

    def __init__(self, *, is_open: bool = False) -> None:
        self.batches: list[tuple[list[float], bool]] = []
        self.gate = threading.Semaphore(1000 if is_open else 0)
        self.begun = threading.Semaphore(0)

    def compute(self, requests: Sequence[Any], *, explore: bool) -> list[Any]:
        self.begun.release()
        self.gate.acquire()
        values = [float(value) for inputs in requests for value in inputs[0]]
        self.batches.append((values, explore))
        if 13.0 in values:
            raise RuntimeError("thirteen")
        return [[inputs[0] * 2] for inputs in requests]


class Asker:
    """Submits requests and keeps their answers."""

    def __init__(self, **options: Any) -> None:
        settings = {"max_batch_size": 4, "batch_wait_timeout_s": 0.0, **options}
        self.batcher = Batcher(metrics=ServeMetrics(), **settings)
        self.answers: dict[str, Any] = {}
        self.asked: list[asyncio.Future[Any]] = []

    def ask(self, policy: Any, name: str, *values: float, explore: bool = False) -> None:
        def keep(future: asyncio.Future[Any]) -> None:
            self.answers[name] = future.exception() or future.result()[0].tolist()

        answer = self.batcher.submit(policy, [np.array(values)], explore=explore)
        answer.add_done_callback(keep)
        self.asked.append(answer)

    async def all_answered(self) -> None:
        await asyncio.gather(*self.asked, return_exceptions=True)


async def test_requests_that_arrive_while_one_is_computed_share_the_next_batches() -> None:
    asker, policy = Asker(), FakePolicy()
    asker.ask(policy, "first", 0)
    await asyncio.to_thread(policy.begun.acquire)
    for value in range(1, 7):
        asker.ask(policy, str(value), value)
    asker.ask(policy, "many", 7, 8, 9, 10, 11)  # more than a batch: computed alone
    asker.ask(policy, "last", 12)
    assert asker.answers == {}
    policy.gate.release(100)
    await asker.all_answered()
    assert [values for values, _ in policy.batches] == [[0], [1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11], [12]]
    assert asker.answers["3"] == [6]
    assert asker.answers["many"] == [14, 16, 18, 20, 22]
    assert list(asker.answers) == ["first", "1", "2", "3", "4", "5", "6", "many", "last"]
    await asker.batcher.close()


async def test_policies_and_exploration_are_computed_apart_in_the_order_of_arrival() -> None:
    asker = Asker(max_batch_size=3, batch_wait_timeout_s=3600.0)  # a batch begins when it is full
    one, two = FakePolicy(is_open=True), FakePolicy(is_open=True)
    for value in range(3):
        asker.ask(one, f"one {value}", value)
        asker.ask(one, f"explored {value}", value, explore=True)
        asker.ask(two, f"two {value}", value)
    await asker.all_answered()
    assert one.batches == [([0, 1, 2], False), ([0, 1, 2], True)]
    assert two.batches == [([0, 1, 2], False)]
    assert len(asker.answers) == 9
    await asker.batcher.close()


async def test_an_idle_server_waits_for_more_requests_until_the_batch_is_full() -> None:
    asker, policy = Asker(batch_wait_timeout_s=3600.0), FakePolicy(is_open=True)
    for value in range(3):
        asker.ask(policy, str(value), value)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert policy.batches == []
    asker.ask(policy, "3", 3)
    await asker.all_answered()
    assert policy.batches == [([0, 1, 2, 3], False)]
    await asker.batcher.close()


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "_MAX_QUEUED_BYTES", 16)
    asker, policy = Asker(), FakePolicy()
    asker.ask(policy, "a", 1)
    await asyncio.to_thread(policy.begun.acquire)
    asker.ask(policy, "b", 2)
    with pytest.raises(OverloadedError, match="16 bytes of requests are waiting"):
        asker.ask(policy, "c", 3)
    policy.gate.release(100)
    await asker.all_answered()
    asker.ask(policy, "larger than the bound, but alone", 1, 2, 3)
    await asker.batcher.close()
    assert asker.answers == {"a": [2], "b": [4], "larger than the bound, but alone": [2, 4, 6]}


async def test_a_request_that_fails_costs_no_other_its_answer() -> None:
    asker, policy = Asker(batch_wait_timeout_s=0.05), FakePolicy(is_open=True)
    for value in (1, 13, 2):
        asker.ask(policy, str(value), value)
    await asker.all_answered()
    assert policy.batches[0] == ([1, 13, 2], False)
    assert (asker.answers["1"], asker.answers["2"]) == ([2], [4])
    assert isinstance(asker.answers["13"], RuntimeError)
    await asker.batcher.close()
