"""DriverLink: the driver's connection to the broker; opens updates and awaits their reports.

A restarted broker repeats reports of its predecessor, so fragments may be in both.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import cut, printable
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.patience import HEARTBEAT_S
from rlzmq.driver.async_env_runner_group import MergedConnectors
from rlzmq.driver.updates import Accounting
from rlzmq.protocol.core import Received
from rlzmq.protocol.driver_core import DriverCore, Report
from rlzmq.protocol.ledger import RunnerRecord
from rlzmq.roles.peer_link import (
    PeerLink,
    add_to_trace,
    new_peer_id,
    package_version,
)
from rlzmq.runners.episode_metrics import EpisodeMetrics, FragmentMeta, add_fragment_metas
from rlzmq.wire.codec import Buffer, FragmentId, WireError
from rlzmq.wire.messages import Notice, OpenUpdate, Progress, TraceEvents
from rlzmq.wire.payloads import pack_blob, unpack_blob

__all__ = ["DriverLink", "MetaCheck", "ReportReader", "num_left_out"]


_log = logging.getLogger("rlzmq.driver")


class MetaCheck:
    """Applies metadata to scratch metrics and connectors first, so that invalid metadata cannot end the run.

    If no external peers may join, all runners belong to the run and nothing is checked.
    """

    def __init__(self, config: BaseConfig, spaces: Any) -> None:
        self._is_joinable = config.listen is not None
        if self._is_joinable:
            self._logger = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
            self._connectors = MergedConnectors(config, spaces)

    def open(self, blob: object, *, is_trusted: bool) -> FragmentMeta:
        """Return the metadata in a fragment's last frame.

        Args:
            blob: The frame as received.
            is_trusted: Whether this driver started the runner, which then runs the same code.

        Raises:
            ValueError: The frame is not metadata, or cannot be used.
        """
        try:
            meta: FragmentMeta = unpack_blob(blob)
        except WireError as error:
            raise ValueError(str(error)) from error
        if not isinstance(meta, dict):
            raise ValueError(f"expected a dict, got {type(meta).__name__}")
        if self._is_joinable and (not is_trusted or meta.get("custom_metrics")):
            self._try(meta, keeps_errors=is_trusted)
        return meta

    def _try(self, meta: FragmentMeta, *, keeps_errors: bool) -> None:
        try:
            add_fragment_metas(EpisodeMetrics(), self._logger, [meta])
            self._logger.reduce()
            if not keeps_errors and meta.get("connector_delta"):
                self._connectors.merge([meta["connector_delta"]])
        except Exception as error:
            if not keeps_errors:  # otherwise the run reports the user's error
                raise ValueError(f"{type(error).__name__}: {error}") from error


class ReportReader:
    """Remembers the reported fragments by runner, until a report declares the runner forgotten.

    Args:
        metas: Validates and opens the fragment metadata from runners.
        own: The ids of the processes that this driver started; other runners are external.

    Attributes:
        num_env_steps_without_report: Env steps trained or dropped whose fragment is in no report, because its runner
            and the broker died one after the other.
    """

    def __init__(self, metas: MetaCheck, own: Container[str]) -> None:
        self._metas = metas
        self._own = own
        self._dropped: Counter[str] = Counter()
        self._reported: dict[tuple[str, int], RunnerRecord] = {}
        self.num_env_steps_without_report: int = 0

    def take_new(self, report: Report) -> list[tuple[FragmentId, int, Any]]:
        """Return the report's fragments, without those that an earlier broker has reported."""
        new = []
        for item in report.fragments:
            fragment = item[0]
            record = self._reported.setdefault((fragment.runner, fragment.incarnation), RunnerRecord())
            if not record.is_committed(fragment.seq):
                record.commit(fragment.seq)
                new.append(item)
        for key, watermark in report.watermarks.items():  # refused fragments are in no report
            if key in self._reported:
                self._reported[key].commit_below(watermark)
        for key in report.forgotten:
            self._reported.pop(key, None)
        return new

    def open_meta(self, fragment: FragmentId, blob: Buffer) -> FragmentMeta:
        """Return a fragment's metadata; {} if it is unusable, or of a lineage that was abandoned."""
        if not memoryview(blob).nbytes:
            return {}
        try:
            return self._metas.open(blob, is_trusted=fragment.runner in self._own)
        except ValueError as error:
            detail = cut(printable(str(error)))  # it may quote data from the runner
            _log.warning("the meta of fragment %s is unusable: %s", fragment, detail)
            return {}

    def open_results(self, blobs: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the ranks' results of an update; {} for unreadable ones."""
        results = []
        for rank, blob in enumerate(blobs):
            try:
                result = unpack_blob(blob)
                results.append(result if isinstance(result, dict) else {})
            except WireError as error:
                _log.warning("the results of rank %d are unusable: %s", rank, error)
                results.append({})
        return results

    def account(self, report: Report, sampled: int, accounting: Accounting) -> None:
        """Update the run's account from the newest report, whose new fragments have `sampled` env steps."""
        total_dropped = Counter(report.report.dropped)
        dropped = total_dropped - self._dropped
        self._dropped = total_dropped
        trained = report.report.num_kept_steps  # the other steps are dropped as "skipped"
        lost = max(0, trained + dropped.total() - sampled - accounting.pending)
        self.num_env_steps_without_report += lost
        accounting.add(sampled=sampled + lost, trained=trained, dropped=dict(dropped))


# Far above any real fragment; an external runner may send any number.
_MAX_LEFT_OUT = 2**40


def num_left_out(meta: FragmentMeta) -> int:
    """Return the env steps that a runner left out of a fragment as non-finite."""
    num = meta.get("num_env_steps_not_finite", 0)
    return num if type(num) is int and 0 <= num <= _MAX_LEFT_OUT else 0


_QUIET_EVENTS = ("joined", "left")


class DriverLink(PeerLink):
    """Opens updates and returns their reports, each exactly once and in order.

    Args:
        run_id: Id of the run.
        data_address: Address of the broker's data socket.
        next_update: The first update, which is also the weights version that the learners start from.
        packed_config: The config as one frame, for external runners.
        spaces_digest: Digest of the env's spaces, which must be equal for external runners.

    Attributes:
        open_reports: Update id → future of its report, in the order of opening. Futures are cancelled if the learners
            are rolled back. Whoever removes an entry accounts for its report.
    """

    def __init__(
        self,
        run_id: str,
        data_address: str,
        *,
        next_update: int,
        packed_config: bytes = b"",
        spaces_digest: str = "",
    ) -> None:
        core = DriverCore(
            run_id,
            "driver",
            new_peer_id(),
            on_report=self._on_report,
            tell=self._tell,
            next_update=next_update,
            config=packed_config,
            spaces_digest=spaces_digest,
            package_version=package_version(),
        )
        super().__init__(core, data_address)
        self._traces_others = False
        self.open_reports: dict[int, asyncio.Future[Report]] = {}
        self.progress: Progress | None = None

    def open_update(self, update: OpenUpdate) -> None:
        """Open the next update. Its report is in `open_reports` once it is committed."""
        self.open_reports[update.update_id] = self._loop.create_future()
        self.do(self.core.open_update(update))

    def set_connector_state(self, state: object) -> None:
        """Send a merged connector state to all runners, ahead of the leases that require it."""
        self.do(self.core.set_connector_state(pack_blob(state)))

    def reset(self, generation: int, next_update: int) -> None:
        """Announce that the learners have another state. Call `give_up_reports` first: open updates become void."""
        self.do(self.core.reset(generation, next_update))

    def handle(self, event: Received) -> None:
        """Pass a message to the core; write traced stages of other hosts."""
        if isinstance(event.message, TraceEvents):
            self._traces_others = True
            try:
                add_to_trace(event.message, event.payload)
            except WireError as error:
                self._refuse(error)
            return
        super().handle(event)

    def _on_report(self, report: Report) -> None:
        """Resolve the future of the report's update."""
        future = self.open_reports.get(report.report.update_id)
        if future is not None and not future.done():
            future.set_result(report)

    def _tell(self, message: Notice | Progress) -> None:
        if isinstance(message, Progress):
            self.progress = message
        elif message.event not in _QUIET_EVENTS:
            peer = "" if message.role == "broker" else f"{message.role} {message.name} "
            _log.warning("broker: %s%s: %s", peer, message.event, message.detail)

    def give_up_reports(self) -> list[Report]:
        """Stop waiting for open updates, and return the reports that are not read yet. `open_reports` is then empty."""
        futures = [*self.open_reports.values()]
        self.open_reports.clear()
        return [future.result() for future in futures if not future.cancel()]

    async def stop(self) -> None:
        """Send GOODBYE and close."""
        if self._traces_others and not self.core.is_stopped:
            await asyncio.sleep(2 * HEARTBEAT_S)  # the last stages are on their way
        await self.close()
