"""Who is let in to the broker, who may say what, and who is gone."""

from __future__ import annotations

import pytest
from core_fakes import Bench, publication

from rlzmq.protocol.events import Malformed, PeerLost, Send
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
)


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
