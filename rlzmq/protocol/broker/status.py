"""Read-only views of the broker's state: STATUS for observers, PROGRESS for the driver, what each role waits for."""

from __future__ import annotations

from typing import Any

from rlzmq.protocol.broker.state import BrokerState, Run
from rlzmq.wire.messages import Progress

__all__ = ["progress_of", "status_of", "waits_of"]


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
