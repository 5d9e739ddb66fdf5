"""Reports of committed updates to the driver, and read-only views of the broker's state.

A report is made once per update and repeated until it is confirmed. It carries the metas of fragments that ended since
the last one, and their runners' watermarks. Once the driver has it, runners may forget those fragments, and learners
the update. The views are STATUS for observers, PROGRESS for the driver, and what each role waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlzmq.core.patience import FACTOR, STEP_S
from rlzmq.protocol.broker.state import BrokerState, KeptReport, OpenedUpdate, Peer, Run
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.fragment_message import FragmentRange, pack_blobs, pack_ranges
from rlzmq.wire.messages import Progress, UpdateCommitted, UpdateReport

__all__ = ["Reports", "progress_of", "status_of", "waits_of"]


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
        confirmed = [update_id for update_id in state.reports if update_id < next_report]
        for update_id in confirmed:
            self._let_go(state.reports.pop(update_id))
            for peer in state.ranks.values():
                self.confirm(peer, update_id)
        if confirmed and state.group_is_complete:
            state.forgetters.clear()

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
            for uuid in state.forgetters
            if (runner := state.runners.get(uuid)) is not None
        )
        state.send(peer, UpdateCommitted(update_id, state.generation), tuple(forgotten))

    def _send(self, report: KeptReport, now: float) -> None:
        if self._state.driver is not None:
            report.sent_at = now
            self._state.send(self._state.driver, report.message, report.payload)

    def _let_go(self, report: KeptReport) -> None:
        for fragment in report.settled:
            self._state.receipts.let_go(fragment)


def status_of(state: BrokerState, now: float) -> dict[str, Any]:
    """Return the broker's state for observers, as plain values, with ages in seconds."""
    accounting = state.ledger.accounting
    leases = {uuid: state.leases.of_peer(uuid) for uuid in state.runners}
    oldest = next(iter(state.ledger.entries.values()), None)
    return {
        "run_id": state.options.run_id,
        "incarnation": state.options.incarnation,
        "generation": state.generation,
        "weights": list(state.weights.order) if state.weights else None,
        "next_commit": state.next_commit,
        "open_updates": sorted(state.open),
        "updates_in_flight": sorted(state.runs),
        "runners": [
            {
                "name": peer.hello.name,
                "incarnation": peer.incarnation,
                "num_leases": len(leases[uuid]),
                "oldest_lease_s": now - leases[uuid][0].granted_at if leases[uuid] else 0.0,
                "env_steps_per_s": peer.pace.env_steps_per_s,
                "num_uncommitted": state.ledger.runner(uuid, peer.incarnation).num_uncommitted,
                "num_env_steps": peer.sampled,
                "num_bad": peer.num_bad,
                "is_suspect": peer.is_suspect,
            }
            for uuid, peer in sorted(state.runners.items())
        ],
        "learners": [
            {"name": peer.hello.name, "rank": rank, "next_update": peer.next_update}
            for rank, peer in sorted(state.ranks.items())
        ],
        "has_driver": state.driver is not None,
        "bottleneck": state.bottleneck,
        "accounting": {**accounting.counts(), "dropped": dict(accounting.dropped)},
        "num_duplicates": accounting.num_duplicates,
        "num_fragments_held": len(state.ledger.entries),
        "oldest_fragment_s": now - oldest.accepted_at if oldest is not None else 0.0,
        "fragment_bytes": state.ledger.num_bytes,
        "num_env_steps_leased": state.leases.leased_env_steps(),
        "refused": dict(state.refused),
        "still_s": state.still_s(now),
        "waits": waits_of(state, now),
    }


def progress_of(state: BrokerState) -> Progress:
    """Return what the broker has of the driver, and whether it moves."""
    next_open = state.next_commit or 0
    while next_open in state.open:
        next_open += 1
    return Progress(
        next_open,
        state.connector_version,
        state.min_generation,
        is_paused=state.is_paused,
        num_moves=state.num_moves,
        patience_s=_patience_s(state),
    )


def _patience_s(state: BrokerState) -> float:
    """Return how long a peer that works on the next update may make no progress."""
    if state.next_commit in state.runs:
        return max((peer.pace_s for peer in state.ranks.values()), default=0.0)
    at_work = (peer for peer in state.runners.values() if state.leases.num_of_peer(peer.uuid))
    return max((max(STEP_S, FACTOR * peer.pace_s) for peer in at_work), default=0.0)


def waits_of(state: BrokerState, now: float) -> list[str]:
    """Return one line per waiting role. The first one blocks the next update."""
    update_id = state.next_commit
    if state.driver is None:
        return ["broker: waits for a driver"]
    if update_id is None or update_id not in state.open:
        return [f"broker: waits for the driver to open update {update_id}"]
    run = state.runs.get(update_id)
    lines = _collecting(state, update_id, now) if run is None else _training(state, run)
    if state.is_paused:
        lines.insert(0, "broker: grants no leases, the driver has paused it")
    if not state.group_is_complete:
        here = ", ".join(peer.hello.name for peer in state.ranks.values()) or "none"
        lines.append(f"broker: waits for learners: the group has {state.num_ranks}, registered: {here}")
    return lines


def _collecting(state: BrokerState, update_id: int, now: float) -> list[str]:
    update = state.open[update_id].terms
    oldest, newest = state.version_bounds(update)
    ready, leased = state.ledger.free_steps(oldest, newest), state.leases.leased_env_steps()
    lines = [
        f"broker: has been collecting update {update_id} for {now - state.open[update_id].at:.1f} s: {ready} of "
        f"{state.batch_of(update)} env steps have arrived, {leased} are leased"
    ]
    if state.weights is None or state.weights.version < update.weights_version:
        lines.append(f"broker: waits for rank 0's weights of version {update.weights_version}")
    if not state.runners:
        lines.append("broker: waits for env runners, none is registered")
    for peer in state.runners.values():
        leases = state.leases.of_peer(peer.uuid)
        what = f"samples a lease granted {now - leases[0].granted_at:.1f} s ago" if leases else "has no lease"
        lines.append(f"{peer.hello.name}: {what}, last heard {now - peer.heard_at:.1f} s ago")
    return lines


def _training(state: BrokerState, run: Run) -> list[str]:
    missing = set(range(run.num_ranks)) - (set(run.results) if run.is_training else run.ready)
    names = {rank: peer.hello.name for rank, peer in state.ranks.items()}
    those = (
        ", ".join(names.get(rank, f"rank {rank} (not registered)") for rank in sorted(missing)) or "nobody"
    )
    what = "the result" if run.is_training else "READY"
    return [f"broker: waits for {what} of update {run.update_id} from {those}"]
