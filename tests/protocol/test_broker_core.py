"""The broker's weights, and what it tells of itself."""

from __future__ import annotations

import pytest
from core_fakes import Bench, bench_with_runner, publication

from rlzmq.protocol.events import Publish, Received
from rlzmq.protocol.weights import open_publication
from rlzmq.wire.messages import (
    ConnectorState,
    Goodbye,
    Lease,
    Pause,
    Refused,
    Rejected,
    Resume,
    RunnerState,
    Weights,
)

# ------------------------------------------------------------------ weights


def test_weights_are_published_once_and_only_forward():
    bench = Bench()
    bench.learner()
    bench.weights(3)
    (published,) = [item for item in bench.out if isinstance(item, Publish)]
    assert open_publication(published.frame)[0].version == 3
    for version in (3, 2):
        bench.weights(version)
        assert bench.out == []
    bench.send("learner-0", Weights(1, 4), (publication(5),))
    assert bench.state.refused == {"weights": 1}


def test_large_weights_are_only_announced():
    bench = Bench(push_weights_below_bytes=4)
    bench.learner()
    bench.weights(3)
    (published,) = [item for item in bench.out if isinstance(item, Publish)]
    assert not open_publication(published.frame)[0].has_body


# ------------------------------------------------------------------ status


def test_a_damaged_payload_of_a_known_peer_is_refused_and_nothing_changes():
    bench = Bench()
    bench.learner()
    bench.send("learner-0", Weights(1, 0), (b"not a publication",))
    assert bench.sent("learner-0", Rejected)[0].reason == "malformed"
    bench.hello("learner-1", "learner", (b"", b"x"), rank=0, num_ranks=1, generation=2)
    assert bench.sent("learner-1", Refused)[0].reason == "array"
    assert bench.state.generation == 1


def test_goodbye_frees_the_leases():
    bench = bench_with_runner(batch=4)
    bench.event(Received(b"runner", Goodbye("done"), (b"",)))
    assert bench.state.leases.leases == {}
    assert [item.message for item in bench.core.stop("bye")].count(Goodbye("bye")) == 2


@pytest.mark.parametrize(
    ("version", "leases", "is_sent"), [(-1, (), True), (-1, (7,), False), (1, (), False)]
)
def test_a_connector_state_that_a_runner_never_got_is_sent_before_its_next_lease(version, leases, is_sent):
    bench = Bench()
    bench.ready_run()
    bench.send("driver", ConnectorState(1), (b"state",))
    bench.send("driver", Pause())
    bench.runner()
    assert bench.sent("runner", ConnectorState) == [ConnectorState(1)]
    bench.send("runner", RunnerState(0, 0, (), leases, False, 1, 0, version, 0, 0))
    bench.send("driver", Resume())
    kinds = [type(item.message) for item in bench.out if item.peer == b"runner"]
    assert kinds[-1] is Lease
    assert (kinds[0] is ConnectorState) is is_sent, "those with leases have it on its way"
