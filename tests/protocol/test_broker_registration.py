"""Who is let in to the broker, what outlives a connection, who may say what; what a driver asks for."""

from __future__ import annotations

import pytest
from core_fakes import Bench

from rlzmq.wire.messages import (
    Goodbye,
    Notice,
    Refused,
    Rejected,
    StatusRequest,
    TraceEvents,
    Welcome,
)
from rlzmq.wire.payloads import pack_ranges


def test_strangers_are_asked_to_say_hello():
    bench = Bench()
    bench.send("nobody", StatusRequest())
    assert bench.sent("nobody", Refused)[0].reason == "unknown_peer"
    bench.send("nobody", Goodbye("x"))
    assert bench.out == []


def test_a_runner_from_outside_cannot_take_the_name_of_one_that_is_there():
    bench = Bench()
    bench.driver()
    bench.hello("victim", "runner", name="runner-0@host", num_envs=4, incarnation=0)
    for incarnation in (0, 1, 2, 10**9):
        bench.hello(
            "thief",
            "runner",
            name="runner-0@host",
            num_envs=4,
            incarnation=incarnation,
            replaces="uuid-of-nobody",
        )
        (refused,) = bench.sent("thief", Refused)
        assert refused.reason == "name"
    assert list(bench.state.runners) == ["uuid-victim"]
    assert not bench.state.fenced


@pytest.mark.parametrize(
    ("fields", "num_frames"),
    [
        ({}, 1),
        ({}, 4),
        ({"training_updates": (0,), "training_attempts": (7,)}, 2),
        ({"training_updates": (0,), "training_attempts": (7, 8)}, 4),
    ],
)
def test_a_learner_whose_frames_do_not_fit_what_it_says_is_refused(fields, num_frames):
    bench = Bench()
    frames = tuple(pack_ranges([]) * 2)[:num_frames]
    bench.hello("learner-0", "learner", frames, rank=0, num_ranks=1, generation=1, **fields)
    assert bench.sent("learner-0", Refused)[0].reason == "schema"
    assert not bench.state.ranks


def _is_known(bench: Bench, connection: str) -> bool:
    bench.send(connection, StatusRequest())
    return not bench.sent(connection, Refused)


# ------------------------------------------------------------------ who may register


@pytest.mark.parametrize(
    ("rank", "num_ranks", "is_welcome"),
    [(0, 1, True), (1, 2, True), (0, 2**16, True), (-1, 1, False), (1, 1, False), (0, 2**16 + 1, False)],
)
def test_ranks_lie_within_their_group(rank, num_ranks, is_welcome):
    bench = Bench()
    frames = tuple(pack_ranges([]))
    bench.hello("learner", "learner", frames, rank=rank, num_ranks=num_ranks, generation=1)
    assert len(bench.sent("learner", Welcome)) == is_welcome
    assert [refused.reason for refused in bench.sent("learner", Refused)] == ["rank"] * (not is_welcome)


@pytest.mark.parametrize(
    "fields", [{"uuid": "another"}, {"num_ranks": 3}, {"uuid": "another", "num_ranks": 3}]
)
def test_a_place_in_a_generation_is_taken_once(fields):
    bench = Bench()
    bench.learner(0, 2)
    bench.learner(0, **{"num_ranks": 2, **fields})
    assert bench.sent("learner-0", Refused)[0].reason == "fenced"
    bench.learner(1, 2)
    assert bench.sent("learner-1", Welcome)


def test_who_came_before_the_driver_and_does_not_fit_is_turned_away_when_it_comes():
    bench = Bench()
    bench.runner("alien", spaces_digest="theirs")
    bench.runner("ours", spaces_digest="ours")
    bench.hello("top", "observer")
    bench.driver(spaces_digest="ours")
    (refused,) = bench.sent("alien", Refused)
    detail = "spaces_digest: the run has 'ours', the peer has 'theirs'"
    assert (refused.reason, refused.detail) == ("spaces_digest", detail)
    assert bench.state.refused == {"spaces_digest": 1}
    assert [n.detail for n in bench.sent("driver", Notice) if n.event == "refused"] == [detail]
    assert not _is_known(bench, "alien")
    assert all(_is_known(bench, peer) for peer in ("ours", "top", "driver"))
    assert list(bench.state.runners) == ["uuid-ours"]


@pytest.mark.parametrize("role", ["runner", "learner", "driver"])
def test_who_comes_back_on_another_connection_has_left_its_old_one(role):
    bench = Bench()
    fields = {"runner": {"num_envs": 4}, "learner": {"rank": 0, "num_ranks": 1, "generation": 1}}.get(
        role, {}
    )
    payload = tuple(pack_ranges([])) if role == "learner" else ()
    for hello_id, connection in enumerate(("old", "new"), start=1):
        bench.hello(connection, role, payload, name="peer", uuid="uuid", hello_id=hello_id, **fields)
    assert list(bench.state.by_routing) == [b"new"]
    bench.lose("old")
    assert len(bench.state.runners) + len(bench.state.ranks) + (bench.state.driver is not None) == 1
    assert not _is_known(bench, "old")


def test_what_was_sampled_before_the_drivers_lineage_is_dropped():
    bench = Bench()
    bench.runner()
    for generation in (1, 2, 3):
        bench.fragment(steps=10, generation=generation)
    bench.driver(next_update=4, generation=2)
    accounting = bench.state.ledger.accounting
    assert (accounting.dropped, accounting.pending) == ({"rolled_back": 10}, 20)
    bench.fragment(steps=5, generation=1)
    assert accounting.dropped == {"rolled_back": 15}


def test_stages_of_other_hosts_go_to_the_driver_but_not_too_often():
    bench = Bench()
    bench.driver()
    bench.runner()
    bench.runner("other")

    def forwarded(peer, payload=b"stages"):
        bench.send(peer, TraceEvents("forged"), (payload,))
        return [message.source for message in bench.sent("driver", TraceEvents)]

    assert [forwarded("runner") for _ in range(3)] == [["uuid-runner"], ["uuid-runner"], []]
    assert forwarded("other") == ["uuid-other"]
    bench.now += 1.0
    assert forwarded("runner") == ["uuid-runner"]
    bench.now += 1.0
    assert forwarded("runner", bytes(2 << 20)) == []
    assert bench.sent("runner", Rejected)[-1].reason == "bound"


def test_only_peers_and_other_versions_get_an_answer_to_what_is_malformed():
    bench = Bench()
    bench.driver()
    bench.runner()
    bench.refuse("runner", "dtype", "array 0: dtype 'O'")
    assert bench.sent("runner", Rejected)[0].detail == "array 0: dtype 'O'"
    assert bench.sent("driver", Notice)[0].event == "protocol_error"
    bench.refuse("nobody", "malformed", "x")
    assert bench.out == []
    bench.refuse("old-release", "version", "version 3, here 1")
    assert bench.sent("old-release", Refused)[0].detail == "version 3, here 1"
