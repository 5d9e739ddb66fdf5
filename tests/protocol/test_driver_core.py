"""The driver's core, and what every peer's core does to stay registered."""

from __future__ import annotations

import dataclasses

import pytest
from core_fakes import TIMERS, messages_in, receive, welcome

from rlzmq.core.patience import Retries
from rlzmq.protocol import core as E
from rlzmq.protocol.driver_core import DriverCore, parse_report
from rlzmq.wire import messages as m
from rlzmq.wire.codec import FragmentId, WireError
from rlzmq.wire.payloads import FragmentRange, pack_blobs, pack_ranges, unpack_ranges


def _driver(*, is_welcome: bool = True, **options) -> DriverCore:
    core = DriverCore("run", "driver", "uuid", timers=TIMERS, **options)
    core.start(0.0)
    if is_welcome:
        welcome(core)
    return core


def _update(update_id: int) -> m.OpenUpdate:
    return m.OpenUpdate(update_id, 5, 2, update_id)


def _progress(**fields) -> m.Progress:
    return dataclasses.replace(m.Progress(0, -1, -1), **fields)


# ------------------------------------------------------------------ events


def _report(core, update_id=0, watermarks=(), dropped=None, accounting=None, **fields):
    fields = {"broker_incarnation": 5, "min_generation": core.min_generation, **fields}
    counts = {"sampled": 10, "trained": 10, "pending": 0} if accounting is None else accounting
    message = m.UpdateReport(
        update_id=update_id,
        generation=1,
        num_env_steps=10,
        num_kept_steps=10,
        num_trained_steps=10,
        accounting=counts,
        dropped=dropped or {},
        versions=(0,),
        version_steps=(10,),
        **fields,
    )
    marks = [
        FragmentRange(FragmentId(runner, 1, watermark), 0, int(is_gone))
        for runner, watermark, is_gone in watermarks
    ]
    payload = (*pack_ranges([]), *pack_blobs([]), *pack_blobs([b"r"]), *pack_ranges(marks))
    return receive(core, message, payload=payload)


def _hello(core) -> tuple[m.Hello, dict[str, int]]:
    """Its HELLO now, and the watermarks with it."""
    (send,) = [i for i in core.start(0.0) if isinstance(i, E.Send)]
    ranges = unpack_ranges(send.payload)
    assert all(item == FragmentRange(item.fragment, 0, 0) for item in ranges)
    return send.message, {item.fragment.runner: item.fragment.seq for item in ranges}


def test_what_reports_have_told_goes_to_the_next_broker():
    core = _driver()
    for update_id, marks in enumerate(
        [[("a", 4, False), ("b", 1, False)], [("a", 2, False)], [("b", 0, True)]]
    ):
        core.open_update(_update(update_id))
        _report(core, update_id, marks, dropped={"stale": update_id})
    hello, watermarks = _hello(core)
    assert watermarks == {"a": 4}, "none falls; b is gone"
    assert (hello.trained, hello.dropped, hello.next_update) == (10, {"stale": 2}, 3)


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"min_generation": 1}, [m.Reset]),
        ({"min_generation": 2}, []),
        ({"min_generation": 3}, []),
        ({"min_generation": 2, "next_open": 2}, [m.OpenUpdate]),
        ({"min_generation": 2, "next_open": 1}, [m.OpenUpdate, m.OpenUpdate]),
        ({"min_generation": 2, "connector_version": 3}, [m.ConnectorState]),
        ({"min_generation": 2, "is_paused": True}, [m.Resume]),
    ],
)
def test_exactly_what_the_broker_lacks_is_sent_again(fields, kinds):
    core = _driver()
    core.reset(2, 1)
    for update_id in (1, 2):
        core.open_update(_update(update_id))
    core.set_connector_state(4, b"state")
    out = receive(core, _progress(**{"next_open": 3, "connector_version": 4, **fields}))
    assert [type(item.message) for item in out if isinstance(item, E.Send)] == kinds
    assert isinstance(out[-1], E.Tell)


def test_a_driver_that_leaves_says_goodbye_and_does_nothing_any_more():
    core = _driver()
    assert core.leave(0.0, "enough") == [
        E.Send(b"", m.Goodbye("enough")),
        E.Stop("left", "enough"),
    ]
    assert core.tick(99.0) == core.leave(99.0, "again") == []


@pytest.mark.parametrize("num_metas", [0, 2])
def test_a_report_that_does_not_fit_together_is_refused(num_metas):
    message = m.UpdateReport(5, -1, 0, 1, True, 10, 10, {}, {}, (0,), (10,))
    fragments = pack_ranges([FragmentRange(FragmentId("a", 1, 0), 0, 5)])
    rest = (*pack_blobs([b"m"] * num_metas), *pack_blobs([]), *pack_ranges([]))
    with pytest.raises(WireError, match=f"1 fragments came with {num_metas} metas"):
        parse_report(message, (*fragments, *rest))
    with pytest.raises(WireError, match="as many numbers of env steps as weights versions"):
        parse_report(dataclasses.replace(message, versions=(0, 1)), (*fragments, *rest))
    with pytest.raises(WireError, match="8 payload frames, got 7"):
        parse_report(message, (*fragments, *rest)[:7])


# ------------------------------------------------------------------ staying registered


def test_hello_is_said_at_its_pace_until_welcome_then_heartbeats_at_the_brokers():
    core = _driver(is_welcome=False)
    said = []
    for quarters in range(1, 13):
        now = quarters / 4
        if quarters == 9:
            receive(core, m.Welcome("run", core._hello_id, 5, 1, 0.5), now)
        out = core.tick(now)
        said += [(now, type(item.message)) for item in out if isinstance(item, E.Send)]
    assert said == [(1.0, m.Hello), (2.0, m.Hello), (2.75, m.DriverState)]
    assert [type(item.message) for item in core.tick(3.25)] == [m.DriverState]


def test_a_broker_that_says_nothing_for_its_time_is_greeted_again_and_again():
    core = _driver()
    receive(core, m.BrokerBeat(5), 0.5)
    receive(core, m.BrokerBeat(5), 1.0)
    said = []
    for quarters in range(5, 24):
        now = quarters / 4
        said += [now for _ in messages_in(core.tick(now), m.Hello)]
    assert said == [4.0, 5.0]
    assert core.heard_at == 1.0, "its own HELLO is no sign of life of the broker"
    receive(core, m.BrokerBeat(5), 5.75)
    assert core.heard_at == 5.75
    core.start(7.0)
    assert core.heard_at == 7.0


def test_many_refusals_of_one_unknown_peer_are_answered_once():
    core = _driver()
    assert messages_in(receive(core, m.Refused("unknown_peer", ""), 0.05), m.Hello) == []
    assert messages_in(receive(core, m.Refused("unknown_peer", ""), 0.1), m.Hello)
    assert messages_in(receive(core, m.Refused("unknown_peer", ""), 0.15), m.Hello) == []
    assert not core.is_welcome


def test_only_a_later_broker_replaces_one():
    core = _driver()
    for broker in (4, 5):
        assert receive(core, m.BrokerBeat(broker)) == []
    assert messages_in(receive(core, m.BrokerBeat(6)), m.Hello)
    assert receive(core, m.BrokerBeat(7)) == [], "it has said HELLO already"
    welcome(core, broker=4)
    assert not core.is_welcome, "of one that was replaced"
    welcome(core, broker=6)
    assert (core.is_welcome, core.broker_incarnation) == (True, 6)


def test_a_goodbye_or_a_refusal_ends_it_once():
    core = _driver()
    assert receive(core, m.Goodbye("done")) == [E.Stop("goodbye", "done")]
    assert receive(core, m.Refused("role", "x")) == []


def test_updates_are_opened_in_order():
    core = _driver()
    assert messages_in(core.open_update(_update(0)), m.OpenUpdate)
    with pytest.raises(ValueError, match="expected 1, got 0"):
        core.open_update(_update(0))


def test_the_tries_of_one_peer_in_a_row_are_counted_and_reported_once() -> None:
    retries = Retries(3)
    assert [retries.try_again("a") for _ in range(5)] == [False, False, True, False, False]
    assert not retries.try_again("b")


def test_a_large_message_begins_the_count_again() -> None:
    retries = Retries(2)
    retries.try_again("a")
    retries.passed("a")
    assert not retries.try_again("a")
