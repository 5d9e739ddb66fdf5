"""A runner's connection to the broker: leases become sampling jobs, fragments become messages.

| consumes            | produces            | waits for                       | unblocked by            |
|---------------------|---------------------|---------------------------------|-------------------------|
| LEASE               | FRAGMENT            | the weights the lease names     | PUB, or a snapshot      |
| weights, connectors | loaded between leases | the lease at work              | its fragment            |
| COMMITTED           | frees a fragment    | –                               | –                       |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from rlzmq.core import faults, trace
from rlzmq.core.metrics import FRAGMENT_DELIVERY_TIMER, FRAGMENT_ENCODE_TIMER, WEIGHTS_WAIT_TIMER, StageTimers
from rlzmq.core.process import end_if_out_of_memory
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.shared_memory import FOLDED_TOPIC
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol.events import (
    ApplyConnectorState,
    ApplyWeights,
    Instruction,
    Received,
    Send,
    StartLease,
)
from rlzmq.protocol.peer_core import NARROW_PATH
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.protocol.weights import PUBLICATION_TOPIC
from rlzmq.roles.hang_watch import EnvWatch
from rlzmq.roles.neighbors import Neighbors
from rlzmq.roles.peer_link import MAX_MESSAGE_BYTES, Curve, PeerLink, ends_link, new_peer_id
from rlzmq.wire.fragment_message import sorted_by_env
from rlzmq.wire.messages import Snapshot, SnapshotRequest, encode_message
from rlzmq.wire.values import unpack_blob

__all__ = ["IdleTime", "RunnerLink"]

_log = logging.getLogger("rlzmq.runners")

# The driver reads these from the meta frame. A header is small, and they may be large: images, thousands of episodes.
_ONLY_IN_META_FRAME = frozenset({"connector_delta", "custom_metrics", "episode_metrics", "timers"})


class IdleTime:
    """Divides the time between two leases: delivery of the fragment, weights that are still missing, and the rest.

    Args:
        timers: Receives one call of each per lease.
    """

    def __init__(self, timers: StageTimers) -> None:
        self._timers = timers
        self._ended_at: float | None = None  # end of the last lease, while none is sampled
        self._delivered_at: float | None = None
        self._weights_missed_at: float | None = None
        self._sent_at: float | None = None

    def lease_ended(self, now: float) -> None:
        """Note that a lease was sampled and its fragment passed on; times are seconds of one clock."""
        self._ended_at = now
        self._delivered_at = self._weights_missed_at = self._sent_at = None

    def sent(self, now: float) -> None:
        """Note that the fragment was sent; stages of the trace begin after that."""
        self._sent_at = now

    def look(self, now: float, *, has_undelivered: bool, lacks_weights: bool) -> None:
        """Note what the runner waits for; called after every event."""
        if self._ended_at is None:
            return
        if self._delivered_at is None and not has_undelivered:
            self._delivered_at = now
        if self._weights_missed_at is None and lacks_weights:
            self._weights_missed_at = now

    @property
    def waits_for_delivery(self) -> bool:
        """Whether no lease is sampled and the last fragment was not accepted yet."""
        return self._ended_at is not None and self._delivered_at is None

    def lease_begins(self, now: float) -> None:
        """Add what was waited for since the last lease."""
        if self._ended_at is None:
            return
        delivered_at = now if self._delivered_at is None else self._delivered_at
        self._timers.add(FRAGMENT_DELIVERY_TIMER, delivered_at - self._ended_at)
        missed_at = now if self._weights_missed_at is None else max(self._weights_missed_at, delivered_at)
        self._timers.add(WEIGHTS_WAIT_TIMER, now - missed_at)
        if trace.is_on and self._sent_at is not None:
            trace.span("deliver", self._sent_at, max(delivered_at, self._sent_at))
            trace.span("weights", max(missed_at, self._sent_at), now)
        self._ended_at = None


class SamplingRole(Protocol):
    """The role that samples for the link."""

    env_runner: Any
    env_watch: EnvWatch

    def take_fragment(self, num_vector_steps: int, max_s: float | None = None) -> EpisodeBatch:
        """Sample a lease; see `EnvRunner.take_fragment`."""


class RunnerLink(PeerLink):
    """Samples under the broker's leases with an EnvRunner.

    Args:
        role: Its `env_runner` samples, and is used on the sampler thread only.
        run_blocking: ``run_blocking(fn)`` runs `fn` on the sampler thread, in order; returns an awaitable.
        run_id, name, incarnation: Identity of this runner.
        data_address, weights_address: Addresses of the broker.
        peer_id: Id of this process; a new one if empty.
        curve: Keys for a broker reached by TCP.
        package_version, config_digest, spaces_digest: Compared by the broker, for an external runner.
        replaces: Peer id of the previous process of this name, if any.
    """

    def __init__(
        self,
        role: SamplingRole,
        run_blocking: Callable[[Callable[[], Any]], Any],
        *,
        run_id: str,
        name: str,
        incarnation: int,
        data_address: str,
        weights_address: str,
        peer_id: str = "",
        curve: Curve = None,
        package_version: str = "",
        config_digest: str = "",
        spaces_digest: str = "",
        replaces: str = "",
    ) -> None:
        env_runner = role.env_runner
        core = RunnerCore(
            run_id,
            name,
            peer_id or new_peer_id(),
            num_envs=env_runner.num_envs,
            incarnation=incarnation,
            layout_digest=env_runner.get_weights_layout().digest,
            package_version=package_version,
            config_digest=config_digest,
            spaces_digest=spaces_digest,
            replaces=replaces,
        )
        super().__init__(core, data_address, curve)
        self._role = role
        self._run_blocking = run_blocking
        self._weights_address = weights_address
        self._weights_socket: DrainSocket | None = None
        self._neighbors: Neighbors | None = None
        self._has_told_path = False
        self._timers = StageTimers()  # of the event loop, for the next fragment
        self._idle = IdleTime(self._timers)
        self._recorded: dict[int, str] = {}  # accepted and not committed, for the history

    def open_sockets(self, context: Context) -> None:
        """Subscribe to the weights."""
        options = SocketOptions(
            max_message_bytes=MAX_MESSAGE_BYTES, receive_high_water_mark=2, reconnect_interval_max_ms=500
        )
        self._weights_socket = DrainSocket(
            context,
            "SUB",
            self._on_weights,
            options=options,
            subscriptions=[PUBLICATION_TOPIC, FOLDED_TOPIC],
            curve=self.curve,
            name=f"{self.core.name} weights",
        )
        self._weights_socket.connect(self._weights_address)
        if not self.is_local:
            self._neighbors = Neighbors(
                self.core,
                context,
                replace(options, receive_high_water_mark=64),
                ask=lambda request: self._send(encode_message(request)),
                want=lambda request: self.do(self.core.ask_for(request, self.now())),
                take=lambda frame: self.do(self.core.take_weights(frame, self.now())),
            )

    def do(self, instructions: list[Instruction]) -> None:
        """Perform a core's instructions, in order; requests of weights go to a neighbor first."""
        for instruction in instructions:
            if (
                self._neighbors is not None
                and isinstance(instruction, Send)
                and isinstance(instruction.message, SnapshotRequest)
            ):
                self._neighbors.request(instruction.message)
            else:
                super().do([instruction])
        self._look()

    @ends_link
    def _on_weights(self, received: list[Any]) -> None:
        frames = received if self._shared is None else self._shared.unfold(b"", received)
        if frames is not None:
            self.do(self.core.take_weights(frames[-1], self.now()))
            if self._neighbors is not None:
                self._neighbors.offer(frames[-1])

    def act(self, instruction: Instruction) -> None:
        """Load weights and connector states, and sample leases, in order on the sampler thread."""
        runner = self._role.env_runner
        if isinstance(instruction, ApplyWeights):
            header, body = instruction.header, instruction.body
            faults.record("weights", generation=header.generation, version=header.version)

            def set_weights() -> None:
                # Learners may have published weights of the former modules while this runner's were changed.
                if header.layout_digest == runner.get_weights_layout().digest:
                    runner.set_weights(
                        body,
                        version=header.version,
                        generation=header.generation,
                        num_env_steps=header.num_env_steps,
                        may_keep=True,
                    )

            self._submit(set_weights)
        elif isinstance(instruction, ApplyConnectorState):
            blob = instruction.blob
            self._submit(lambda: runner.set_connector_state(unpack_blob(blob)))
        elif isinstance(instruction, StartLease):
            self._sample(instruction)

    def _submit(self, job: Callable[[], Any]) -> None:
        self.when_done(self._run_blocking(job), self._check)

    def _check(self, done: asyncio.Future[Any]) -> None:
        if (error := done.exception()) is not None:
            self.fail(error)

    @ends_link
    def _tick(self) -> None:
        self.core.progress, self.core.pace_s = self._role.env_watch.progress, self._role.env_watch.pace_s
        super()._tick()

    def handle(self, event: Received) -> None:
        """Pass a message to the core; weights that it brings reach neighbors, too."""
        super().handle(event)
        if self._neighbors is not None and isinstance(event.message, Snapshot) and event.payload:
            self._neighbors.offer(event.payload[0])

    def _look(self) -> None:
        """Note what the core waits for, and what became of its fragments."""
        idle, core = self._idle, self.core
        if core.path_is_narrow and not self._has_told_path:
            self._has_told_path = True
            _log.warning("%s: %s", core.name, NARROW_PATH)
        idle.look(
            time.perf_counter(),
            has_undelivered=idle.waits_for_delivery and core.has_undelivered,
            lacks_weights=core.is_waiting_for_weights,
        )
        if faults.is_recording:
            self._record_progress()

    def _record_progress(self) -> None:
        core = self.core
        kept = core.kept_fragments()
        for seq, (fragment, is_accepted) in kept.items():
            if is_accepted and seq not in self._recorded:
                self._recorded[seq] = str(fragment.fragment_id)
                faults.record("accepted", id=str(fragment.fragment_id), steps=fragment.num_env_steps)
        for seq in [seq for seq in self._recorded if seq not in kept]:
            faults.record("committed", id=self._recorded.pop(seq))

    def _sample(self, lease: StartLease) -> None:
        runner = self._role.env_runner
        self._idle.lease_begins(time.perf_counter())
        sums = self._timers.take()
        encode_s = 0.0

        def job() -> dict[str, Any]:
            runner.timers.merge(sums)
            batch = self._role.take_fragment(lease.num_vector_steps, lease.max_s or None)
            sampled_at = time.perf_counter()
            env_steps: tuple[int, ...] = ()
            if lease.is_sorted_by_env:
                batch, env_steps = sorted_by_env(batch, runner.num_envs)
            meta = batch.meta
            batch.meta = {name: value for name, value in meta.items() if name not in _ONLY_IN_META_FRAME}
            header, arrays = batch.to_wire()
            if self._segments is not None:
                arrays = self._segments.put(arrays)
            nonlocal encode_s
            encoded_at = time.perf_counter()
            encode_s = encoded_at - sampled_at
            if trace.is_on:
                trace.span("encode", sampled_at, encoded_at)
            return {
                "lease_id": lease.lease_id,
                "num_env_steps": batch.num_env_steps,
                "generation": lease.generation,
                "weights_version": lease.weights_version,
                "connector_version": lease.connector_version,
                "batch": header,
                "arrays": arrays,
                "meta": meta,
                "env_steps": env_steps,
            }

        def finish(done: asyncio.Future[Any]) -> None:
            end_if_out_of_memory(done.exception(), self.core.name)
            if (error := done.exception()) is not None:
                self.do(self.core.lease_failed(lease.lease_id, repr(error), self.now()))
                self.fail(error)
            else:
                faults.at("runner.sampled")
                self._idle.lease_ended(time.perf_counter())
                fragment = str(self.core.next_fragment)
                start = time.perf_counter()
                self.do(self.core.sampled(**done.result(), now=self.now()))
                sent = time.perf_counter()
                self._idle.sent(sent)
                self._timers.add(FRAGMENT_ENCODE_TIMER, encode_s + sent - start)
                if trace.is_on:
                    num_env_steps = done.result()["num_env_steps"]
                    trace.span("encode", start, sent, fragment=fragment, num_env_steps=num_env_steps)
                    trace.flow_start(fragment, start)
                faults.at("runner.sent")

        self.when_done(self._run_blocking(job), finish)

    async def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self._weights_socket is not None:
            self._weights_socket.close()
        if self._neighbors is not None:
            self._neighbors.close()
        await super().close()
