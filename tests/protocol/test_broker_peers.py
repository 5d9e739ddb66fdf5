"""The broker's records of who is registered: names, places in the group, what outlives a connection."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner

from rlzmq.protocol.events import Malformed, PeerLost, Tick
from rlzmq.wire.fragment_message import pack_ranges, unpack_ranges
from rlzmq.wire.messages import (
    DriverState,
    Goodbye,
    LearnerState,
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


def test_a_runner_that_has_worked_is_listened_for_after_it_came_back():
    bench = Bench(late_after_s=2.0)
    bench.ready_run(batch=400)
    bench.runner()
    bench.fragment(bench.leases()[0].lease_id, steps=20)
    bench.now = 0.5
    bench.runner()
    told = []
    for now in (1.0, 1.5, 2.0, 2.5, 3.0):
        bench.now = now
        bench.event(Tick())
        told += [(now, notice.event, notice.name) for notice in bench.sent("driver", Notice)]
    assert told == [(2.5, "silent", "runner")], "from its HELLO on"


def test_how_long_a_peer_may_be_silent_is_an_option():
    bench = Bench(late_after_s=5.0, heartbeat_s=0.5)
    bench.ready_run(batch=400)
    bench.runner()
    bench.fragment(bench.leases()[0].lease_id, steps=20)
    told = []
    for halves in range(1, 12):
        bench.now = halves / 2
        bench.event(Tick())
        told += [(bench.now, notice.event) for notice in bench.sent("driver", Notice)]
    assert told == [(5.0, "silent")]


def test_a_rank_that_is_alone_may_take_long_for_its_first_minibatch():
    bench = Bench(first_hung_after_s=100.0, peer_timeout_s=1000.0)
    bench.driver()
    bench.learner()
    told = []
    for now in range(1, 140):
        bench.now = float(now)
        bench.learner()  # it registers again now and then: that is no progress
        bench.send("learner-0", LearnerState(1, 1, (1,), (0,), (1,), (2,), 0))
        bench.event(Tick())
        told += [(bench.now, notice.event) for notice in bench.sent("driver", Notice)]
    assert told[0] == (101.0, "hung")


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


# ------------------------------------------------------------------ who hangs


def _state(
    progress: int, *, generation: int = 1, next_update: int = 1, is_training: bool = True
) -> LearnerState:
    return LearnerState(generation, next_update, (next_update,), (0,), (1,), (1 + is_training,), progress)


def _told(bench: Bench, until: float) -> list[tuple[float, str, str]]:
    """Notices to the driver, with their times, while nothing but ticks happens."""
    told = []
    while bench.now < until:
        bench.now += 0.5
        bench.event(Tick())
        told += [(bench.now, notice.event, notice.name) for notice in bench.sent("driver", Notice)]
    return told


@pytest.mark.parametrize(("progress", "is_listened_for"), [(0, False), (1, True)])
def test_a_rank_is_listened_for_once_it_has_entered_a_collective(progress, is_listened_for):
    bench = Bench(late_after_s=2.0)
    bench.driver()
    bench.learner()
    bench.send("learner-0", _state(progress))
    assert _told(bench, 3.0) == [(2.0, "silent", "learner-0")] * is_listened_for


def test_a_peer_that_falls_silent_again_is_told_of_again():
    bench = Bench(late_after_s=2.0, heartbeat_s=0.5, peer_timeout_s=1e4)
    bench.driver()
    bench.learner()
    bench.send("learner-0", _state(1))
    assert _told(bench, 2.5) == [(2.0, "silent", "learner-0")]
    bench.send("learner-0", _state(1))
    assert _told(bench, 20.0) == [(13.0, "silent", "learner-0")], "five times as late as before"


def test_a_rank_of_a_new_generation_has_not_worked_yet():
    bench = Bench(late_after_s=2.0)
    bench.driver()
    bench.learner()
    bench.send("learner-0", _state(1))
    bench.learner(generation=2)
    bench.event(Tick())
    assert _told(bench, 5.0) == []


def test_ranks_of_a_new_generation_are_not_judged_by_what_they_did_in_the_last():
    bench = Bench(late_after_s=2.0, rank_first_hung_after_s=2.0, peer_timeout_s=1e4)
    bench.driver()
    for rank in (0, 1):
        bench.learner(rank, num_ranks=2)
        bench.send(f"learner-{rank}", _state(9 - rank))
    for rank in (0, 1):
        bench.learner(rank, num_ranks=2, generation=2)
    assert _told(bench, 5.0) == []
    for rank in (0, 1):
        bench.send(f"learner-{rank}", _state(1, generation=2))
    assert [event for _, event, _ in _told(bench, 30.0)] == ["silent", "silent"], "none waits for another"


@pytest.mark.parametrize("is_there", [True, False])
def test_nobody_waits_for_a_rank_while_another_has_left(is_there):
    bench = Bench(late_after_s=2.0, rank_first_hung_after_s=2.0, peer_timeout_s=1e4)
    bench.driver()
    for rank in (0, 1):
        bench.learner(rank, num_ranks=2)
        bench.send(f"learner-{rank}", _state(9 - rank))
    if not is_there:
        bench.event(PeerLost(b"learner-0"))
    assert ((2.0, "hung", "learner-1") in _told(bench, 10.0)) is is_there


def test_the_time_between_two_updates_is_not_the_only_ranks_pace():
    bench = Bench(first_hung_after_s=100.0, peer_timeout_s=1e4, late_after_s=1e4)
    bench.driver()
    bench.learner()
    for progress in (1, 2):
        bench.now += 1.0
        bench.send("learner-0", _state(progress))
    for now in (100.0, 1000.0):
        bench.now = now
        bench.send("learner-0", _state(2, is_training=False))
    bench.send("learner-0", _state(2))
    assert _told(bench, 1029.5) == []
    assert _told(bench, 1030.0) == [(1030.0, "hung", "learner-0")]


def test_what_a_stopped_broker_missed_is_no_pause_of_the_only_rank():
    bench = Bench(peer_timeout_s=20.0, late_after_s=1e4)
    bench.driver()
    bench.learner()
    for progress in (1, 2):
        bench.now += 1.0
        bench.send("learner-0", _state(progress))
    bench.event(Tick())
    bench.now = 1000.0
    bench.event(Tick())
    assert bench.sent("driver", Notice) == []
    bench.send("learner-0", _state(2))
    assert _told(bench, 1019.5) == []


def test_a_peer_that_was_heard_after_the_brokers_pause_has_its_time_from_then():
    for heard, lost_at in ((None, 6.0), (4.0, 8.0)):
        bench = Bench(peer_timeout_s=4.0)
        bench.runner()
        bench.event(Tick())
        bench.now = 0.5
        bench.event(Tick())
        bench.now = 2.0
        bench.event(Tick())
        bench.now = 4.0
        if heard is not None:
            bench.runner()
        bench.event(Tick())
        while bench.state.runners:
            bench.now += 0.5
            bench.event(Tick())
        assert bench.now == lost_at
