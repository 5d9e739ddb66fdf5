"""Reports: reports of committed updates to the driver, made once per update and repeated until confirmed.

A report carries the metas of fragments that ended since the last one, and their runners' watermarks. Once
the driver has it, runners may forget those fragments, and learners the update.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlzmq.protocol.broker.state import BrokerState, KeptReport, OpenedUpdate, Peer, Run
from rlzmq.wire.fragment_message import FragmentRange, pack_blobs, pack_ranges
from rlzmq.wire.messages import UpdateCommitted, UpdateReport
from rlzmq.wire.schema import FragmentId

__all__ = ["Reports"]


class Reports:
    """Makes, repeats and confirms reports."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def make(
        self, run: Run, opened: OpenedUpdate, num_kept: int, version_steps: Mapping[int, int], now: float
    ) -> None:
        """Make and send the report of a committed update.

        Args:
            run, opened: Plan and request of the update.
            num_kept: Change in the account's number of trained env steps.
            version_steps: Number of trained env steps by weights version, of fragments that are known here.
            now: Time of the commit.
        """
        state = self._state
        accounting = state.ledger.accounting
        planned_at = now if run.planned_at is None else run.planned_at
        report = UpdateReport(
            broker_incarnation=state.options.incarnation,
            min_generation=state.min_generation,
            update_id=run.update_id,
            generation=run.generation,
            num_env_steps=run.num_steps,
            num_kept_steps=num_kept,
            num_trained_steps=run.num_trained_steps,
            accounting=accounting.counts(),
            dropped=dict(accounting.dropped),
            versions=tuple(sorted(version_steps)),
            version_steps=tuple(version_steps[version] for version in sorted(version_steps)),
            sampling_s=planned_at - opened.at,
            training_s=now - planned_at,
        )
        reported, state.to_report = state.to_report, []
        payload = (
            *pack_ranges(FragmentRange(fragment, 0, size) for fragment, size, _ in reported),
            *pack_blobs(meta for _, _, meta in reported),
            *pack_blobs(run.results[rank] for rank in sorted(run.results)),
            *pack_ranges(state.ledger.take_watermarks()),
        )
        state.take_committed()
        settled, state.settled = state.settled, []
        state.journal.reported(run.update_id)
        kept = state.reports[run.update_id] = KeptReport(report, payload, now, settled)
        self._send(kept, now)

    def send_all(self, now: float) -> None:
        """Send all unconfirmed reports to a driver that registered."""
        for report in self._state.reports.values():
            self._send(report, now)

    def send_again(self, now: float) -> None:
        """Repeat the reports that were not confirmed in time."""
        for report in self._state.reports.values():
            if now - report.sent_at >= self._state.options.resend_s:
                self._send(report, now)

    def driver_has(self, next_report: int) -> None:
        """Discard reports below `next_report`, and let learners forget those updates."""
        state = self._state
        for update_id in [u for u in state.reports if u < next_report]:
            self._let_go(state.reports.pop(update_id))
            for peer in state.ranks.values():
                self.confirm(peer, update_id)

    def give_up(self) -> None:
        """Discard all reports after the driver has returned to a checkpoint."""
        state = self._state
        for report in state.reports.values():
            self._let_go(report)
        state.reports.clear()
        state.ledger.tell_again()

    def confirm(self, peer: Peer, update_id: int) -> None:
        """Send UPDATE_COMMITTED to a rank, with the fragments that runners have forgotten and it may forget."""
        state = self._state
        forgotten = pack_ranges(
            FragmentRange(FragmentId(runner.uuid, runner.incarnation, runner.first_unacked), 0, 0)
            for runner in state.runners.values()
        )
        state.send(peer, UpdateCommitted(update_id, state.generation), tuple(forgotten))

    def _send(self, report: KeptReport, now: float) -> None:
        if self._state.driver is not None:
            report.sent_at = now
            self._state.send(self._state.driver, report.message, report.payload)

    def _let_go(self, report: KeptReport) -> None:
        for fragment in report.settled:
            self._state.receipts.let_go(fragment)
