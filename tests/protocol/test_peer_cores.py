"""The cores of runner, learner rank and driver: what they wait for, give back, remember and tell; new weights."""

from __future__ import annotations

from typing import Any

import pytest
from core_fakes import TIMERS, instructions_in, messages_in, publication, receive, welcome

from rlzmq.protocol import core as E
from rlzmq.protocol import learner_core
from rlzmq.protocol.driver_core import DriverCore
from rlzmq.protocol.learner_core import LearnerCore, LearnerMemory, UnusableError
from rlzmq.protocol.runner_core import RunnerCore, WeightsReceiver
from rlzmq.wire import codec
from rlzmq.wire import messages as m
from rlzmq.wire.codec import (
    PUBLICATION_PREFIX_BYTES,
    FragmentId,
    WireError,
    new_publication_buffer,
    notice_of,
    open_publication,
    seal_publication,
)
from rlzmq.wire.payloads import FragmentRange, join_frames, pack_ranges, unpack_ranges

# ------------------------------------------------------------------ a runner


def _runner(begun: list[Any] | None = None) -> RunnerCore:
    def sample(*lease: Any) -> None:
        if begun is not None:
            begun.append(lease)

    core = RunnerCore("run", "runner", "uuid", sample=sample, num_envs=4, timers=TIMERS)
    core.start(0.0)
    welcome(core)
    core.take_weights(publication(0), 0.0)
    return core


def _lease(lease_id: int = 1, connector_version: int = -1) -> m.Lease:
    return m.Lease(lease_id, 5, 1, 0, True, connector_version=connector_version, timeout_s=30.0)


def test_a_fragment_that_does_not_fit_into_a_message_is_no_refused_message():
    core = _runner()
    receive(core, _lease())
    with pytest.raises(ValueError, match="a header has at most 65536 bytes") as caught:
        core.sampled(20, 0.0, batch={"meta": "x" * 70_000})
    assert not isinstance(caught.value, WireError)


def test_a_lease_waits_for_its_connector_state():
    core = _runner(begun := [])
    receive(core, m.ConnectorState(1), payload=(b"old",))
    assert receive(core, _lease(connector_version=2)) == []
    assert not begun
    receive(core, m.ConnectorState(2), payload=(b"new",))
    ((_, weights, connector_state),) = begun
    assert weights is not None
    assert connector_state == b"new"


# ------------------------------------------------------------------ a learner rank


def _range(seq: int, num_steps: int = 5, runner: str = "r") -> FragmentRange:
    return FragmentRange(FragmentId(runner, 1, seq), 0, num_steps)


@pytest.mark.parametrize("bad", ["none", "undecodable", "odd"])
def test_a_shard_is_refused_before_its_update_is_ready(bad: str):
    def decode(shard: m.Shard, frames: Any) -> int:
        if bad == "undecodable" and shard.index == 1:
            raise UnusableError("unusable", "its bytes")
        return shard.index

    def find_odd(decoded: Any) -> dict[int, str]:
        assert decoded == [0, 1]
        return {1: "its form"} if bad == "odd" else {}

    core = LearnerCore(
        "run", "learner-0", "uuid", decode=decode, find_odd=find_odd, train=lambda *_: None, timers=TIMERS
    )
    core.begin_generation(1, 0, 2, 0, 0.0)
    welcome(core)
    receive(core, m.ShardPlan(5, 0, 100, 1, 2, 10, 20))
    shards = [m.Shard(5, 0, 100, 1, index, FragmentId("r", 1, index), 3, 5) for index in (1, 0)]
    sent = [item for shard in shards for item in receive(core, shard, payload=(b"head", b"obs"))]
    assert len(messages_in(sent, m.ShardReady)) == (bad == "none")
    assert [refused.fragment.seq for refused in messages_in(sent, m.ShardRefused)] == [1] * (bad != "none")


def test_what_runners_no_longer_hold_is_forgotten_and_who_never_tells_does_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(learner_core, "_MAX_REMEMBERED_RUNNERS", 2)
    memory = LearnerMemory()
    for runner in "abac":
        memory.note_trained(tuple(pack_ranges([_range(0, runner=runner), _range(1, runner=runner)])))
    assert {item.fragment.runner for item in memory.ranges()} == {"a", "c"}, "b was not heard of for longest"
    memory.forget(tuple(pack_ranges([_range(1, 0, "a"), _range(2, 0, "c")])))
    assert list(memory.ranges()) == [_range(1, runner="a")]


# ------------------------------------------------------------------ the driver


def test_what_reports_have_told_goes_to_the_next_broker():
    core = DriverCore("run", "driver", "uuid", on_report=lambda _: None, tell=lambda _: None, timers=TIMERS)
    core.start(0.0)
    welcome(core)
    gone = [[("a", 4, 0), ("b", 1, 0)], [("a", 2, 0)], [("b", 0, 1)]]
    for update_id, watermarks in enumerate(gone):
        core.open_update(m.OpenUpdate(update_id, 5, 2, update_id))
        report = m.CommitReport(
            update_id=update_id, generation=1, broker_incarnation=5, min_generation=core.min_generation,
            num_env_steps=10, num_kept_steps=10, num_trained_steps=10, trained=10,
            dropped={"stale": update_id}, versions=(0,), version_steps=(10,),
        )  # fmt: skip
        marks = [FragmentRange(FragmentId(runner, 1, seq), 0, is_gone) for runner, seq, is_gone in watermarks]
        payload = (*pack_ranges([]), join_frames([]), join_frames([b"r"]), *pack_ranges(marks))
        receive(core, report, payload=payload)
    (hello,) = instructions_in(core.start(0.0), E.Send)
    assert unpack_ranges(hello.payload) == [FragmentRange(FragmentId("a", 1, 4), 0, 0)], (
        "none falls; b is gone"
    )
    told = hello.message
    assert isinstance(told, m.Hello)
    assert (told.trained, told.dropped, told.next_update) == (10, {"stale": 2}, 3)


def _publication(
    version: int, generation: int = 0, run_id: str = "run", layout: str = "layout", fill: int = 1
):
    buffer = new_publication_buffer(100)
    buffer[PUBLICATION_PREFIX_BYTES:] = fill
    seal_publication(buffer, run_id=run_id, generation=generation, version=version, layout_digest=layout)
    return buffer


def test_damaged_publications_are_refused():
    frame = bytearray(_publication(3).tobytes())
    for damaged in (frame[:100], frame[:-1], frame + b"x", b"\x63" + frame[1:], bytes(2) + frame[2:]):
        with pytest.raises(codec.WireError):
            open_publication(bytes(damaged))
    for length in (509, 65_535):  # what is left of the prefix is 508
        frame[2:4] = length.to_bytes(2, "little")
        with pytest.raises(codec.MalformedFrameError, match="wrong kind or header length"):
            open_publication(bytes(frame))


def test_wrong_run_layout_and_digest_are_refused():
    receiver = WeightsReceiver("run", "layout")
    header, body = open_publication(_publication(1))
    assert not receiver.offer(*open_publication(_publication(2, run_id="other")))
    assert not receiver.offer(*open_publication(_publication(2, layout="other")))
    assert not receiver.offer(header, bytes(100))
    assert receiver.order == (-1, -1)
    assert receiver.offer(header, body)
    assert not receiver.offer(header, body)


def test_a_notice_is_never_applied():
    receiver = WeightsReceiver()
    header, _ = open_publication(_publication(4))
    notice, body = open_publication(notice_of(header))
    assert len(body) == 0
    assert not receiver.offer(notice, body)


@pytest.mark.parametrize(
    ("have", "want", "exact", "allowed"),
    [
        ((0, 3), (0, 3), True, True),
        ((0, 4), (0, 3), True, False),
        ((0, 2), (0, 3), False, False),
        ((0, 4), (0, 3), False, True),
        ((1, 3), (0, 3), True, True),
        ((0, 3), (1, 3), True, False),
        ((-1, -1), (0, 0), False, False),
    ],
)
def test_a_lease_is_sampled_only_under_the_weights_it_names(have, want, exact, allowed):
    receiver = WeightsReceiver()
    receiver.generation, receiver.version = have
    assert receiver.satisfies(*want, exact=exact) is allowed
