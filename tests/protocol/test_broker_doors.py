"""Who is let in to the broker and may say what; what it tells onlookers, its driver and its peers."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner

from rlzmq.wire.messages import (
    Committed,
    DriverState,
    Goodbye,
    LearnerState,
    Lease,
    Notice,
    Progress,
    Refused,
    Rejected,
    RunnerState,
    StatusRequest,
    TraceEvents,
    Weights,
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


def _waits(bench: Bench) -> list[str]:
    return bench.core.status()["waits"]


def _progress(bench: Bench) -> Progress:
    bench.now += 1.0
    bench.tick()
    (progress,) = bench.sent("driver", Progress)
    return progress


def test_a_working_broker_says_what_it_holds_and_since_when():
    bench = Bench()
    bench.ready_run(batch=400)
    bench.now = 1.0
    bench.runner("b")
    bench.runner("a")
    (lease, _) = bench.state.leases.of_peer("uuid-b")
    bench.now = 3.0
    bench.fragment(lease.lease_id, steps=20, runner="b")
    for _ in range(2):
        bench.fragment(steps=20, runner="b", seq=0)
    with bench.grants_nothing():
        bench.runner("idle")
        bench.now = 7.0
        bench.send("top", StatusRequest())
    status = bench.core.status()
    assert [runner["name"] for runner in status["runners"]] == ["a", "b", "idle"]
    a, b, idle = status["runners"]
    assert (a["num_leases"], a["env_steps_per_s"], a["num_env_steps"]) == (1, 0.0, 0)
    assert (a["oldest_lease_s"], idle["num_leases"], idle["oldest_lease_s"]) == (6.0, 0, 0.0)
    assert (b["num_leases"], b["oldest_lease_s"]) == (2, 6.0)
    assert (b["num_uncommitted"], b["num_env_steps"], b["env_steps_per_s"]) == (1, 20, 10.0)
    assert (b["incarnation"], b["is_suspect"], b["num_bad"]) == (1, False, 0)
    assert status["learners"] == [{"name": "learner-0", "rank": 0, "next_update": 0}]
    assert (status["num_fragments_held"], status["num_duplicates"]) == (1, 2)
    assert status["oldest_fragment_s"] == 4.0
    assert status["fragment_bytes"] == bench.state.ledger.num_bytes > 0
    assert (status["has_driver"], status["next_commit"], status["open_updates"]) == (True, 0, [0])


def test_how_long_those_at_work_may_make_no_progress():
    bench = Bench()
    bench.ready_run(batch=20)
    assert _progress(bench).patience_s == 0.0, "nobody is at work"
    bench.runner()
    bench.runner("idle")
    for name, pace_s in (("runner", 1.0), ("idle", 90.0)):
        bench.send(name, RunnerState(0, (), (1,), True, -1, 1, pace_s))
    assert _progress(bench).patience_s == 30.0
    bench.send("runner", RunnerState(0, (), (1,), True, -1, 2, 20.0))
    assert _progress(bench).patience_s == 100.0
    bench.fragment(1, steps=20)
    bench.send("learner-0", LearnerState(1, 0, (0,), (0,), (1,), (2,), 0, 300.0))
    assert _progress(bench).patience_s == 300.0, "as the rank says"


def test_a_broker_names_what_an_update_lacks():
    bench = Bench()
    bench.driver()
    bench.open(3)
    assert _waits(bench) == ["broker: waits for the driver to open update 0"]
    bench.now = 1.5
    bench.open(0, batch=40)
    assert _waits(bench)[-1] == "broker: waits for learners: the group has 0, registered: none"
    bench.learner(0, 2)
    bench.now = 4.0
    bench.runner("a")
    assert _waits(bench) == [
        "broker: has been collecting update 0 for 2.5 s: 0 of 40 env steps have arrived, 0 are leased",
        "broker: waits for rank 0's weights of version 0",
        "a: has no lease, last heard 0.0 s ago",
        "broker: waits for learners: the group has 2, registered: learner-0",
    ]
    bench.learner(1, 2)
    bench.weights(0)
    bench.now = 6.0
    bench.tick()
    lines = _waits(bench)
    assert lines == [
        "broker: has been collecting update 0 for 4.5 s: 0 of 40 env steps have arrived, 40 are leased",
        "a: samples a lease granted 2.0 s ago, last heard 2.0 s ago",
    ]


def test_a_damaged_payload_of_a_known_peer_is_refused_and_nothing_changes():
    bench = Bench()
    bench.learner()
    bench.send("learner-0", Weights(1, 0), (b"not a publication",))
    assert bench.sent("learner-0", Rejected)[0].reason == "malformed"
    bench.hello("learner-1", "learner", (b"", b"x"), rank=0, num_ranks=1, generation=2)
    assert bench.sent("learner-1", Refused)[0].reason == "array"
    assert bench.state.generation == 1


def test_of_strangers_the_driver_hears_twenty_per_second_after_two_hundred():
    bench = Bench()
    bench.driver()
    heard = []
    for now in (0.0, 0.5, 0.5, 100.0):
        bench.now = now
        num = 0
        for number in range(250):
            bench.hello(f"x-{now}-{number}", "runner", name=f"a@{number}", num_envs=0)
            num += len(bench.sent("driver", Notice))
        heard.append(num)
    assert heard == [200, 10, 0, 200]
    bench.hello("top", "observer", run_id="another")
    assert bench.sent("driver", Notice) == [], "observers are strangers, too"


@pytest.mark.parametrize("is_away", [False, True])
def test_a_report_lets_go_of_fragments_also_of_a_runner_that_has_left(is_away):
    bench = bench_with_runner(batch=20)
    bench.fragment(bench.leases()[0].lease_id, steps=20)
    bench.done(bench.make_ready())
    if is_away:
        bench.send("runner", Goodbye("leaving"))
    bench.send("driver", DriverState(-1, 1))
    assert bench.sent("runner", Committed) == ([] if is_away else [Committed(1, 1, ())])
    bench.runner()
    assert bench.sent("runner", Welcome)


def test_env_steps_move_an_update_that_is_collected_and_not_one_that_is_trained():
    bench = bench_with_runner(batch=40)
    leases = [lease.lease_id for lease in bench.sent("runner", Lease)]

    def step(progress: int) -> int:
        state = RunnerState(0, (), tuple(leases), True, -1, progress)
        bench.send("runner", state)
        return _progress(bench).num_moves

    assert [step(1), step(2), step(2), step(3)] == [1, 2, 2, 3]
    assert _progress(bench).patience_s > 0
    assert "collecting update 0" in bench.core.status()["waits"][0]
    assert bench.core.status()["still_s"] == 2.0
    bench.fragment(leases.pop(0), steps=20)
    bench.fragment(leases.pop(0), steps=20)
    assert bench.state.plans
    collected = _progress(bench).num_moves
    assert collected == 5
    assert step(4) == step(5) == collected
    assert "waits for READY of update 0 from learner-0" in bench.core.status()["waits"][0]


def test_heartbeats_of_a_runner_say_that_it_is_heard():
    bench = Bench(peer_timeout_s=3.0)
    bench.runner()
    for now in (2.0, 4.0, 6.0):
        bench.now = now
        bench.send("runner", RunnerState(0, (), (), False, -1, 0))
        bench.tick()
    assert bench.state.runners
