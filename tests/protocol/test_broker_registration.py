"""Who is let in to the broker, who may say what, and who is gone."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner, publication

from rlzmq.protocol.events import Malformed, PeerLost, Send, Tick
from rlzmq.wire.fragment_message import pack_ranges
from rlzmq.wire.messages import (
    Config,
    ConfigRequest,
    Goodbye,
    Notice,
    Refused,
    Rejected,
    StatusRequest,
    Weights,
    Welcome,
)


def test_every_role_is_welcomed_with_an_incarnation():
    bench = Bench()
    bench.runner(incarnation=0)
    (welcome,) = bench.sent("runner", Welcome)
    assert (welcome.incarnation, welcome.broker_incarnation, welcome.hello_id) == (1, 5, 1)


def test_a_repeated_hello_is_answered_and_changes_nothing():
    bench = Bench()
    bench.runner()
    bench.hellos["runner"] = 0
    bench.runner()
    assert len(bench.sent("runner", Welcome)) == 1
    assert len(bench.state.runners) == 1


def test_a_new_process_of_a_name_fences_the_old_one():
    bench = Bench()
    bench.ready_run()
    bench.runner(name="runner")
    bench.hello("other", "runner", name="runner", num_envs=4)
    assert bench.sent("other", Welcome)[0].incarnation == 2
    assert bench.sent("runner", Refused)[0].reason == "fenced"
    bench.fragment(steps=7)
    assert bench.sent("runner", Rejected)[0].reason == "fenced"
    bench.fragment(steps=7, seq=0)
    assert bench.state.ledger.accounting.dropped == {"fenced": 7}
    bench.runner()
    assert bench.sent("runner", Refused)[0].reason == "fenced"


def test_a_lower_incarnation_is_refused():
    bench = Bench()
    bench.runner(incarnation=3)
    bench.hello("other", "runner", name="runner", num_envs=4, incarnation=3)
    assert bench.sent("other", Refused)[0].reason == "fenced"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run_id": "another"}, "run_id"),
        ({"config_digest": "theirs"}, "config_digest"),
        ({"spaces_digest": "theirs"}, "spaces_digest"),
        ({"package_version": "0.0.1"}, "package_version"),
        ({"num_envs": 0}, "num_envs"),
        ({"num_envs": 2**20 + 1}, "num_envs"),
        ({"uuid": "a\nb"}, "identity"),
    ],
)
def test_peers_that_do_not_match_the_run_are_refused_with_both_values(fields, reason):
    bench = Bench()
    bench.driver(config_digest="ours", spaces_digest="ours", package_version="0.1.0")
    bench.runner(**fields)
    (refused,) = bench.sent("runner", Refused)
    assert refused.reason == reason
    assert bench.sent("driver", Notice)[0].event == "refused"
    assert not bench.state.runners


def test_roles_say_only_what_is_theirs():
    bench = Bench()
    bench.runner()
    bench.send("runner", Weights(1, 5), (publication(5),))
    assert bench.sent("runner", Rejected)[0].reason == "role"
    assert bench.state.weights is None
    assert bench.state.refused == {"role": 1}
    bench.hello("alien", "pirate")
    assert bench.sent("alien", Refused)[0].reason == "role"


def test_strangers_are_asked_to_say_hello():
    bench = Bench()
    bench.send("nobody", StatusRequest())
    assert bench.sent("nobody", Refused)[0].reason == "unknown_peer"
    bench.send("nobody", Goodbye("x"))
    assert bench.out == []


def test_malformed_messages_are_counted_and_answered_to_those_we_know():
    bench = Bench()
    bench.driver()
    bench.runner()
    bench.event(Malformed(b"runner", "dtype", "array 0: dtype 'O'"))
    assert bench.sent("runner", Rejected)[0].detail == "array 0: dtype 'O'"
    assert bench.sent("driver", Notice)[0].event == "protocol_error"
    bench.event(Malformed(b"nobody", "malformed", "x"))
    assert bench.out == []
    bench.event(Malformed(b"old-release", "version", "version 3, here 1"))
    assert bench.sent("old-release", Refused)[0].detail == "version 3, here 1"
    assert bench.state.refused == {"dtype": 1, "malformed": 1, "version": 1}


def test_silent_peers_are_lost_and_their_leases_granted_anew():
    bench = Bench(peer_timeout_s=4.0)
    bench.ready_run(batch=4)
    bench.runner("a")
    assert len(bench.leases("a")) == 1
    bench.now = 3.0
    bench.hello("driver", "driver")
    bench.learner()
    bench.runner("b")
    assert bench.leases("b") == []
    bench.now = 4.5
    bench.event(Tick())
    assert len(bench.leases("b")) == 1
    assert [n.event for n in bench.sent("driver", Notice)] == ["lost"]


def test_notices_wait_for_the_driver():
    bench = Bench()
    bench.runner()
    bench.driver()
    assert [notice.event for notice in bench.sent("driver", Notice)] == ["joined", "joined"]


def test_the_configuration_is_given_to_whoever_asks_before_hello():
    bench = Bench()
    bench.send("new", ConfigRequest())
    assert [item.message.reason for item in bench.out] == ["no_driver"]
    bench.driver()
    bench.send("driver", Config("run", "digest"), (b"the config",))
    bench.send("new", ConfigRequest())
    assert bench.out == [Send(b"new", Config("run", "digest"), (b"the config",))]


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
        assert (refused.reason, refused.detail) == (
            "name",
            "'runner-0@host' is the name of another runner, which is registered",
        )
    assert list(bench.state.runners) == ["uuid-victim"]
    assert not bench.state.fenced


def test_who_started_both_may_replace_it_and_a_name_without_its_process_is_free():
    bench = Bench()
    bench.hello("old", "runner", name="runner-0@host", num_envs=4, incarnation=1)
    bench.hello("new", "runner", name="runner-0@host", num_envs=4, incarnation=2, replaces="uuid-old")
    assert list(bench.state.runners) == ["uuid-new"]
    assert "uuid-old" in bench.state.fenced
    bench.event(PeerLost(b"new"))
    bench.hello("stranger", "runner", name="runner-0@host", num_envs=4, incarnation=0)
    assert list(bench.state.runners) == ["uuid-stranger"]


def test_long_texts_are_cut_where_they_leave():
    bench = Bench()
    bench.event(Malformed(b"old-release", "version", "x" * 5000))
    assert len(bench.sent("old-release", Refused)[0].detail) == 1000


@pytest.mark.parametrize(
    ("fields", "num_frames"),
    [
        ({}, 1),
        ({}, 3),
        ({}, 4),
        ({"training_updates": (0,), "training_attempts": (7,)}, 2),
        ({"training_updates": (0,), "training_attempts": ()}, 4),
        ({"training_updates": (0,), "training_attempts": (7, 8)}, 4),
    ],
)
def test_a_learner_whose_frames_do_not_fit_what_it_says_is_refused(fields, num_frames):
    bench = Bench()
    frames = tuple(pack_ranges([]) * 2)[:num_frames]
    bench.hello("learner-0", "learner", frames, rank=0, num_ranks=1, generation=1, **fields)
    (refused,) = bench.sent("learner-0", Refused)
    num_updates = len(fields.get("training_updates", ()))
    assert (refused.reason, refused.detail, refused.generation) == (
        "schema",
        f"a learner's HELLO with {num_updates} updates came with {num_frames} frames",
        1,
    )
    assert bench.state.refused == {"schema": 1}
    assert not bench.state.ranks


def test_a_hello_that_comes_twice_is_answered_by_a_welcome_alone_and_one_that_comes_late_not_at_all():
    bench = bench_with_runner()
    bench.runner()
    bench.hellos["runner"] = 1
    bench.runner()
    assert [type(item.message) for item in bench.out] == [Welcome]
    for peer in ("runner", "another connection"):
        bench.hellos[peer] = 0
        bench.hello(peer, "runner", num_envs=4, incarnation=1, name="runner", uuid="uuid-runner")
        assert bench.out == []


def test_what_is_refused_is_counted_by_its_reason():
    bench = Bench()
    bench.driver()
    bench.hello("alien", "pirate")
    bench.runner(num_envs=0)
    bench.runner(num_envs=0)
    assert bench.state.refused == {"role": 1, "num_envs": 2}


def test_the_driver_is_not_told_of_processes_that_were_superseded():
    bench = Bench()
    bench.driver()
    for incarnation, peer in ((1, "old"), (2, "new")):
        bench.hello(peer, "runner", name="runner", num_envs=4, incarnation=incarnation)
    bench.hello("old", "runner", name="runner", num_envs=4, incarnation=1)
    assert bench.sent("old", Refused)[0].reason == "fenced"
    assert bench.sent("driver", Notice) == []
    assert bench.state.refused == {"fenced": 1}
