"""Microseconds that the broker's decisions take per fragment, by the number of runners: its core, without sockets.

Runners, a learner and a driver exist as events of a simulated clock; only `BrokerCore.handle` is timed. A lease takes
about a second; runners differ in pace, and each one reports every half second. "exact": on-policy, a batch takes 2.5
full leases per runner; "ahead": one update of staleness, a full lease per runner and batch; "scarce": the same with 16
leases per batch, so most runners wait.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

LENGTH, NUM_ENVS = 20, 4  # of a full lease
TERMS: dict[str, tuple[int, Callable[[int], int]]] = {
    "exact": (0, lambda num_runners: num_runners * LENGTH * NUM_ENVS * 5 // 2),
    "ahead": (1, lambda num_runners: num_runners * LENGTH * NUM_ENVS),
    "scarce": (1, lambda num_runners: 16 * LENGTH * NUM_ENVS),
}
"""Staleness and env steps of a batch."""


def add_options(group: Any) -> None:
    group.add_argument("--runners", type=int, nargs="*", default=[16, 256, 1000, 10_000])


def report(options: argparse.Namespace) -> Iterator[str]:
    yield f"{'':8}{'runners':>8} {'fragment':>12} {'heartbeat':>12} {'tick':>12}"
    for kind in TERMS:
        for num_runners in options.runners:
            world = World(kind, num_runners)
            world.run(num_fragments=min(num_runners, 1000 if kind == "scarce" else num_runners))
            world.spent.clear()
            world.count.clear()
            world.run(num_fragments=1000)
            num = world.count
            fragment_s = sum(world.spent[key] for key in ("Fragment", "update")) / num["Fragment"]
            heartbeat_s = world.spent["RunnerState"] / max(1, num["RunnerState"])
            tick_s = world.spent["Tick"] / max(1, num["Tick"])
            yield (
                f"{kind:8}{num_runners:8} {1e6 * fragment_s:9.0f} µs {1e6 * heartbeat_s:9.0f} µs {1e6 * tick_s:9.0f} µs"
            )


class World:
    """A broker's core and its peers. `grants` collects (runner, vector steps, weights version) of each lease."""

    def __init__(self, kind: str, num_runners: int, seed: int = 0, trouble: float = 0.0) -> None:
        from rlzmq.protocol.broker.core import BrokerCore, BrokerOptions
        from rlzmq.protocol.core import Received
        from rlzmq.wire import messages

        self.m, self.received = messages, Received
        self.rng = random.Random(seed)
        self.trouble = trouble
        self.staleness, batch_of = TERMS[kind]
        self.batch = batch_of(num_runners)
        self.core = BrokerCore(BrokerOptions("bench", 1, peer_timeout_s=1e9))
        self.now = 0.0
        self.todo: list[tuple[float, int, Callable[[], None]]] = []
        self.num_todo = 0
        self.spent: Counter[str] = Counter()
        self.count: Counter[str] = Counter()
        self.grants: list[tuple[str, int, int]] = []
        self.next_update = 0
        self.held: dict[str, list[int]] = {}
        self.free_at: Counter[str] = Counter()
        self.seqs: Counter[str] = Counter()
        self.progress: Counter[str] = Counter()
        self.step_s: dict[str, float] = {}
        self.send("driver", messages.Hello("driver", "driver", "driver", hello_id=1))
        from rlzmq.wire.payloads import pack_ranges

        hello = messages.Hello(
            "learner", "learner-0", "learner-0", rank=0, num_ranks=1, generation=1, hello_id=1
        )
        self.send("learner-0", hello, tuple(pack_ranges([])))
        self.publish(0)
        self.open_updates()
        for index in range(num_runners):
            self.join(f"runner-{index}")
        self.after(0.05, self.on_tick)

    def run(self, num_fragments: int) -> None:
        until = self.count["Fragment"] + num_fragments
        while self.count["Fragment"] < until:
            self.now, _, action = heapq.heappop(self.todo)
            action()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.num_todo += 1
        heapq.heappush(self.todo, (self.now + delay, self.num_todo, action))

    def send(
        self, peer: str, message: Any, payload: tuple[Any, ...] = (), frames: Any = None, key: str = ""
    ) -> None:
        event = self.received(peer.encode(), message, frames or (b"", *payload))
        self.step(lambda: self.core.handle(event, self.now), key or type(message).__name__)

    def step(self, step: Any, key: str) -> None:
        start = time.thread_time()
        instructions = step()
        self.spent[key] += time.thread_time() - start
        self.count[key] += 1
        for item in instructions:
            self.answer(item)

    def answer(self, item: Any) -> None:
        if hasattr(item, "message"):
            self.on_message(item.peer.decode(), item.message, item.payload)

    # ------------------------------------------------------------------ peers

    def join(self, name: str) -> None:
        self.held[name] = []
        self.step_s[name] = self.rng.uniform(0.5, 1.5) / LENGTH
        num_envs = NUM_ENVS if not self.trouble else self.rng.choice([1, NUM_ENVS, 2 * NUM_ENVS])
        uuid = f"{name}/{self.num_todo}"
        hello = self.m.Hello(
            "runner", name, uuid, num_envs=num_envs, hello_id=1, incarnation=self.num_todo + 1
        )
        self.send(name, hello)
        self.after(self.rng.uniform(0, 0.5), lambda: self.beat(name, hello))

    def on_message(self, peer: str, message: Any, payload: Any) -> None:
        kind = type(message).__name__
        if kind == "Lease":
            self.grants.append((peer, message.num_vector_steps, message.weights_version))
            self.held[peer].append(message.lease_id)
            busy_s = message.num_vector_steps * self.step_s[peer]
            if self.rng.random() < self.trouble:
                busy_s *= 20
            if message.max_s:
                busy_s = min(busy_s, message.max_s)
            num_steps = max(1, min(message.num_vector_steps, int(busy_s / self.step_s[peer])))
            hello = self.core.state.by_routing[peer.encode()].hello
            self.free_at[peer] = max(self.free_at[peer], self.now) + busy_s
            self.after(self.free_at[peer] - self.now, lambda: self.sampled(peer, hello, message, num_steps))
        elif kind == "ShardPlan":
            ready = self.m.ShardReady(message.update_id, message.attempt, message.generation, 0)
            self.after(0.001, lambda: self.send(peer, ready, key="update"))
        elif kind == "Train":
            done = self.m.UpdateDone(message.update_id, message.attempt, message.generation, 0, True, 1)
            self.after(0.01, lambda: self.trained(peer, done, payload))
        elif kind == "CommitReport":
            self.after(0.001, lambda: self.reported(message.update_id))

    def sampled(self, peer: str, hello: Any, lease: Any, num_steps: int) -> None:
        from rlzmq.wire.payloads import encode_fragment

        seated = self.core.state.runners.get(hello.uuid)
        if lease.lease_id not in self.held[peer] or seated is None:
            return
        if self.rng.random() < self.trouble / 4:
            self.step(lambda: self.core.lost(peer.encode(), self.now), "lost")
            self.after(self.rng.uniform(0.1, 2.0), lambda: self.join(peer))
            return
        self.held[peer].remove(lease.lease_id)
        self.progress[peer] += 1
        seq, self.seqs[hello.uuid] = self.seqs[hello.uuid], self.seqs[hello.uuid] + 1
        message = self.m.Fragment(
            runner=hello.uuid,
            incarnation=seated.incarnation,
            seq=seq,
            lease_id=lease.lease_id,
            num_env_steps=num_steps * hello.num_envs,
            generation=lease.generation,
            weights_version=lease.weights_version,
            batch={},
        )
        frames = (*encode_fragment(message, [], {"seq": seq}), bytes(1000))
        self.send(peer, message, frames=frames)

    def beat(self, name: str, hello: Any) -> None:
        seated = self.core.state.runners.get(hello.uuid)
        if seated is None:
            return
        if self.rng.random() >= self.trouble:
            self.progress[name] += 1
        held = tuple(self.held[name])
        state = self.m.RunnerState(0, (), held, bool(held), -1, self.progress[name])
        self.send(name, state)
        self.after(0.5, lambda: self.beat(name, hello))

    def trained(self, peer: str, done: Any, ranges: Any) -> None:
        self.send(peer, done, (b"", *ranges), key="update")
        self.publish(done.update_id + 1)

    def publish(self, version: int) -> None:
        from rlzmq.wire.codec import new_publication_buffer, seal_publication

        buffer = new_publication_buffer(8)
        seal_publication(buffer, run_id="bench", generation=1, version=version, layout_digest="")
        self.send("learner-0", self.m.Weights(1, version), (buffer,), key="update")

    def reported(self, update_id: int) -> None:
        self.send("driver", self.m.DriverState(-1, update_id + 1), key="update")
        if update_id + 1 + self.staleness >= self.next_update:
            self.open_updates()

    def open_updates(self) -> None:
        for _ in range(1 if self.next_update else 1 + self.staleness):
            update = self.m.OpenUpdate(
                self.next_update,
                self.batch,
                1,
                self.next_update,
                staleness=self.staleness,
                max_policy_lag=self.staleness or -1,
                fragment_length=LENGTH,
            )
            self.next_update += 1
            self.send("driver", update, key="update")

    def on_tick(self) -> None:
        self.step(lambda: self.core.tick(self.now), "Tick")
        self.after(0.05, self.on_tick)
