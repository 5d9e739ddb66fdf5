"""The broker's records of who is registered: names, places in the group, what outlives a connection."""

from __future__ import annotations

import pytest
from core_fakes import Bench

from rlzmq.protocol.events import PeerLost
from rlzmq.wire.fragment_message import pack_ranges
from rlzmq.wire.messages import (
    Notice,
    Refused,
    StatusRequest,
    Welcome,
)


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


# ------------------------------------------------------------------ who leaves
