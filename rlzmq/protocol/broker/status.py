"""Read-only views of the broker's state: STATUS for observers, PROGRESS for the driver."""

from __future__ import annotations

from typing import Any

from rlzmq.protocol.broker.state import BrokerState
from rlzmq.protocol.broker.waits import waits_of
from rlzmq.wire.messages import Progress

__all__ = ["progress_of", "status_of"]


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


def progress_of(state: BrokerState, patience_s: float) -> Progress:
    """Return the progress of the update being collected, for the driver."""
    update_id = state.next_plan or 0
    update = state.terms_of(update_id)
    oldest, newest = state.version_bounds(update) if update is not None else (0, None)
    next_open = state.next_commit or 0
    while next_open in state.open:
        next_open += 1
    accounting = state.ledger.accounting
    return Progress(
        update_id=update_id,
        next_open=next_open,
        connector_version=state.connector_version,
        min_generation=state.min_generation,
        num_steps_ready=state.ledger.free_steps(oldest, newest),
        num_steps_leased=state.leases.leased_env_steps(),
        num_runners=len(state.runners),
        num_learners=len(state.ranks),
        weights_version=state.weights.version if state.weights else -1,
        accounting=accounting.counts(),
        dropped=dict(accounting.dropped),
        is_paused=state.is_paused,
        num_moves=state.num_moves,
        patience_s=patience_s,
    )
