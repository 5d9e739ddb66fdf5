"""Descriptions of what each role of a run is waiting for."""

from __future__ import annotations

from rlzmq.protocol.broker.state import BrokerState, Run

__all__ = ["waits_of"]


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
