"""Cores with hand-made counterparts: each test says exactly what arrives, and sees what is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from rlzmq.protocol.broker.core import BrokerCore, BrokerOptions
from rlzmq.protocol.core import Instruction, PeerCore, PeerTimers, Received, Send
from rlzmq.wire.codec import new_publication_buffer, seal_publication
from rlzmq.wire.messages import (
    Fragment,
    Hello,
    Lease,
    OpenUpdate,
    ShardPlan,
    ShardReady,
    Train,
    UpdateDone,
    Weights,
    Welcome,
)
from rlzmq.wire.payloads import encode_fragment, pack_ranges

M = TypeVar("M")

# ------------------------------------------------------------------ what peers' tests need

TIMERS = PeerTimers(broker_silence_s=3.0, resend_s=2.0, snapshot_wait_s=0.05)


def receive(core: Any, message: Any, now: float = 0.0, payload: tuple = ()) -> list[Instruction]:
    """A message of the broker comes."""
    return core.handle(Received(b"", message, (b"", *payload)), now)


def messages_in(instructions: list[Instruction], kind: type[M]) -> list[M]:
    """Messages of a kind among them."""
    return [i.message for i in instructions if isinstance(i, Send) and isinstance(i.message, kind)]


def instructions_in(instructions: list[Instruction], kind: type[M]) -> list[M]:
    """Instructions of a kind among them."""
    return [i for i in instructions if isinstance(i, kind)]


def welcome(
    core: PeerCore, now: float = 0.0, broker: int = 5, hello_id: int | None = None
) -> list[Instruction]:
    """The broker answers a peer's newest HELLO."""
    return receive(core, Welcome("run", hello_id or core._hello_id, broker, 1, 1.0), now)


# ------------------------------------------------------------------ a broker


def publication(version: int, generation: int = 1, run_id: str = "run") -> Any:
    """A sealed publication of eight bytes."""
    buffer = new_publication_buffer(8)
    seal_publication(buffer, run_id=run_id, generation=generation, version=version, layout_digest="layout")
    return buffer


class Bench:
    """One BrokerCore at time `now`; peers are named by their routing id."""

    def __init__(self, **options: Any) -> None:
        self.core = BrokerCore(BrokerOptions("run", 5, **options))
        self.now = 0.0
        self.out: list[Any] = []
        self.seqs: dict[str, int] = {}
        self.hellos: dict[str, int] = {}

    @property
    def state(self):
        return self.core.state

    @contextmanager
    def grants_nothing(self) -> Iterator[None]:
        """No lease is granted in the block."""
        with mock.patch.object(self.core._grants, "progress"):
            yield

    def event(self, event: Received) -> list[Any]:
        self.out = self.core.handle(event, self.now)
        return self.out

    def send(self, peer: str, message: Any, payload: tuple = ()) -> list[Any]:
        return self.event(Received(peer.encode(), message, (b"", *payload)))

    def tick(self) -> list[Any]:
        self.out = self.core.tick(self.now)
        return self.out

    def refuse(self, peer: str, reason: str, detail: str) -> list[Any]:
        self.out = self.core.refuse(peer.encode(), reason, detail, self.now)
        return self.out

    def lose(self, peer: str) -> list[Any]:
        self.out = self.core.lost(peer.encode(), self.now)
        return self.out

    def sent(self, peer: str, kind: type[M]) -> list[M]:
        """Messages of a kind to a peer in the last output."""
        return [
            item.message
            for item in self.out
            if isinstance(item, Send) and item.peer == peer.encode() and isinstance(item.message, kind)
        ]

    def hello(self, peer: str, role: str, payload: tuple = (), **fields: Any) -> list[Any]:
        self.hellos[peer] = self.hellos.get(peer, 0) + 1
        fields = {"name": peer, "uuid": f"uuid-{peer}", "hello_id": self.hellos[peer], **fields}
        return self.send(peer, Hello(role, **fields), payload)

    def driver(self, **fields: Any) -> list[Any]:
        return self.hello("driver", "driver", **fields)

    def runner(self, name: str = "runner", **fields: Any) -> list[Any]:
        return self.hello(name, "runner", **{"num_envs": 4, "incarnation": 1, **fields})

    def learner(self, rank: int = 0, num_ranks: int = 1, generation: int = 1, **fields: Any) -> list[Any]:
        fields = {"rank": rank, "num_ranks": num_ranks, "generation": generation, **fields}
        return self.hello(f"learner-{rank}", "learner", (*pack_ranges([]), *pack_ranges([])[:0]), **fields)

    def weights(self, version: int, generation: int = 1) -> list[Any]:
        return self.send("learner-0", Weights(generation, version), (publication(version, generation),))

    def open(self, update_id: int = 0, batch: int = 40, num_ranks: int = 1, **terms: Any) -> list[Any]:
        fields = {"fragment_length": 5, "weights_version": update_id, "max_policy_lag": 0, **terms}
        return self.send("driver", OpenUpdate(update_id, batch // num_ranks, num_ranks, **fields))

    def ready_run(self, num_ranks: int = 1, **terms: Any) -> list[Any]:
        """Driver, learners, weights and an open update: leases flow as soon as a runner is there."""
        self.driver()
        for rank in range(num_ranks):
            self.learner(rank, num_ranks)
        self.weights(0)
        return self.open(num_ranks=num_ranks, **terms)

    def fragment(
        self, lease_id: int = 0, steps: int = 20, version: int = 0, runner: str = "runner", **fields: Any
    ) -> list[Any]:
        seq = fields.pop("seq", self.seqs.get(runner, 0))
        self.seqs[runner] = max(self.seqs.get(runner, 0), seq + 1)
        values = {"incarnation": 1, "generation": 1, "batch": {}, **fields}
        message = Fragment(
            runner=f"uuid-{runner}",
            seq=seq,
            lease_id=lease_id,
            num_env_steps=steps,
            weights_version=version,
            **values,
        )
        frames = tuple(bytes(memoryview(frame)) for frame in encode_fragment(message, [], {"seq": seq}))
        return self.event(Received(runner.encode(), message, frames))

    def leases(self, runner: str = "runner") -> list[Lease]:
        return self.sent(runner, Lease)

    def make_ready(self, rank: int = 0) -> ShardPlan:
        """Answers the shard plan in the last output with READY."""
        (plan,) = self.sent(f"learner-{rank}", ShardPlan)
        self.send(f"learner-{rank}", ShardReady(plan.update_id, plan.attempt, plan.generation, rank))
        return plan

    def both_ready(self) -> ShardPlan:
        """Answers the shard plans of two ranks in the last output with READY; returns rank 0's."""
        out = self.out
        plan = self.make_ready(0)
        self.out = out
        self.make_ready(1)
        return plan

    def done(self, plan: ShardPlan | Train, rank: int = 0, trained: bool = True) -> list[Any]:
        message = UpdateDone(plan.update_id, plan.attempt, plan.generation, rank, trained, 1)
        run = self.state.plans.get(plan.update_id)
        ranges = run.ranges if run is not None else []
        return self.send(f"learner-{rank}", message, (b"results", *pack_ranges(ranges)))


def bench_with_runner(*, steps: int = 0, **terms: Any) -> Bench:
    """A bench with a ready run (see `ready_run`) and a runner, which has delivered a fragment of so many steps."""
    bench = Bench()
    bench.ready_run(**terms)
    bench.runner()
    if steps:
        bench.fragment(steps=steps)
    return bench
