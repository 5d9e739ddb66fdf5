"""The broker's records of who is registered: names, places in the group, what outlives a connection."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner

from rlzmq.protocol.events import Malformed, PeerLost
from rlzmq.wire.fragment_message import pack_ranges, unpack_ranges
from rlzmq.wire.messages import (
    DriverState,
    Goodbye,
    Notice,
    Refused,
    StatusRequest,
    UpdateCommitted,
    Welcome,
)


def _is_known(bench: Bench, connection: str) -> bool:
    bench.send(connection, StatusRequest())
    return not bench.sent(connection, Refused)


# ------------------------------------------------------------------ who may register


@pytest.mark.parametrize("fields", [{"name": ""}, {"uuid": ""}, {"name": "n" * 201}, {"uuid": "u" * 201}])
def test_a_peer_without_a_name_or_with_an_endless_one_is_refused(fields):
    bench = Bench()
    bench.hello("peer", "runner", num_envs=4, **fields)
    assert bench.sent("peer", Refused)[0].reason == "identity"


@pytest.mark.parametrize("fields", [{"name": "n"}, {"uuid": "u"}, {"name": "n" * 200}, {"uuid": "u" * 200}])
def test_names_of_one_to_200_characters_are_welcome(fields):
    bench = Bench()
    bench.hello("peer", "runner", num_envs=4, **fields)
    assert bench.sent("peer", Welcome)


@pytest.mark.parametrize(
    ("rank", "num_ranks", "is_welcome"),
    [(0, 1, True), (1, 2, True), (0, 2**16, True), (-1, 1, False), (1, 1, False), (0, 2**16 + 1, False)],
)
def test_ranks_lie_within_their_group(rank, num_ranks, is_welcome):
    bench = Bench()
    frames = tuple(pack_ranges([]))
    bench.hello("learner", "learner", frames, rank=rank, num_ranks=num_ranks, generation=1)
    if is_welcome:
        assert bench.sent("learner", Welcome)
    else:
        (refused,) = bench.sent("learner", Refused)
        assert (refused.reason, refused.detail) == (
            "rank",
            f"rank {rank} of {num_ranks} ranks does not exist",
        )


@pytest.mark.parametrize(
    "fields", [{"uuid": "another"}, {"num_ranks": 3}, {"uuid": "another", "num_ranks": 3}]
)
def test_a_place_in_a_generation_is_taken_once(fields):
    bench = Bench()
    bench.learner(0, 2)
    bench.learner(0, **{"num_ranks": 2, **fields})
    (refused,) = bench.sent("learner-0", Refused)
    assert (refused.reason, refused.detail) == ("fenced", "rank 0 of generation 1 is taken")
    bench.learner(1, 2)
    assert bench.sent("learner-1", Welcome)


def test_who_came_before_the_driver_and_does_not_fit_is_turned_away_when_it_comes():
    bench = Bench()
    bench.runner("alien", config_digest="theirs")
    bench.runner("ours", config_digest="ours")
    bench.hello("top", "observer")
    bench.driver(config_digest="ours")
    (refused,) = bench.sent("alien", Refused)
    detail = "config_digest: the run has 'ours', the peer has 'theirs'"
    assert (refused.reason, refused.detail) == ("config_digest", detail)
    assert bench.state.refused == {"config_digest": 1}
    assert [n.detail for n in bench.sent("driver", Notice) if n.event == "refused"] == [detail]
    assert [_is_known(bench, peer) for peer in ("alien", "ours", "top", "driver")] == [
        False,
        True,
        True,
        True,
    ]
    assert list(bench.state.runners) == ["uuid-ours"]


# ------------------------------------------------------------------ what outlives a connection


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
    bench.event(PeerLost(b"old"))
    assert len(bench.state.runners) + len(bench.state.ranks) + (bench.state.driver is not None) == 1
    assert not _is_known(bench, "old")


def test_who_was_given_an_incarnation_keeps_it():
    bench = Bench()
    for _ in range(3):
        bench.hello("runner", "runner", num_envs=4, incarnation=0)
        assert bench.sent("runner", Welcome)[0].incarnation == 1


def test_what_is_known_of_a_runner_outlives_its_connection():
    bench = bench_with_runner(batch=400)
    (lease, _) = bench.leases()
    bench.now = 2.0
    bench.fragment(lease.lease_id, steps=20)
    bench.event(Malformed(b"runner", "dtype", "x"))
    before = bench.core.status()["runners"][0]
    assert (before["num_env_steps"], before["num_bad"], before["env_steps_per_s"]) == (20, 1, 10.0)
    bench.hello("again", "runner", num_envs=4, incarnation=1, name="runner", uuid="uuid-runner", hello_id=9)
    assert bench.core.status()["runners"][0] == before
    bench.runner("idle", num_envs=64)
    bench.send("idle", Goodbye("bye"))
    assert bench.state.most_envs == 4, "what it has shown"


def test_ranks_are_told_what_a_runner_said_it_holds_when_it_registered():
    bench = Bench()
    bench.ready_run(batch=20)
    bench.runner(first_unacked=7, next_seq=9)
    bench.fragment(steps=20, seq=7)
    bench.done(bench.make_ready())
    bench.out = bench.send("driver", DriverState(-1, 1))
    (payload,) = [item.payload for item in bench.out if isinstance(item.message, UpdateCommitted)]
    assert [(item.fragment.runner, item.fragment.seq) for item in unpack_ranges(payload)] == [
        ("uuid-runner", 7)
    ]


# ------------------------------------------------------------------ who leaves


def test_a_rank_that_leaves_leaves_its_place():
    bench = Bench()
    bench.learner(0, 2)
    bench.learner(1, 2)
    bench.send("learner-1", Goodbye("enough"))
    assert [learner["rank"] for learner in bench.core.status()["learners"]] == [0]
    assert not bench.state.group_is_complete


def test_a_rank_of_a_generation_that_is_over_does_not_take_its_successor_along():
    bench = Bench()
    bench.hello("old", "learner", tuple(pack_ranges([])), rank=0, num_ranks=1, generation=1)
    bench.hello("new", "learner", tuple(pack_ranges([])), rank=0, num_ranks=1, generation=2)
    bench.event(PeerLost(b"old"))
    assert [learner["name"] for learner in bench.core.status()["learners"]] == ["new"]


def test_the_reason_of_an_expulsion_is_cut():
    bench = Bench()
    bench.runner()
    for _ in range(10):
        bench.event(Malformed(b"runner", "dtype", "x" * 2000))
    (refused,) = bench.sent("runner", Refused)
    assert (refused.reason, len(refused.detail)) == ("expelled", 1000)
