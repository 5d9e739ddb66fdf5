"""ReportReader: accepts each fragment of the broker's reports once, with valid metadata, and each env step once.

A restarted broker repeats reports of its predecessor, so fragments may be in both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.printable import cut, printable
from rlzmq.driver.connector_sync import ConnectorSync
from rlzmq.driver.update_results import Accounting
from rlzmq.protocol.events import Report
from rlzmq.protocol.ledger import RunnerRecord
from rlzmq.runners.episode_metrics import EpisodeMetrics, add_fragment_metas
from rlzmq.wire.errors import WireError
from rlzmq.wire.schema import FragmentId
from rlzmq.wire.values import unpack_blob

__all__ = ["MetaCheck", "ReportReader"]

_log = logging.getLogger("rlzmq.driver")


class MetaCheck:
    """Applies metadata to scratch metrics and connectors first, so that invalid metadata cannot end the run.

    If no external peers may join, all runners belong to the run and nothing is checked.
    """

    def __init__(self, config: BaseConfig, spaces: Any) -> None:
        self._is_joinable = config.listen is not None
        if self._is_joinable:
            self._logger = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
            self._connectors = ConnectorSync(config, spaces)

    def open(self, blob: Any, *, is_trusted: bool) -> dict[str, Any]:
        """Return the metadata in a fragment's last frame.

        Args:
            blob: The frame as received.
            is_trusted: Whether this driver started the runner, which then runs the same code.

        Raises:
            ValueError: The frame is not metadata, or cannot be used.
        """
        try:
            meta = unpack_blob(blob)
        except WireError as error:
            raise ValueError(str(error)) from error
        if not isinstance(meta, dict):
            raise ValueError(f"expected a dict, got {type(meta).__name__}")
        if self._is_joinable and (not is_trusted or meta.get("custom_metrics")):
            self._try(meta, keeps_errors=is_trusted)
        return meta

    def _try(self, meta: dict[str, Any], *, keeps_errors: bool) -> None:
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
        place_of: Returns the place of a process in this run's runner group; None: it is external.
        blame: Called with such a place and the reason if its runner sent invalid metadata.

    Attributes:
        num_env_steps_without_report: Env steps trained or dropped whose fragment is in no report, because its runner
            and the broker died one after the other.
    """

    def __init__(
        self, metas: MetaCheck, place_of: Callable[[str], int | None], blame: Callable[[int, str], None]
    ) -> None:
        self._metas = metas
        self._place_of = place_of
        self._blame = blame
        self._dropped: Counter[str] = Counter()
        self._reported: dict[tuple[str, int], RunnerRecord] = {}
        self.num_env_steps_without_report: int = 0

    @property
    def num_runners(self) -> int:
        """Number of runner processes that are remembered."""
        return len(self._reported)

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

    def open_meta(self, fragment: FragmentId, blob: Any) -> dict[str, Any]:
        """Return a fragment's metadata; if it is unusable, return only the fragment's size."""
        place = self._place_of(fragment.runner)
        try:
            return self._metas.open(blob, is_trusted=place is not None)
        except ValueError as error:
            detail = cut(printable(str(error)))  # it may quote data from the runner
            _log.warning("the meta of fragment %s is unusable: %s", fragment, detail)
            if place is not None:
                self._blame(place, f"an unusable meta: {detail}")
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
