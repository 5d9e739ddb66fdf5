"""Peers of a real broker on real sockets: the cores with scripted sampling and training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol import core as E
from rlzmq.protocol.core import PeerTimers
from rlzmq.protocol.driver_core import DriverCore, Report
from rlzmq.protocol.learner_core import LearnerCore
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.wire.codec import PUBLICATION_TOPIC, new_publication_buffer, seal_publication
from rlzmq.wire.messages import Lease, OpenUpdate, Shard, ShardPlan, decode_message
from rlzmq.wire.payloads import decode_fragment

TIMERS = PeerTimers(broker_silence_s=0.6, resend_s=0.3, snapshot_wait_s=0.05)
_OPTIONS = SocketOptions(
    max_message_bytes=1 << 26,
    receive_high_water_mark=0,
    reconnect_interval_ms=20,
    reconnect_interval_max_ms=50,
)


class FakePeer:
    """Carries a core over a DEALER; subclasses do its work."""

    def __init__(self, core: Any, addresses: dict[str, str]) -> None:
        self.core = core
        self.context = Context()
        self.loop = asyncio.get_running_loop()
        self.socket = DrainSocket(
            self.context,
            "DEALER",
            self.on_message,
            options=_OPTIONS,
            packs=True,
            routing_id=core.uuid.encode(),
        )
        self.socket.connect(addresses["data"])
        self._timer = self.loop.call_soon(self.tick)

    def on_message(self, frames: list[Any]) -> None:
        message, _ = decode_message(frames)
        self.do(self.core.handle(E.Received(b"", message, tuple(frames)), self.loop.time()))

    def do(self, instructions: list[Any]) -> None:
        for item in instructions:
            if isinstance(item, E.Send):
                if not self.socket.closed:
                    self.socket.send(item.frames)
            elif isinstance(item, E.Stop) and not self.stopped.done():
                self.stopped.set_result(item)

    def tick(self) -> None:
        self.do(self.core.tick(self.loop.time()))
        self._timer = self.loop.call_later(0.02, self.tick)

    async def close(self) -> None:
        self._timer.cancel()
        self.socket.close()
        await self.context.aclose()


class FakeRunner(FakePeer):
    """Samples every lease in full at once; its columns carry where they come from."""

    def __init__(self, name: str, addresses: dict[str, str], num_envs: int = 4, num_bytes: int = 64) -> None:
        core = RunnerCore("run", name, f"uuid-{name}", sample=self.begin, num_envs=num_envs, timers=TIMERS)
        super().__init__(core, addresses)
        self.num_envs = num_envs
        self.column = np.arange(num_bytes, dtype=np.uint8)
        self.versions: list[int] = []
        self.has_sampled = asyncio.Event()
        self.weights = DrainSocket(
            self.context, "SUB", self.on_weights, options=_OPTIONS, subscriptions=[PUBLICATION_TOPIC]
        )
        self.weights.connect(addresses["weights"])
        self.do(self.core.start(self.loop.time()))

    def on_weights(self, frames: list[Any]) -> None:
        self.do(self.core.take_weights(frames[0], self.loop.time()))

    def begin(self, lease: Lease, weights: Any, connector_state: Any) -> None:
        if weights is not None:
            self.versions.append(weights[0].version)
        self.has_sampled.set()
        self.loop.call_soon(self.sample, lease)

    def sample(self, lease: Lease) -> None:
        sampled = self.core.sampled(
            lease.num_vector_steps * self.num_envs,
            self.loop.time(),
            batch={"columns": ["obs"]},
            arrays=[self.column],
            meta={"steps": lease.num_vector_steps},
        )
        self.do(sampled)

    async def close(self) -> None:
        self.weights.close()
        await super().close()


class FakeLearner(FakePeer):
    """One rank alone: decodes, checks and "trains"; remembers what it has trained."""

    def __init__(self, addresses: dict[str, str], on_trained: Callable[[int], None] | None = None) -> None:
        core = LearnerCore(
            "run",
            "learner-0",
            "uuid-learner",
            decode=self.decode,
            find_odd=lambda _: {},
            train=lambda plan, shards: self.loop.call_soon(self.train, plan, shards),
            timers=TIMERS,
        )
        super().__init__(core, addresses)
        self.trained: list[tuple[str, int, int]] = []
        self.on_trained = on_trained
        self.do(self.core.begin_generation(1, 0, 1, 0, self.loop.time()))
        self.new_weights(0)

    def new_weights(self, version: int) -> None:
        buffer = new_publication_buffer(100_000)
        buffer[512:] = version % 256
        seal_publication(buffer, run_id="run", generation=1, version=version, layout_digest="layout")
        self.do(self.core.new_weights(1, version, buffer))

    def decode(self, shard: Shard, frames: Sequence[Any]) -> Shard:
        fragment, arrays, _ = decode_fragment(frames)
        assert fragment.fragment_id == shard.fragment
        assert np.array_equal(arrays[0], np.arange(len(arrays[0]), dtype=np.uint8))
        return shard

    def train(self, item: ShardPlan, shards: Sequence[Shard]) -> None:
        assert sum(shard.num_steps for shard in shards) == item.num_env_steps
        for shard in shards:
            first = shard.first
            self.trained += [
                (str(shard.fragment), step, item.update_id) for step in range(first, first + shard.num_steps)
            ]
        if self.on_trained is not None:
            self.on_trained(item.update_id)
        now, num_steps = self.loop.time(), item.num_env_steps
        self.do(self.core.update_trained(item.update_id, item.attempt, True, num_steps, b"results", now))
        self.new_weights(item.update_id + 1)


class FakeDriver(FakePeer):
    """Opens updates one after the other; `reports` grows."""

    def __init__(self, addresses: dict[str, str], num_updates: int, batch: int, **terms: Any) -> None:
        core = DriverCore(
            "run", "driver", "uuid-driver", on_report=self.reported, tell=lambda _: None, timers=TIMERS
        )
        super().__init__(core, addresses)
        self.num_updates, self.batch, self.terms = num_updates, batch, terms
        self.reports: list[Report] = []
        self.finished: asyncio.Future[None] = self.loop.create_future()
        self.do(self.core.start(self.loop.time()))
        self.open_next()

    def open_next(self) -> None:
        staleness = self.terms.get("staleness", 0)
        while self.core.next_update < min(self.num_updates, self.core.next_report + 1 + staleness):
            update = OpenUpdate(
                self.core.next_update,
                self.batch,
                1,
                self.core.next_update,
                **{"fragment_length": 8, **self.terms},
            )
            self.do(self.core.open_update(update))

    def reported(self, report: Report) -> None:
        self.reports.append(report)
        self.open_next()
        if len(self.reports) == self.num_updates:
            self.finished.set_result(None)
