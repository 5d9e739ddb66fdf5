"""The broker role on real sockets: whole runs, its death and return, hostile bytes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from rlzmq.core.errors import PeerLostError
from rlzmq.protocol.core import Quarantine, Send
from rlzmq.roles.broker_role import BrokerRole
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.messages import BrokerBeat, Fragment, Goodbye, Hello, encode_message
from rlzmq.wire.payloads import decode_fragment, encode_fragment, fragment_from_bytes
from tests.driver.broker_peers import FakeDriver, FakeLearner, FakePeer, FakeRunner
from tests.support.runs import until_async

_OPTIONS = {"heartbeat_s": 0.1, "peer_timeout_s": 2.0, "resend_s": 0.3}


@contextlib.asynccontextmanager
async def _peers(*makers: Any) -> AsyncIterator[list[FakePeer]]:
    peers = [maker() for maker in makers]
    try:
        yield peers
    finally:
        for peer in peers:
            await peer.close()


def _check(driver: FakeDriver, learner: FakeLearner, batch: int) -> None:
    """Every update once and its whole batch, nothing trained twice."""
    assert [report.report.update_id for report in driver.reports] == list(range(driver.num_updates))
    steps = [(fragment, step) for fragment, step, _ in learner.trained]
    last = driver.reports[-1].report
    assert len(steps) == len(set(steps)) == last.trained >= driver.num_updates * batch


async def test_many_runners_that_could_send_more_than_fits_are_held_back_and_nothing_is_lost():
    """The staleness alone would allow 60 batches of 10 fragments in flight, 24 MB; memory is for 1 MB."""
    limit, batch, num_bytes, num_updates, num_runners = 1_000_000, 320, 40_000, 40, 40
    broker = BrokerRole("run", {**_OPTIONS, "peer_timeout_s": 30.0, "memory_bytes": limit})
    addresses = await broker.start()
    most_bytes, is_settled = 0, False

    def watch(update_id: int) -> None:
        nonlocal most_bytes, is_settled
        state = broker._core.state
        num_bytes = state.ledger.num_bytes
        # What the first leases brought, of which nobody knew how large it would be, is trained.
        is_settled |= (
            num_bytes <= limit and sum(peer.has_worked for peer in state.runners.values()) == num_runners
        )
        if is_settled:
            most_bytes = max(most_bytes, num_bytes)

    makers = [
        lambda index=index: FakeRunner(f"runner-{index:03d}", addresses, num_bytes=num_bytes)
        for index in range(num_runners)
    ]
    async with _peers(
        lambda: FakeDriver(addresses, num_updates, batch, staleness=60, max_policy_lag=60),
        lambda: FakeLearner(addresses, watch),
        *makers,
    ) as (driver, learner, *runners):
        await asyncio.wait_for(driver.finished, 100)
        _check(driver, learner, batch)
        status = await broker.status()
        assert len(status["runners"]) == num_runners
        assert status["num_messages"] > 50
        for runner in runners:
            assert runner.has_sampled.is_set()
            assert runner.versions == sorted(set(runner.versions))
    fragment_bytes = broker._core.state.ledger.mean_bytes
    await broker.stop()
    await broker.stop()
    assert await broker.ended == ("stopped", "")
    most_fragments = 1 + batch // 32  # the last that is sampled ahead, and the batch that is due
    assert limit / 2 < most_bytes <= limit + most_fragments * fragment_bytes


async def test_quarantined_fragments_can_be_replayed_from_their_files(tmp_path: Path):
    broker = BrokerRole("run", quarantine_dir=str(tmp_path / "quarantine"))
    await broker.start()
    fragment = Fragment("runner/../x", 1, 7, 0, 5, 1, 0, {})
    frames = tuple(encode_fragment(fragment, [], {"seed": 3}))
    broker._do([Quarantine(FragmentId("runner/../x", 1, 7), "3 learners died with it", frames)])
    await broker.stop()
    (written,) = (tmp_path / "quarantine").glob("*.fragment")
    assert decode_fragment(fragment_from_bytes(written.read_bytes()))[0] == fragment
    assert "3 learners died" in written.with_suffix(".json").read_text()


async def test_a_broker_that_fails_says_so_and_does_nothing_more(monkeypatch: pytest.MonkeyPatch, caplog):
    broker = BrokerRole("run", _OPTIONS)
    await broker.start()
    failures = []

    def fail(now):
        failures.append(now)
        raise AssertionError("half done")

    monkeypatch.setattr(broker._core, "tick", fail)
    with pytest.raises(AssertionError, match="half done"):
        await broker.ended
    with pytest.raises(AssertionError, match="half done"):
        await broker.run_until_failure()
    broker._tick()
    assert len(failures) == 1
    assert "the broker fails" in caplog.text
    await broker.stop()


@pytest.mark.parametrize("last_message", [Goodbye("done"), None])
async def test_a_peer_whose_goodbye_is_read_after_its_connection_is_gone_has_left(last_message: Any):
    broker = BrokerRole("run", _OPTIONS)
    addresses = await broker.start()
    try:
        state = broker._core.state
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(addresses["data"])
            dealer.send_multipart(encode_message(Hello("runner", "runner-0", "u", run_id="run", num_envs=1)))
            await until_async(lambda: bool(state.runners), 20)
            (peer,) = state.by_routing
            if last_message is not None:
                dealer.send_multipart(encode_message(last_message))
            dealer.close(linger=20_000)
        wait_until_gone(broker, peer)  # all in one turn of the loop, in which the broker reads nothing
        broker._do([Send(peer, BrokerBeat(1))])
        broker._tell()
        await until_async(lambda: not state.runners, 20)
        expected = "left" if last_message is not None else "lost"
        assert [notice.event for notice in state.notices] == ["joined", expected]
    finally:
        await broker.stop()


def wait_until_gone(broker: BrokerRole, peer: bytes) -> None:
    assert broker._listeners is not None
    deadline = time.monotonic() + 20
    with contextlib.suppress(PeerLostError):
        while time.monotonic() < deadline:
            broker._listeners.send(peer, encode_message(BrokerBeat(1)))
            time.sleep(0.01)
        raise AssertionError("it is still connected")
