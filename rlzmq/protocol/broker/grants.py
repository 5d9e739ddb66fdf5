"""Granting of leases: which runner samples next, how much, and with which weights."""

from __future__ import annotations

from rlzmq.protocol.broker.published_state import PublishedState
from rlzmq.protocol.broker.state import BrokerState, Peer
from rlzmq.protocol.leases import GrantedLease, plan_lease, small_lease, step_allowance
from rlzmq.wire.messages import Lease, LeaseReturned, OpenUpdate, RunnerState

__all__ = ["Grants"]

_LEAST_MAX_S = 0.05
_SLACK = 2.0  # times the expected duration of a lease
_FRESH = 0.75  # fraction of the time until data is too old
_PATIENCE = 5.0  # times the 99th percentile of a runner's vector steps


class Grants:
    """Grants leases for the update being collected. `protocol.leases` computes their size."""

    def __init__(self, state: BrokerState, store: PublishedState) -> None:
        self._state = state
        self._store = store

    def returned(self, peer: Peer, message: LeaseReturned) -> None:
        """End a lease that its runner returned."""
        lease = self._state.leases.leases.get(message.lease_id)
        if lease is not None and lease.peer == peer.uuid:
            self._state.leases.end(message.lease_id)

    def heartbeat(self, peer: Peer, message: RunnerState, now: float) -> None:
        """Renew the leases of a runner that makes progress. End those that it never received."""
        state = self._state
        if not message.is_sampling:
            peer.watch.idle(now)
            peer.is_suspect = peer.is_overdue
        elif peer.watch.stamp(message.progress, now):
            peer.is_suspect = peer.is_overdue
            state.leases.renew(peer.uuid, now, _PATIENCE * peer.watch.usual_s())
            state.moved("collecting", now)
        if message.unaccepted:
            return  # a fragment is on its way and may answer a lease
        held = set(message.leases)
        for lease in state.leases.of_peer(peer.uuid):
            if lease.lease_id not in held and now - lease.granted_at >= state.options.resend_s:
                state.leases.end(lease.lease_id)

    def expire(self, now: float) -> None:
        """End the leases of runners without progress or long overdue, so that others sample the steps.

        Leases end only while another runner is free; otherwise late fragments would be wasted.
        """
        state = self._state
        leases = state.leases
        if not any(leases.num_of_peer(peer.uuid) == 0 for peer in self._candidates()):
            return
        for holder in state.runners.values():
            held = leases.of_peer(holder.uuid)
            is_overdue = bool(held) and now >= self._due_at(holder, held[0])
            for lease in held:
                if not is_overdue and now < lease.deadline:
                    continue
                leases.end(lease.lease_id)
                holder.is_suspect = True
                holder.is_overdue |= is_overdue
                detail = f"lease {lease.lease_id} of {lease.num_vector_steps} vector steps was not fulfilled"
                state.notify("lease_expired", "runner", holder.hello.name, detail)

    def _due_at(self, holder: Peer, lease: GrantedLease) -> float:
        """Return when the runner's oldest lease should have been fulfilled, regardless of progress."""
        expected_s = lease.max_s
        if not expected_s:  # granted while this was the only runner
            pace = holder.pace.env_steps_per_s
            expected_s = _SLACK * lease.num_env_steps / pace if pace else lease.timeout_s
        late_s = max(lease.timeout_s, _PATIENCE * holder.watch.usual_s())
        return max(lease.granted_at, holder.fragment_at) + expected_s + late_s

    def progress(self, now: float) -> None:
        """Grant all leases that may be granted now."""
        state = self._state
        if state.is_paused or state.weights is None or state.driver is None:
            return
        update_id = state.next_plan
        if update_id is None:
            return
        update = state.terms_of(update_id)
        if update is not None and update.staleness == 0:
            self._grant_exact(update, now)
            return
        # Asynchronous sampling does not wait for the driver to open the next update.
        terms = update or state.terms
        if terms is not None and terms.staleness > 0:
            self._grant_ahead(terms, now)

    def _grant_exact(self, update: OpenUpdate, now: float) -> None:
        """Staleness 0: grant exactly what the batch still lacks, with exactly its weights."""
        state = self._state
        assert state.weights is not None
        if (
            state.weights.version != update.weights_version
            or state.connector_version < update.connector_version
        ):
            return
        version = update.weights_version
        remaining = (
            state.batch_of(update)
            - state.ledger.free_steps(version, version)
            - state.leases.leased_env_steps(update.update_id)
        )
        while remaining > 0 and state.leases.available:
            granted = 0
            num_runners, mean_pace = self._num_active(), self._mean_pace()
            for peer in self._candidates():
                num_envs, full_length = self._counted_envs(peer), self._full_length(peer, update)
                num_steps = plan_lease(
                    remaining,
                    num_runners,
                    num_envs,
                    full_length,
                    pace=(peer.pace.env_steps_per_s or mean_pace) / mean_pace if mean_pace else 1.0,
                    leased_env_steps=state.leases.leased_env_steps(update.update_id),
                    held_env_steps=sum(lease.counted_env_steps for lease in state.leases.of_peer(peer.uuid)),
                )
                if not num_steps:
                    break
                if state.leases.num_of_peer(peer.uuid) and num_steps < update.fragment_length:
                    # No second lease near the end of a batch: the rest is granted to free runners once it is known
                    # exactly (as in a run in one process).
                    continue
                self._grant(peer, update, update.update_id, num_steps, now)
                granted += 1
                remaining -= num_steps * num_envs
            if not granted:
                return

    def _grant_ahead(self, terms: OpenUpdate, now: float) -> None:
        """Staleness >= 1: grant as much as the slots allow, with the latest weights."""
        state = self._state
        if state.connector_version < terms.connector_version:
            return
        batch = state.batch_of(terms)
        oldest, _ = state.version_bounds(terms)
        held_slots = state.ledger.accounting.pending + sum(state.unpublished.values())
        free = state.ledger.free_steps(oldest)
        small = small_lease(terms.fragment_length)
        progress = True
        while progress and state.leases.available:
            progress = False
            for peer in self._candidates():
                num_envs, leased = self._counted_envs(peer), state.leases.leased_env_steps()
                lacking = batch - free - leased
                allowance = step_allowance(
                    batch=batch,
                    staleness=terms.staleness,
                    num_envs=num_envs,
                    in_flight=held_slots + leased,
                )
                num_steps = min(self._full_length(peer, terms), allowance // num_envs)
                held = state.leases.num_of_peer(peer.uuid)
                if num_steps < 1 or (num_steps < small and (leased or lacking <= 0)):
                    continue
                if held and num_steps < terms.fragment_length:
                    continue
                if lacking <= 0 and not self._has_window(peer, terms, batch):
                    continue
                self._grant(peer, terms, -1, num_steps, now)
                progress = True

    def _has_window(self, peer: Peer, terms: OpenUpdate, batch: int) -> bool:
        """Return whether the runner may sample ahead of the update being collected."""
        state, options = self._state, self._state.options
        record = state.ledger.runner(peer.uuid, peer.incarnation)
        held = state.leases.num_of_peer(peer.uuid)
        per_fragment = terms.fragment_length * peer.hello.num_envs * len(state.runners)
        window = max(options.window_messages, 2 * (terms.staleness + 1) * batch // per_fragment)
        num_after = record.num_uncommitted + held + 1
        return (
            num_after <= window
            # Expected fragments are counted with the mean size of the received ones.
            and record.uncommitted_bytes * num_after <= options.window_bytes * record.num_uncommitted
            and state.ledger.num_bytes + len(state.leases.leases) * state.ledger.mean_bytes
            <= options.memory_bytes
        )

    def _num_active(self) -> int:
        return max(1, sum(not peer.is_suspect for peer in self._state.runners.values()))

    def _mean_pace(self) -> float:
        """Return the mean env steps per second of the runners with a known pace; 0 if there is none."""
        paces = [
            peer.pace.env_steps_per_s
            for peer in self._state.runners.values()
            if not peer.is_suspect and peer.pace.env_steps_per_s
        ]
        return sum(paces) / len(paces) if paces else 0.0

    def _max_s(self, peer: Peer, num_env_steps: int, terms: OpenUpdate) -> float:
        """Return the time after which a lease is cut short and others sample the rest; 0: never (a single runner).

        Otherwise a runner that has become slow would delay the others and deliver stale data.
        """
        if len(self._state.runners) < 2:
            return 0.0
        timeout_s = terms.lease_timeout_s
        pace = peer.pace.env_steps_per_s or self._mean_pace()
        expected_s = _SLACK * num_env_steps / pace if pace else timeout_s / 2
        max_s = expected_s if peer.has_worked else min(expected_s, timeout_s / 2)
        return max(_LEAST_MAX_S, min(max_s, self._fresh_s(terms)))

    def _fresh_s(self, terms: OpenUpdate) -> float:
        """Return how long data sampled now is likely to be fresh enough for a later update.

        With `max_policy_lag` L, data of version v is planned for update v + L at the latest, which happens about
        L - 1 updates from now; for L = 1, while the next one is trained.
        """
        pace = self._state.commit_pace.env_steps_per_s
        if terms.staleness == 0 or terms.max_policy_lag < 0 or not pace:
            return float("inf")
        return _FRESH * max(1, terms.max_policy_lag - 1) * self._state.batch_of(terms) / pace

    def _counted_envs(self, peer: Peer) -> int:
        """Return the expected env steps per vector step; before the first delivery at most those of other runners."""
        most_shown = self._state.most_envs
        return (
            peer.hello.num_envs if peer.has_worked or not most_shown else min(peer.hello.num_envs, most_shown)
        )

    def _full_length(self, peer: Peer, terms: OpenUpdate) -> int:
        """Return the number of vector steps of a full lease. A runner that has not delivered yet gets a small one."""
        if peer.has_worked or len(self._state.runners) < 2:
            return terms.fragment_length
        return small_lease(terms.fragment_length)

    def _candidates(self) -> list[Peer]:
        """Return the runners that may get a lease: those without one first, then in turn."""
        state = self._state
        free = [uuid for uuid in state.leases.available if not state.runners[uuid].is_suspect]
        in_turn = state.leases.in_turn(free)
        return [state.runners[uuid] for uuid in sorted(in_turn, key=state.leases.num_of_peer)]

    def _grant(self, peer: Peer, terms: OpenUpdate, update_id: int, num_steps: int, now: float) -> None:
        state = self._state
        assert state.weights is not None
        self._store.send_connector_state(peer)
        counted_envs = self._counted_envs(peer)
        max_s = self._max_s(peer, num_steps * counted_envs, terms)
        lease = state.leases.grant(
            peer.uuid,
            update_id,
            num_steps,
            peer.hello.num_envs,
            now,
            terms.lease_timeout_s,
            max_s=max_s,
            counted_envs=counted_envs,
        )
        message = Lease(
            lease_id=lease.lease_id,
            update_id=update_id,
            num_vector_steps=num_steps,
            generation=state.weights.generation,
            weights_version=state.weights.version,
            exact=update_id >= 0,
            connector_version=state.connector_version,
            timeout_s=terms.lease_timeout_s,
            max_s=max_s,
            by_env=terms.keeps_episodes,
            accepted=state.receipts.take_accepted(peer.uuid),
        )
        state.send(peer, message)
