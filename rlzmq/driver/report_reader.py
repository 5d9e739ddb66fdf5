"""The driver's reading of the broker's reports: each fragment once, each env step in the account once.

A broker that is restarted makes reports anew that the one before it made, too, and fragments may be in both.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlzmq.core.printable import cut, printable
from rlzmq.driver.fragment_metadata import MetaCheck
from rlzmq.driver.update_results import Accounting
from rlzmq.protocol.events import Report
from rlzmq.protocol.ledger import RunnerRecord
from rlzmq.wire.errors import WireError
from rlzmq.wire.schema import FragmentId
from rlzmq.wire.values import unpack_blob

__all__ = ["ReportReader"]

_log = logging.getLogger("rlzmq.driver")


class ReportReader:
    """Remembers what was reported, by runner, until a report says that this runner is forgotten.

    Args:
        metas: Opens what runners say of their fragments.
        place_of: Which of this run's own runners a process is; None: one from outside.
        blame: Called with such a place and why, where its runner says what cannot be.

    Attributes:
        num_env_steps_without_report: Trained or dropped, and in the report of no fragment: its runner and the
            broker died one after the other.
    """

    def __init__(
        self, metas: MetaCheck, place_of: Callable[[str], int | None], blame: Callable[[int, str], None]
    ) -> None:
        self._metas = metas
        self._place_of = place_of
        self._blame = blame
        self._dropped: Counter[str] = Counter()
        self._reported: dict[tuple[str, int], RunnerRecord] = {}
        self.num_env_steps_without_report = 0

    @property
    def num_runners(self) -> int:
        """Processes of runners that are remembered."""
        return len(self._reported)

    def begin_after(self, dropped: Mapping[str, int]) -> None:
        """The broker has dropped these env steps by reason under drivers before this one: not of this run."""
        self._dropped = Counter(dropped)

    def take_new(self, report: Report) -> list[tuple[FragmentId, int, Any]]:
        """The report's fragments, without those that a broker before this one reported."""
        new = []
        for item in report.fragments:
            fragment = item[0]
            record = self._reported.setdefault((fragment.runner, fragment.incarnation), RunnerRecord())
            if not record.is_committed(fragment.seq):
                record.commit(fragment.seq)
                new.append(item)
        for key, watermark in report.watermarks.items():  # what was refused at the door is in no report
            if key in self._reported:
                self._reported[key].commit_below(watermark)
        for key in report.forgotten:
            self._reported.pop(key, None)
        return new

    def open_meta(self, fragment: FragmentId, blob: Any) -> dict[str, Any]:
        """What a runner says of a fragment: of one that lies, only how much it is."""
        place = self._place_of(fragment.runner)
        try:
            return self._metas.open(blob, is_trusted=place is not None)
        except ValueError as error:
            detail = cut(printable(str(error)))  # it may repeat what the runner sent
            _log.warning("the meta of fragment %s is unusable: %s", fragment, detail)
            if place is not None:
                self._blame(place, f"an unusable meta: {detail}")
            return {}

    def open_results(self, blobs: Sequence[Any]) -> list[dict[str, Any]]:
        """What the ranks say of an update; of one that cannot be read, nothing."""
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
        """Bring the run's account up to the broker's.

        Args:
            report: The newest.
            sampled: Env steps of its new fragments.
            accounting: Of the run; changed.
        """
        total_dropped = Counter(report.report.dropped)
        dropped = total_dropped - self._dropped
        self._dropped = total_dropped
        trained = report.report.num_kept_steps  # the others are dropped: "skipped"
        lost = max(0, trained + dropped.total() - sampled - accounting.pending)
        self.num_env_steps_without_report += lost
        accounting.add(sampled=sampled + lost, trained=trained, dropped=dict(dropped))
