"""DriverCore: the driver's side of the protocol. Updates are opened in order, and each is reported exactly once.

Guarantees: every opened update is reported once and in order, even if messages are lost or processes restarted in
between. What the broker lacks according to its PROGRESS, it receives again: open updates, the newest connector state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlzmq.protocol.core import Instruction, PeerCore, PeerTimers, Received, Send
from rlzmq.wire.codec import Buffer, FragmentId, MalformedFrameError
from rlzmq.wire.messages import (
    CommitReport,
    Config,
    ConnectorState,
    DriverState,
    Hello,
    Notice,
    OpenUpdate,
    Progress,
    Reset,
)
from rlzmq.wire.payloads import FragmentRange, pack_ranges, split_frames, unpack_ranges

__all__ = ["DriverCore", "Report", "parse_report"]


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a committed update.

    Attributes:
        fragments: Fragments reported for the first time: id, env steps, meta blob.
        results: One blob per learner rank.
        watermarks: Committed watermarks that moved, by (runner uuid, incarnation).
        forgotten: Runners that will not come back: (uuid, incarnation).
    """

    report: CommitReport
    fragments: Sequence[tuple[FragmentId, int, Buffer]]
    results: Sequence[Buffer]
    watermarks: dict[tuple[str, int], int]
    forgotten: Sequence[tuple[str, int]] = ()


class DriverCore(PeerCore):
    """The driver's state machine. The module docstring states its guarantees.

    Args:
        run_id, name, uuid: See `messages.Hello`.
        on_report: Called once for each update, in order.
        tell: Passes a message to the driver's supervisor or log.
        next_update: First update of this run: 0, or the one after the checkpoint.
        spaces_digest, package_version: Every other peer must have the same.
        config: One opaque frame for external runners; b"" for none.
    """

    def __init__(
        self,
        run_id: str,
        name: str,
        uuid: str,
        *,
        on_report: Callable[[Report], None],
        tell: Callable[[Notice | Progress], None],
        next_update: int = 0,
        spaces_digest: str = "",
        package_version: str = "",
        config: Buffer = b"",
        timers: PeerTimers | None = None,
    ) -> None:
        super().__init__(run_id, name, uuid, timers)
        self._on_report = on_report
        self._tell = tell
        self.next_report: int = next_update
        self.next_update: int = next_update
        self.trained: int = 0
        self.dropped: dict[str, int] = {}
        self.connector_version: int = -1
        self._digests = (package_version, spaces_digest)
        self._config = config
        self._open: dict[int, OpenUpdate] = {}
        self._early: dict[int, Report] = {}
        self._connector_blob: Buffer = b""
        self.min_generation: int = -1
        self._watermarks: dict[tuple[str, int], int] = {}
        self.bottleneck = ""

    # ------------------------------------------------------------------ calls

    def open_update(self, update: OpenUpdate) -> list[Instruction]:
        """Open the next update. Several may be open; they are trained in order.

        Raises:
            ValueError: The id is not `next_update`.
        """
        if update.update_id != self.next_update:
            raise ValueError(
                f"updates are opened in order: expected {self.next_update}, got {update.update_id}"
            )
        self.next_update += 1
        lineage, version = self.min_generation, self.connector_version
        update = replace(update, min_generation=lineage, connector_version=version)
        self._open[update.update_id] = update
        return [Send(b"", update)] if self.is_welcome else []

    def set_connector_state(self, blob: Buffer) -> list[Instruction]:
        """Send a merged connector state, one `payloads.pack_blob` frame, to all runners; later updates require it."""
        self.connector_version += 1  # also across a reset
        self._connector_blob = blob
        return [self._connector_state()] if self.is_welcome else []

    def reset(self, generation: int, next_update: int) -> list[Instruction]:
        """Continue from `next_update` after the learners restored a checkpoint. Open updates are discarded."""
        self._open.clear()
        self._early.clear()
        self.next_report = self.next_update = next_update
        self.min_generation = generation
        return [Send(b"", Reset(generation, next_update))] if self.is_welcome else []

    # ------------------------------------------------------------------ events

    def _on_message(self, event: Received, now: float) -> list[Instruction]:
        message = event.message
        if isinstance(message, CommitReport):
            return self._take_report(message, event.payload)
        if isinstance(message, Progress | Notice):
            self._tell(message)
        return self._catch_up(message) if isinstance(message, Progress) else []

    def _take_report(self, message: CommitReport, payload: tuple[Buffer, ...]) -> list[Instruction]:
        if message.min_generation != self.min_generation:
            return []  # it is from an abandoned lineage, or from a broker that has not received the RESET yet
        if not self.is_welcome or message.broker_incarnation != self.broker_incarnation:
            # Our HELLO named the first missing report, so the new broker will send it.
            return []
        if message.update_id in self._open and message.update_id not in self._early:
            self._early[message.update_id] = parse_report(message, payload)
        while (report := self._early.pop(self.next_report, None)) is not None:
            del self._open[self.next_report]
            self.next_report += 1
            self.trained = report.report.trained
            self.dropped = dict(report.report.dropped)
            for key, watermark in report.watermarks.items():
                self._watermarks[key] = max(watermark, self._watermarks.get(key, 0))
            for key in report.forgotten:
                self._watermarks.pop(key, None)
            self._on_report(report)
        return [Send(b"", self._state())]

    def _catch_up(self, progress: Progress) -> list[Instruction]:
        """Repeat the messages that the broker lacks according to its PROGRESS."""
        if progress.min_generation < self.min_generation:
            return [Send(b"", Reset(self.min_generation, self.next_report))]
        instructions: list[Instruction] = []
        if progress.connector_version < self.connector_version:
            instructions.append(self._connector_state())
        for update_id, update in sorted(self._open.items()):
            if update_id >= progress.next_open:
                instructions.append(Send(b"", update))
        return instructions

    def _on_new_broker(self, now: float) -> list[Instruction]:
        # HELLO asked for every report from `next_report` on. Keeping an early report of the previous broker would
        # close an update for which this broker still waits.
        self._early.clear()
        # The broker's PROGRESS, which follows, asks for all else.
        if not self._config:
            return []
        return [Send(b"", Config(self.run_id), (self._config,))]

    def _connector_state(self) -> Send:
        return Send(b"", ConnectorState(self.connector_version), (self._connector_blob,))

    def _hello(self) -> tuple[Hello, tuple[Buffer, ...]]:
        hello = Hello(
            role="driver",
            **self._identity(),
            generation=self.min_generation,
            next_update=self.next_report,
            trained=self.trained,
            dropped=self.dropped,
        )
        watermarks = (
            FragmentRange(FragmentId(runner, incarnation, watermark), 0, 0)
            for (runner, incarnation), watermark in self._watermarks.items()
        )
        return hello, tuple(pack_ranges(watermarks))

    def _state(self) -> DriverState:
        return DriverState(self.min_generation, self.next_report, self.bottleneck)


def parse_report(message: CommitReport, payload: tuple[Buffer, ...]) -> Report:
    """Parse the payload frames of a report.

    Raises:
        WireError: The frames are malformed.
    """
    if len(payload) != 6:
        raise MalformedFrameError(f"a report has 6 payload frames, got {len(payload)}")
    if len(message.versions) != len(message.version_steps):
        raise MalformedFrameError("a report has as many numbers of env steps as weights versions")
    ranges, metas = unpack_ranges(payload[:2]), split_frames(payload[2])
    if len(ranges) != len(metas):
        raise MalformedFrameError(f"a report of {len(ranges)} fragments came with {len(metas)} metas")
    watermarks: dict[tuple[str, int], int] = {}
    forgotten: list[tuple[str, int]] = []
    for (runner, incarnation, watermark), _, is_gone in unpack_ranges(payload[4:]):
        if is_gone:
            forgotten.append((runner, incarnation))
        else:
            watermarks[runner, incarnation] = watermark
    fragments = [(item.fragment, item.num_steps, meta) for item, meta in zip(ranges, metas, strict=True)]
    return Report(message, fragments, split_frames(payload[3]), watermarks, forgotten)
