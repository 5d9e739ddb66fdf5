"""The broker's reports: one per committed update, made once and repeated until the driver has it.

With it the driver gets the metas of fragments that ended since the last one, and their runners' watermarks.
Once it has a report, runners may forget the fragments in it, and learners the update.
"""

from __future__ import annotations

from rlzmq.protocol.broker.state import BrokerState, KeptReport, OpenedUpdate, Peer, Run
from rlzmq.wire.messages import UpdateCommitted, UpdateReport
from rlzmq.wire.ranges import FragmentRange, pack_blobs, pack_ranges
from rlzmq.wire.schema import FragmentId

__all__ = ["Reports"]


class Reports:
    """See the module's head."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def make(self, run: Run, opened: OpenedUpdate, num_kept: int, versions: list[int], now: float) -> None:
        """An update is committed: tell the driver.

        Args:
            run, opened: Of the update.
            num_kept: By how many env steps the trained ones of the account have become more.
            versions: Weights versions of the fragments that it trained.
            now: When it was committed.
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
            oldest_version=min(versions),
            newest_version=max(versions),
            sampling_s=max(0.0, planned_at - opened.at),
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
        """A driver registered: it gets whatever it has not confirmed."""
        for report in self._state.reports.values():
            self._send(report, now)

    def send_again(self, now: float) -> None:
        """Reports that the driver does not seem to have."""
        for report in self._state.reports.values():
            if now - report.sent_at >= self._state.options.resend_s:
                self._send(report, now)

    def driver_has(self, next_report: int) -> None:
        """Reports below are not needed any more, nor are the learners' memories of those updates."""
        state = self._state
        for update_id in [u for u in state.reports if u < next_report]:
            self._let_go(state.reports.pop(update_id))
            for peer in state.ranks.values():
                self.confirm(peer, update_id)

    def give_up(self) -> None:
        """The driver went back to a checkpoint: it wants none of them."""
        state = self._state
        for report in state.reports.values():
            self._let_go(report)
        state.reports.clear()
        state.ledger.tell_again()

    def confirm(self, peer: Peer, update_id: int) -> None:
        """UPDATE_COMMITTED to a rank, with what runners have forgotten so that it may, too."""
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
