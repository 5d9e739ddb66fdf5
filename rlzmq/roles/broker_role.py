"""The broker role: leases out, fragments in, exact shards to learners, weights to everyone.

```
   runners ──FRAGMENT──►┌────────┐──SHARD, TRAIN──► learners
   runners ◄──LEASE─────│ ROUTER │◄──UPDATE_DONE, WEIGHTS── learners
   driver ──OPEN_UPDATE►│  core  │──COMMIT_REPORT─► driver
                        │  PUB   │──weights───────► runners
                        └────────┘
```

| consumes        | produces            | waits for                           | unblocked by                |
|-----------------|---------------------|-------------------------------------|-----------------------------|
| FRAGMENT        | shards of a batch   | the batch to be covered             | more fragments              |
| an open update  | leases              | weights of that version, free slots | WEIGHTS, COMMITTED updates  |
| UPDATE_DONE     | COMMITTED, a report | all ranks                           | the last rank, a new group  |
| WEIGHTS         | one publication     | –                                   | –                           |

Back-pressure. The loop never waits: a ROUTER has no high-water mark, and what it may hold is bounded by
the leases granted (batch, staleness, windows in messages and bytes: `rlzmq.protocol.broker.grants`).
PUB has a mark of one: a slow subscriber loses versions and asks for a snapshot of the newest.

Every decision is made in `rlzmq.protocol.broker.core`; this loop only decodes headers, forwards payload
frames untouched, and keeps time. Its sockets are those of `listeners`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rlzmq.core import faults, trace
from rlzmq.core.addresses import SocketDirectory
from rlzmq.core.errors import PeerLostError, ProtocolError
from rlzmq.core.files import make_directories, opener, write_text
from rlzmq.core.patience import TICK_S, FairClock
from rlzmq.core.process import end_if_out_of_memory, limit_memory
from rlzmq.net.keys import CurveServer
from rlzmq.protocol.broker.core import BrokerCore, BrokerOptions
from rlzmq.protocol.broker.state import Peer
from rlzmq.protocol.core import (
    Instruction,
    Publish,
    Quarantine,
    Received,
    Send,
)
from rlzmq.roles.listeners import BrokerListeners
from rlzmq.wire.codec import WireError, WireMessage, first_number
from rlzmq.wire.messages import BrokerBeat, Fragment, Hello, decode_message
from rlzmq.wire.payloads import check_claims, fragment_to_bytes

__all__ = ["BrokerRole"]

_log = logging.getLogger("rlzmq.broker")

# Bounds of the quarantine directory. The first fragments stay, which show the first fault.
_MAX_QUARANTINED = 100
_MAX_QUARANTINED_BYTES = 1 << 30


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _resent_bytes() -> int:
    """Return a quarter of this machine's memory: batches up to this size survive the broker's death."""
    return max(1 << 30, _machine_bytes() // 4)


class BrokerRole:
    """Runs a broker on the current event loop; spawn it as an actor, or `start` it by hand.

    Args:
        run_id: Id of the run; peers of another run are refused.
        options: Fields of `BrokerOptions` other than the run id and incarnation.
        addresses: ``{"data": …, "weights": …}``, ipc addresses to listen on without keys, e.g. those of the
            broker that died; None: in a private directory.
        incarnation: Increases with every start of this run's broker; milliseconds of wall time if 0.
        listen: TCP addresses for external peers, with keys; None: no external peers.
        curve: The server's keys for `listen`.
        roles: Role by public key, of all peers that may connect to `listen`.
        quarantine_dir: Directory for unusable fragments; None: they are not written.
        trace_path: The run's trace, see `rlzmq.core.trace`; None: no trace.
        memory_limit_bytes: See `FaultToleranceSettings`.
    """

    def __init__(
        self,
        run_id: str,
        options: dict[str, Any] | None = None,
        *,
        addresses: dict[str, str] | None = None,
        incarnation: int = 0,
        listen: dict[str, str] | None = None,
        curve: CurveServer | None = None,
        roles: dict[str, str] | None = None,
        quarantine_dir: str | None = None,
        trace_path: str | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        faults.arm("broker")
        trace.join(trace_path, "broker")
        faults.at("broker.start")
        incarnation = incarnation or int(time.time() * 1000)
        given = {"resent_bytes": _resent_bytes(), **(options or {})}
        self._core = BrokerCore(BrokerOptions(run_id=run_id, incarnation=incarnation, **given))
        faults.record("serves", incarnation=incarnation, first_attempt=first_number(incarnation))
        self._wanted_addresses = addresses
        self._core.more_status = self._own_status
        if memory_limit_bytes is None and listen is not None:
            memory_limit_bytes = _machine_bytes() // 2
        limit_memory(memory_limit_bytes, "broker_memory_limit_bytes")
        self._listen = listen
        self._curve = curve
        self._roles = dict(roles or {})
        self._listeners: BrokerListeners | None = None
        self._quarantine_dir = Path(quarantine_dir) if quarantine_dir is not None else None
        self._directory: SocketDirectory | None = None
        self._told: deque[bytes] = deque()  # peers to which a message was not sent
        self._timer: asyncio.TimerHandle | None = None
        self._tick_due = 0.0
        self._has_failed = False
        self._recorded: set[Any] = set()  # fragment ids, as held, in a history
        faults.at("broker.started")
        self._has_told_size = False
        self._writes: set[asyncio.Task[None]] = set()
        self.max_loop_lag_s: float = 0.0
        self.loop_lag_s: float = 0.0
        self.num_messages: int = 0
        self.num_unsent: int = 0

    async def start(self) -> dict[str, str]:
        """Listen for peers.

        Returns:
            ``{"data": …, "weights": …}``: the addresses that local peers connect to; with ``listen``
            also ``"remote_data"`` and ``"remote_weights"``.

        Raises:
            ConfigurationError: An address is taken, or not allowed without keys.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_on_loop_error)
        self.ended: asyncio.Future[tuple[str, str]] = self._loop.create_future()
        wanted = self._wanted_addresses
        if wanted is None:
            self._directory = SocketDirectory()
            wanted = {name: self._directory.address(name) for name in ("data", "weights")}
        self._listeners = BrokerListeners(self._on_message, self._on_broken)
        addresses = self._listeners.open(wanted, self._listen, self._curve, self._roles)
        self._clock = FairClock(TICK_S)
        self._tick_due = self._loop.time()
        self._tick()
        return addresses

    async def stop(self) -> None:
        """Send GOODBYE to all peers and close. Idempotent."""
        if self._listeners is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._do(self._core.stop("the broker was stopped"))
        listeners, self._listeners = self._listeners, None
        listeners.close()
        if self._writes:
            await asyncio.gather(*self._writes)
        await listeners.wait_closed()
        if self._directory is not None:
            self._directory.close()
        trace.flush()
        if not self.ended.done():
            self.ended.set_result(("stopped", ""))

    async def run_until_failure(self) -> tuple[str, str]:
        """Return (reason, detail) once the broker has been stopped; raise its error if it fails."""
        return await asyncio.shield(self.ended)

    async def status(self) -> dict[str, Any]:
        """Return `BrokerCore.status` with statistics of the event loop and connections."""
        return {**self._core.status(), **self._own_status()}

    def _own_status(self) -> dict[str, Any]:
        return {
            "loop_lag_s": self.loop_lag_s,
            "max_loop_lag_s": self.max_loop_lag_s,
            "num_messages": self.num_messages,
            "num_unsent": self.num_unsent,
            "connections": self._listeners.counts() if self._listeners is not None else {},
        }

    # ------------------------------------------------------------------ the loop

    def _on_broken(self) -> None:
        """Find out which external peers are no longer connected, by sending to them."""
        if self._listeners is None:
            return
        core = self._core
        beat = BrokerBeat(core.options.incarnation)
        self._do(
            [Send(peer, beat) for peer in core.state.by_routing if self._listeners.is_from_outside(peer)]
        )
        self._tell()

    def _on_message(self, peer: bytes, role: str | None, frames: Sequence[Any]) -> None:
        self.num_messages += 1
        if not trace.is_on:
            self._receive(peer, role, frames)
            return
        start = time.perf_counter()
        name = self._receive(peer, role, frames)
        trace.span(name, start, time.perf_counter())

    def _receive(self, peer: bytes, role: str | None, frames: Sequence[Any]) -> str:
        """Pass a message to the core; return its name for the trace."""
        try:
            message, _ = decode_message(frames)
            event = Received(peer, message, tuple(frames))
            if type(message) is Hello and role is not None and self._listeners is not None:
                _check_key(role, message)
                event = replace(event, origin=self._listeners.origin_of(peer))
            elif type(message) is Fragment and role is not None:
                check_claims(frames)
        except WireError as error:
            self._handle(partial(self._core.refuse, peer, error.reason, str(error)))
            return "Malformed"
        self._handle(partial(self._core.handle, event), message)
        return type(message).__name__

    def _look_at_size(self) -> None:
        """Warn once if more fragments are held than runners may send again after a restart."""
        held, limit = self._core.state.ledger.num_bytes, self._core.options.resent_bytes
        if held > limit and not self._has_told_size:
            self._has_told_size = True
            _log.warning(
                "%.1f MB of fragments are on their way to the learners, more than the %.1f MB that a broker takes "
                "back when it is restarted: the rest would be dropped then, and sampled again. A smaller "
                "train_batch_size_per_learner (or smaller observations) avoids it.",
                held / 1e6,
                limit / 1e6,
            )

    def _tick(self) -> None:
        now = self._loop.time()
        self.loop_lag_s = max(0.0, now - self._tick_due)
        self.max_loop_lag_s = max(self.max_loop_lag_s, self.loop_lag_s)
        if self._listeners is not None:
            self._core.data_moves(self._listeners.take_moving(self._core.state.by_routing), self._clock.now())
        self._handle(self._core.tick)
        if self._listeners is not None:
            self._listeners.flush()
        self._look_at_size()
        self._tick_due = self._loop.time() + TICK_S
        self._timer = self._loop.call_at(self._tick_due, self._tick)

    def _handle(self, step: Callable[[float], list[Instruction]], message: WireMessage | None = None) -> None:
        self._decide(step, message)
        self._tell()

    def _lost(self, peer: Peer) -> None:
        """Tell the core that a peer is not connected, unless it has said GOODBYE or has registered again."""
        if self._listeners is not None and self._core.state.by_routing.get(peer.routing) is peer:
            self._handle(partial(self._core.lost, peer.routing))

    def _tell(self) -> None:
        """Pass the failures found while sending to the core, in order."""
        while self._told:
            self._decide(partial(self._core.overrun, self._told.popleft()))

    def _decide(self, step: Callable[[float], list[Instruction]], message: WireMessage | None = None) -> None:
        """Take a step of the core, with a message or without; do what it returns."""
        if self._has_failed:
            return
        num_accepted = self._core.state.ledger.num_accepted
        try:
            instructions = step(self._clock.now())
        except Exception as error:  # the state may be inconsistent: a new broker rebuilds it from the peers
            end_if_out_of_memory(error, "broker")
            _log.exception("the broker fails")
            self._has_failed = True
            if not self.ended.done():
                self.ended.set_exception(error)
            return
        if faults.is_recording and isinstance(message, Fragment):
            self._record(message, is_new=self._core.state.ledger.num_accepted > num_accepted)
        if faults.is_armed and message is not None:
            faults.at(f"broker.{type(message).__name__}")  # decided, but nothing sent yet
        self._do(instructions)

    def _record(self, message: Fragment, *, is_new: bool) -> None:
        """Record, for the history, what became of a fragment that has arrived."""
        state, fragment = self._core.state, message.fragment_id
        # One of an update that learners hold was in the ledger before its runner sent it to this broker.
        if is_new or (fragment in state.ledger.entries and fragment not in self._recorded):
            self._recorded.add(fragment)
            update = -1 if state.next_commit is None else state.next_commit
            faults.record("held", id=str(fragment), version=message.weights_version, update=update)
        elif fragment not in state.ledger.entries and state.ledger.is_committed(fragment):
            faults.record("finished", id=str(fragment))

    def _do(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                self._send(instruction)
            elif isinstance(instruction, Publish):
                if self._listeners is not None:
                    self._listeners.publish(instruction.frame)
            elif isinstance(instruction, Quarantine):
                self._quarantine(instruction)

    def _send(self, instruction: Send) -> None:
        if self._listeners is None:
            return
        try:
            if not self._listeners.send(instruction.peer, instruction.frames):
                self._told.append(instruction.peer)
        except PeerLostError:
            if (peer := self._core.state.by_routing.get(instruction.peer)) is not None:
                self._listeners.when_read(instruction.peer, partial(self._lost, peer))
        except ProtocolError as error:
            # Too large for the wire: sending it again would not help, so log it.
            self.num_unsent += 1
            _log.error(
                "%s to %r was not sent: %s", type(instruction.message).__name__, instruction.peer, error
            )

    def _quarantine(self, instruction: Quarantine) -> None:
        _log.warning("fragment %s is quarantined: %s", instruction.fragment, instruction.reason)
        if self._quarantine_dir is not None:
            task = self._loop.create_task(asyncio.to_thread(_write, self._quarantine_dir, instruction))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    end_if_out_of_memory(context.get("exception"), "broker")
    loop.default_exception_handler(context)


def _check_key(role: str, hello: Hello) -> None:
    """Raise an error if the key does not allow the role, or an external runner uses a local runner's name."""
    if hello.role not in (role, "observer"):
        raise KeyRefusedError(f"a key of role {role!r} said HELLO as {hello.role!r}")
    if hello.role == "runner" and "@" not in hello.name:
        raise KeyRefusedError(f"a runner that joined must be named name@host, not {hello.name!r}")


class KeyRefusedError(WireError):
    """A HELLO that its sender's key does not allow."""

    reason: ClassVar[str] = "key"


def _write(directory: Path, item: Quarantine) -> None:
    """``NAME.fragment`` (the message, see `payloads.fragment_to_bytes`) and ``NAME.json`` (why)."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in str(item.fragment).replace("/", "-"))
    try:
        make_directories(directory, mode=0o700)
        data = fragment_to_bytes(item.frames)
        sizes = [path.stat().st_size for path in directory.glob("*.fragment")]
        if len(sizes) >= _MAX_QUARANTINED or sum(sizes) + len(data) > _MAX_QUARANTINED_BYTES:
            _log.warning(
                "fragment %s is not written: %s is full with %d fragments; remove those that you do not need",
                item.fragment, directory, len(sizes),
            )  # fmt: skip
            return
        with open(directory / f"{name}.fragment", "wb", opener=opener) as file:
            file.write(data)
        write_text(directory / f"{name}.json", json.dumps({"id": str(item.fragment), "reason": item.reason}))
    except OSError as error:
        _log.error("fragment %s could not be written to %s: %s", item.fragment, directory, error)
