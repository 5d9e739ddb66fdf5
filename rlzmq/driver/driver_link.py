"""DriverLink: the driver's connection to the broker; opens updates and awaits their reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from rlzmq.protocol.driver_core import DriverCore
from rlzmq.protocol.events import Instruction, Received, Report, Send, Tell
from rlzmq.roles.compatibility import digest_of, package_version
from rlzmq.roles.peer_link import PeerLink, new_peer_id
from rlzmq.roles.remote_trace import SENT_EVERY_S, add_to_trace
from rlzmq.wire.errors import WireError
from rlzmq.wire.messages import Notice, OpenUpdate, Progress, TraceEvents
from rlzmq.wire.values import pack_blob

__all__ = ["DriverLink"]

_log = logging.getLogger("rlzmq.driver")
_QUIET_EVENTS = ("joined", "left")


class DriverLink(PeerLink):
    """Opens updates and returns their reports, each exactly once and in order.

    Args:
        run_id: Id of the run.
        data_address: Address of the broker's data socket.
        next_update: The first update, which is also the weights version that the learners start from.
            on_notice: Called with the broker's notices for supervisors.
        trained, dropped: Env steps accounted for earlier.
        packed_config: The config as one frame, for external runners.
        spaces_digest: Digest of the env's spaces, which must be equal for external runners.

    Attributes:
        open_reports: Update id → future of its report, in the order of opening. Futures are cancelled if the learners
            are rolled back. The reader of a report removes its entry.
    """

    def __init__(
        self,
        run_id: str,
        data_address: str,
        *,
        next_update: int,
        on_notice: Callable[[Notice], None] | None = None,
        trained: int = 0,
        dropped: dict[str, int] | None = None,
        packed_config: bytes = b"",
        spaces_digest: str = "",
    ) -> None:
        core = DriverCore(
            run_id,
            "driver",
            new_peer_id(),
            next_update=next_update,
            trained=trained,
            dropped=dropped,
            config=packed_config,
            config_digest=digest_of(packed_config) if packed_config else "",
            spaces_digest=spaces_digest,
            package_version=package_version(),
        )
        super().__init__(core, data_address)
        self._on_notice = on_notice
        self._traces_others = False
        self.open_reports: dict[int, asyncio.Future[Report]] = {}
        self.progress: Progress | None = None

    def open_update(self, update: OpenUpdate) -> None:
        """Open the next update. Its report is in `open_reports` once it is committed."""
        self.open_reports[update.update_id] = self._loop.create_future()
        self.do(self.core.open_update(update))

    def set_connector_state(self, version: int, state: Any) -> None:
        """Send a merged connector state to all runners, ahead of the leases that require it."""
        self.do(self.core.set_connector_state(version, pack_blob(state)))

    def reset(self, generation: int, next_update: int) -> None:
        """Announce that the learners have another state. Open updates become void."""
        self.give_up_reports()
        self.do(self.core.reset(generation, next_update))

    def handle(self, event: Any) -> None:
        """Pass an event to the core; write traced stages of other hosts, and answer them."""
        if isinstance(event, Received) and isinstance(event.message, TraceEvents):
            self._traces_others = True
            try:
                self.do([Send(b"", add_to_trace(event.message, event.payload))])
            except WireError as error:
                self._refuse(error)
            return
        super().handle(event)

    def act(self, instruction: Instruction) -> None:
        """Carry out an instruction: reports resolve their update's future; notices go to the supervisor and the log."""
        if isinstance(instruction, Report):
            future = self.open_reports.get(instruction.report.update_id)
            if future is not None and not future.done():
                future.set_result(instruction)
        elif isinstance(instruction, Tell):
            message = instruction.message
            if isinstance(message, Progress):
                self.progress = message
                return
            if message.event not in _QUIET_EVENTS:
                peer = "" if message.role == "broker" else f"{message.role} {message.name} "
                _log.warning("broker: %s%s: %s", peer, message.event, message.detail)
            if self._on_notice is not None:
                self._on_notice(message)

    def give_up_reports(self) -> None:
        """Stop waiting for open updates. `open_reports` is empty afterwards."""
        for future in self.open_reports.values():
            future.cancel()
        self.open_reports.clear()

    async def stop(self) -> None:
        """Send GOODBYE and close. Open updates are cancelled."""
        self.give_up_reports()
        if self._traces_others and not self.core.is_stopped:
            await asyncio.sleep(2 * SENT_EVERY_S)  # the last stages are on their way
        await self.close()
