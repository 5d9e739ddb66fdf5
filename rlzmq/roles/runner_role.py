"""The runner role: an EnvRunner in its own process, sampling under leases.

                event loop                              sampler thread
broker ──LEASE──►  RunnerLink ──one lease──►  env_runner.take_fragment
broker ◄─FRAGMENT─ RunnerLink ◄─one fragment─  (columns are the frames)
broker ──weights─► RunnerLink   newest snapshot, loaded between two leases

| consumes            | produces            | waits for                       | unblocked by            |
|---------------------|---------------------|---------------------------------|-------------------------|
| LEASE               | FRAGMENT            | the weights the lease names     | PUB, or a snapshot      |
| weights, connectors | loaded between leases | the lease at work              | its fragment            |
| COMMITTED           | frees a fragment    | –                               | –                       |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rlzmq.actors.host import ActorThread
from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults, trace
from rlzmq.core.call_watch import EnvWatch
from rlzmq.core.errors import PeerLostError, ProtocolError
from rlzmq.core.metrics import FRAGMENT_DELIVERY_TIMER, FRAGMENT_ENCODE_TIMER, WEIGHTS_WAIT_TIMER, StageTimers
from rlzmq.core.patience import HEARTBEAT_S, NARROW_PATH, TICK_S
from rlzmq.core.process import apply_log_level, end_if_out_of_memory, limit_memory
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.ranks import set_torch_threads
from rlzmq.net.context import Context, SocketOptions
from rlzmq.net.keys import CurveClient, JoinFile
from rlzmq.net.shared_memory import FOLDED_TOPIC
from rlzmq.net.socket import DrainSocket
from rlzmq.protocol.core import Instruction, Received, Send
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.roles.neighbors import Neighbors
from rlzmq.roles.peer_link import (
    MAX_MESSAGE_BYTES,
    PeerLink,
    PeerRole,
    ends_link,
    new_peer_id,
    package_version,
    spaces_digest,
)
from rlzmq.runners.vector_env_runners import make_env_runner
from rlzmq.wire.codec import PUBLICATION_TOPIC, Buffer, Publication
from rlzmq.wire.messages import Lease, Snapshot, SnapshotRequest, encode_message
from rlzmq.wire.payloads import unpack_blob

__all__ = ["EnvRunnerRole", "IdleTime", "RemoteRunner", "RunnerLink", "make_env_runner"]

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


class RunnerLink(PeerLink):
    """Samples under the broker's leases with an EnvRunner.

    Args:
        role: Its `env_runner` samples, and is used on the sampler thread only.
        run_blocking: ``run_blocking(fn)`` runs `fn` on the sampler thread, in order; returns an awaitable.
        data_address, weights_address: Addresses of the broker.
        peer_id: Id of this process; a new one if empty.
        curve: Keys for a broker reached by TCP.
        identity: Further arguments of `RunnerCore`.
    """

    def __init__(
        self,
        role: EnvRunnerRole,
        run_blocking: Callable[[Callable[[], Any]], Any],
        *,
        data_address: str,
        weights_address: str,
        peer_id: str = "",
        curve: CurveClient | None = None,
        **identity: Any,
    ) -> None:
        core = RunnerCore(
            uuid=peer_id or new_peer_id(),
            sample=self._sample,
            num_envs=role.env_runner.num_envs,
            layout_digest=role.env_runner.get_weights_layout().digest,
            **identity,
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

    def _load(self, weights: tuple[Publication, Buffer] | None, connector_state: Buffer | None) -> None:
        """Load the weights and connector state that came since the last lease."""
        runner = self._role.env_runner
        if weights is not None:
            header, body = weights
            # Learners may have published weights of the former modules while this runner's were changed.
            if header.layout_digest == runner.get_weights_layout().digest:
                runner.set_weights(
                    body,
                    version=header.version,
                    generation=header.generation,
                    num_env_steps=header.num_env_steps,
                    may_keep=True,
                )
        if connector_state is not None:
            runner.set_connector_state(unpack_blob(connector_state))

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

    def _sample(
        self, lease: Lease, weights: tuple[Publication, Buffer] | None, connector_state: Buffer | None
    ) -> None:
        """Sample a lease on the sampler thread, with the weights and connector state that it brings."""
        runner = self._role.env_runner
        if weights is not None:
            faults.record("weights", generation=weights[0].generation, version=weights[0].version)
        self._idle.lease_begins(time.perf_counter())
        sums = self._timers.take()
        encode_s = 0.0

        def job() -> dict[str, Any]:
            self._load(weights, connector_state)
            runner.timers.merge(sums)
            batch = self._role.take_fragment(lease.num_vector_steps, lease.max_s or None)
            sampled_at = time.perf_counter()
            env_steps: tuple[int, ...] = ()
            if lease.is_sorted_by_env:
                batch, env_steps = batch.sorted_by_env(runner.num_envs)
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
                "num_env_steps": batch.num_env_steps,
                "batch": header,
                "arrays": arrays,
                "meta": meta,
                "env_steps": env_steps,
            }

        def finish(done: asyncio.Future[Any]) -> None:
            if (error := done.exception()) is not None:
                end_if_out_of_memory(error, self.core.name)
                self.do(self.core.lease_failed(repr(error), self.now()))
                self.fail(error)
            else:
                faults.at("runner.sampled")
                self._idle.lease_ended(time.perf_counter())
                fragment = str(self.core.next_fragment)
                start = time.perf_counter()
                try:
                    self.do(self.core.sampled(**done.result(), now=self.now()))
                except ProtocolError as error:
                    raise ProtocolError(
                        f"A fragment of {done.result()['num_env_steps']} env steps is too large to be sent: {error}. "
                        "Set a smaller rollout_fragment_length, or fewer num_envs_per_env_runner."
                    ) from None
                sent = time.perf_counter()
                self._idle.sent(sent)
                self._timers.add(FRAGMENT_ENCODE_TIMER, encode_s + sent - start)
                if trace.is_on:
                    num_env_steps = done.result()["num_env_steps"]
                    trace.span("encode", start, sent, fragment=fragment, num_env_steps=num_env_steps)
                    trace.flow(fragment, start, ends=False)
                faults.at("runner.sent")

        self.when_done(self._run_blocking(job), finish)

    async def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self._weights_socket is not None:
            self._weights_socket.close()
        if self._neighbors is not None:
            self._neighbors.close()
        await super().close()


_BUSY_S = 1.0  # how long a runner that is to end waits for the call of user code that it is in


class EnvRunnerRole(PeerRole):
    """The actor in a runner's process.

    Plain methods run on the actor's thread, the only one that uses the env runner; `async` methods run
    on its event loop. Methods that are not here are the env runner's.

    Args:
        config: The run's config.
        worker_index: 1-based index within the group (0: the local runner).
        incarnation: How many times this runner was restarted.
        is_local: It shares its process with other roles: an environment that hangs then raises an error
            instead of ending the process.
        place: Its name in `rlzmq.core.faults`; "runner-N" if "".
    """

    def __init__(
        self,
        config: BaseConfig,
        worker_index: int,
        incarnation: int = 0,
        *,
        is_local: bool = False,
        place: str = "",
    ) -> None:
        set_torch_threads(config)
        apply_log_level(config)
        faults.arm(place or f"runner-{worker_index - 1}", incarnation)
        trace.join(config.trace, f"{'evaluation' if config.in_evaluation else 'env'} runner {worker_index}")
        faults.at("runner.start")
        limit_memory(config.env_runner_memory_limit_bytes, "env_runner_memory_limit_bytes")
        self.config: BaseConfig = config
        on_hang = self._report_hang if is_local else None
        self.env_watch: EnvWatch = EnvWatch(
            f"env runner {worker_index}",
            env_step_timeout_s=config.env_step_timeout_s,
            env_reset_timeout_s=config.env_reset_timeout_s,
            warn_after_s=config.slow_call_warning_s,
            on_hang=on_hang,
        )
        with self.env_watch.call(self.env_watch.RESETS):
            self.env_runner: Any = make_env_runner(config, worker_index, incarnation)
        self.env_runner.env_watch = self.env_watch
        self.env_watch.attend(self.env_runner.env)
        self._ended_round = 0
        faults.at("runner.started")

    # -- on the actor's thread ------------------------------------------------------------------

    def sample(self, **kwargs: object) -> Any:
        """See EnvRunner.sample_batch."""
        with self.env_watch.call(self.env_watch.STEPS):
            return self.env_runner.sample_batch(**kwargs)

    def sample_with_metrics(self, options: Mapping[str, Any]) -> Any:
        """See `EnvRunner.sample_with_metrics`."""
        with self.env_watch.call(self.env_watch.STEPS):
            return self.env_runner.sample_with_metrics(options)

    def take_fragment(self, num_vector_steps: int, max_s: float | None = None) -> EpisodeBatch:
        """See `EnvRunner.take_fragment`."""
        with self.env_watch.call(self.env_watch.STEPS):
            return self.env_runner.take_fragment(num_vector_steps, max_s)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        """Return any other public method of the env runner."""
        if name.startswith("_") or name == "env_runner":  # it is not made yet
            raise AttributeError(name)
        return getattr(self.env_runner, name)

    def measure(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sample and return only the batch's meta."""
        return [self.sample_with_metrics(options).meta]

    def change_modules(self, config: BaseConfig, synced_module_ids: list[str] | None) -> str:
        """Call EnvRunner.change_modules; return the digest of the new weights layout, for `expect_layout`."""
        self.config = config
        self.env_runner.change_modules(config, synced_module_ids)
        return str(self.env_runner.get_weights_layout().digest)

    def close(self) -> None:
        """Close the env."""
        self.env_watch.close()
        self.env_runner.stop()
        trace.flush()

    # -- on the event loop ----------------------------------------------------------------------

    async def connect(self, link: Mapping[str, Any]) -> None:
        """Connect to the broker and take leases."""
        faults.at("runner.connect")
        self._link = RunnerLink(self, self._run_blocking, **link)
        await self._link.start()

    async def stop(self) -> None:
        """Leave the broker and close the env, after the current vector step; not after a longer one."""
        await self.disconnect()
        self.env_runner.interrupt()
        is_free = self._run_blocking(lambda: None)
        if (await asyncio.wait((is_free,), timeout=_BUSY_S))[0]:
            await super().stop()
        else:
            is_free.cancel()
            _log.info(
                "Env runner %d: its env is not closed, a step takes too long", self.env_runner.worker_index
            )

    async def expect_layout(self, digest: str) -> None:
        """Accept only weights of this layout from now on."""
        if self._link is not None:
            self._link.core.weights.layout_digest = digest

    async def begin_again(self, number: int, generation: int) -> None:
        """See `EnvRunner.begin_again`; from now on, sample only under leases of this generation or a later one."""
        if self._link is not None:
            self._link.core.min_generation = generation
        await self._run_blocking(lambda: self.env_runner.begin_again(number))

    async def measure_until_end(
        self, round_id: int, limits: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Call `measure` repeatedly until `end_round`, at least once; other blocking methods may run in between.

        Args:
            round_id: Id of the round; 0: it is over already.
            limits: See `SamplingRound`.
            options: Arguments of EnvRunner.sample; episodes are reset before the first call only.
        """
        metas: list[dict[str, Any]] = []
        num_env_steps, start = 0, time.perf_counter()
        while True:
            wanted = _next_env_steps(num_env_steps, time.perf_counter() - start, **limits)
            metas += await self._run_blocking(partial(self.measure, {**options, "num_timesteps": wanted}))
            num_env_steps += metas[-1]["num_env_steps"]
            options = {**options, "force_reset": False}
            if self._ended_round >= round_id:
                return metas

    async def end_round(self, round_id: int) -> None:
        """Let `measure_until_end` of this and earlier rounds return after the current call."""
        self._ended_round = max(self._ended_round, round_id)

    async def run_until_failure(self) -> tuple[str, str]:
        """Return (reason, detail) once the connection to the broker has ended; raise errors of sampling."""
        return await self._link.ended if self._link is not None else ("", "")


def _next_env_steps(
    num_env_steps: int, elapsed_s: float, *, min_env_steps: int, max_env_steps: int, expected_s: float | None
) -> int:
    """Return the env steps of the next sample call of a round: as many as end it when it is expected to end."""
    wanted = 0.0
    if expected_s is not None and elapsed_s > 0:
        wanted = num_env_steps / elapsed_s * (expected_s - elapsed_s)
    return min(max(int(wanted), min_env_steps), max_env_steps)


# Random streams derive from the index: above those of the driver's runners.
_FIRST_INDEX = 2_000_000
_LEAVE_S = 10.0


class RemoteRunner:
    """An external runner that joins a run by itself, from another terminal or machine, and may leave at any time.

    The run does not supervise it: when it dies, its leases are granted to others and only unsent steps are lost. When
    the broker is restarted, it registers again and sends its uncommitted fragments. When the driver is restarted, it
    is refused ("run_id"): `rlzmq runner` then joins the new run. With `rlzmq runner --env-runners`, it is an actor.

    Args:
        join: Addresses and keys.
        run_id: Id of the run, which came with the config.
        config: The run's config, with this machine's changes (e.g. the number of envs).
        patience_s: Seconds of silence after which the broker counts as lost.

    Attributes:
        name: Name under which it registers.
    """

    def __init__(self, join: JoinFile, run_id: str, config: BaseConfig, *, patience_s: float) -> None:
        self._join = join
        self._run_id = run_id
        self._config = config
        self._patience_s = patience_s
        self._thread = ActorThread("sampler")
        self._role: EnvRunnerRole | None = None
        self._stop_leaving: asyncio.TimerHandle | None = None
        self.name: str = f"runner-{secrets.token_hex(3)}@{socket.gethostname()[:100]}"

    @property
    def num_env_steps(self) -> int:
        """Env steps sampled so far."""
        link = self._role._link if self._role is not None else None
        return int(link.core.num_env_steps_sampled) if link is not None else 0

    async def start(self) -> str:
        """Make the envs and the module; return the name once the broker has registered this runner, or refused it.

        Raises:
            PeerLostError: The broker does not answer.
            Exception: The envs or the module could not be made.
        """
        trace.join(self._config.trace, self.name)
        index = _FIRST_INDEX + secrets.randbelow(1 << 30)
        self._role = await self._thread.run(lambda: EnvRunnerRole(self._config, index))
        self._role.use_actor_thread(self._thread.run)
        addresses = self._join.addresses
        await self._role.connect(
            {
                "run_id": self._run_id,
                "name": self.name,
                "incarnation": 0,  # assigned by the broker
                "data_address": addresses["data"],
                "weights_address": addresses["weights"],
                "curve": self._join.curve(),
                "package_version": package_version(),
                "spaces_digest": spaces_digest(self._role.get_spaces()["__env_single__"]),
            }
        )
        link: Any = self._role._link
        deadline = link.now() + self._patience_s
        while not link.core.is_welcome and not link.ended.done():
            if link.now() > deadline:
                raise PeerLostError(f"the broker at {addresses['data']} does not register this runner")
            await asyncio.wait((link.ended,), timeout=TICK_S)
        return self.name

    async def wait(self) -> tuple[str, str]:
        """Sample until the end; return (reason, detail): ("goodbye", …) if the run ended, ("left", …) after `leave`.

        ("run_id", …) if another run is there now: the driver was started again.

        Raises:
            Exception: See `work`.
        """
        while (end := (await self.work())[1]) is None:
            pass
        return end

    async def work(self) -> tuple[int, tuple[str, str] | None]:
        """Return `num_env_steps`, with what `wait` returns, or None: as soon as more has been sampled, or at the end.

        Raises:
            PeerLostError: The broker was silent for too long.
            Exception: The env, a connector or the module failed.
        """
        assert self._role is not None
        link, num_env_steps = self._role._link, self.num_env_steps
        while self.num_env_steps == num_env_steps:
            done, _ = await asyncio.wait((link.ended,), timeout=HEARTBEAT_S)
            if done:
                return self.num_env_steps, await link.ended
            silence_s = link.now() - link.core.heard_at
            if silence_s >= self._patience_s:
                raise PeerLostError(
                    f"the broker at {self._join.addresses['data']} has been silent for {silence_s:.0f} s"
                )
        return self.num_env_steps, None

    async def leave(self) -> None:
        """Take no more leases; `wait` returns once the current fragment is with the broker, or is lost after 10 s."""
        link: Any = self._role._link if self._role is not None else None
        if link is not None and self._stop_leaving is None and not link.ended.done():
            link.leave("interrupted")
            self._stop_leaving = asyncio.get_running_loop().call_later(_LEAVE_S, self._give_up_leaving, link)

    def _give_up_leaving(self, link: Any) -> None:
        if not link.ended.done():
            link.ended.set_result(("left", "before its last fragment was finished"))

    async def stop(self) -> None:
        """Close sockets and envs. Idempotent."""
        if self._stop_leaving is not None:
            self._stop_leaving.cancel()
        if self._role is not None:
            role, self._role = self._role, None
            await role.disconnect()
            # An env that is still stepping ends with the process.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._thread.run(role.close)
        self._thread.close()
