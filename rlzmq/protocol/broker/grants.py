"""Granting of leases: which runner samples next, how much, and with which weights.

After every event (`BrokerCore._finish`), `Grants.progress` grants what has become possible::

    S = 0     _grant_exact    what the open update's batch still lacks, in lengths by `core.update_plan.plan_lease`
    S >= 1    _grant_ahead    what the slots of `core.update_plan.step_allowance` leave free, with the newest weights
    both      _grant          the runner with the fewest leases comes first, then the one served longest ago

A lease ends with its fragment (`intake`), when its runner returns it or is lost, or in `expire`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple, TypeVar

from rlzmq.core.patience import FACTOR, TICK_S
from rlzmq.core.update_plan import plan_lease, small_lease, step_allowance
from rlzmq.protocol.broker.state import BrokerState, Peer, PublishedState
from rlzmq.protocol.core import Received
from rlzmq.protocol.ledger import GrantedLease, Turn
from rlzmq.wire.messages import Lease, LeaseReturned, OpenUpdate, RunnerState

__all__ = ["Grants"]

_SLACK = 2.0  # times the expected duration of a lease
_FAST = 0.7  # of the mean pace; a runner below it is not preferred
_FRESH = 0.75  # fraction of the time until data is too old
_PACE_UNIT = 2.0**-60  # paces are added up as integers: exactly, in any order


_Item = TypeVar("_Item", Turn, tuple[float, Turn])


class _Kind(NamedTuple):
    """What the runners of a queue have in common: a lease that is too large for the first is so for all.

    `has_no_window` is whether they may not sample ahead; see `Grants._has_window`.
    """

    num_leases: int
    num_envs: int
    has_worked: bool
    has_no_window: bool


class _Place(NamedTuple):
    """Where a runner is in the queues of `Grants`, and its part of their sums."""

    host: str
    kind: _Kind
    turn: Turn
    pace: int
    need: float | None


class Grants:
    """Grants leases for the update being collected. `plan_lease` computes their size.

    Runners wait in sorted queues, so that the cost of an event hardly depends on their number: only those whose leases
    or pace have changed (`LeaseBook.take_changed`) are moved.
    """

    def __init__(self, state: BrokerState, store: PublishedState) -> None:
        self._state = state
        self._store = store
        self._places: dict[str, _Place] = {}  # of the runners that are not suspect
        self._queues: dict[_Kind, list[Turn]] = {}  # those that may get a lease
        # Those that may get a second lease of an exact batch, by whether their pace is known, and sorted by the
        # seconds (or steps) that the batch must take for it.
        self._seconds: dict[bool, list[tuple[float, Turn]]] = {True: [], False: []}
        self._num_of_host: Counter[str] = Counter()  # runners, without suspects
        self._sum_paces = self._num_paces = 0
        self._basis: tuple[tuple[bool, int, int], tuple[int, int]] = (False, 0, 0), (0, 0)

    def on_returned(self, peer: Peer, message: LeaseReturned, event: Received, now: float) -> None:
        """End a lease that its runner returned."""
        lease = self._state.leases.leases.get(message.lease_id)
        if lease is not None and lease.peer == peer.uuid:
            self._state.leases.end(message.lease_id)

    def heartbeat(self, peer: Peer, message: RunnerState, now: float) -> None:
        """Renew the leases of a runner that makes progress. End those that it never received."""
        state = self._state
        was_suspect = peer.is_suspect
        peer.pace_s = message.pace_s
        if not message.is_sampling:
            peer.is_suspect = peer.is_overdue
        elif message.progress != peer.progress:
            peer.progress = message.progress
            peer.is_suspect = peer.is_overdue
            state.leases.renew(peer.uuid, now, FACTOR * peer.pace_s)
            state.moved("collecting", now)
        if peer.is_suspect != was_suspect:
            state.leases.changed.add(peer.uuid)
        if message.unaccepted:
            return  # a fragment is on its way and may answer a lease
        held, lost_s = set(message.leases), max(state.options.resend_s, FACTOR * peer.travel.usual_s)
        for lease in state.leases.of_peer(peer.uuid):
            if lease.lease_id not in held and now - lease.granted_at >= lost_s:
                state.leases.end(lease.lease_id)

    def expire(self, now: float) -> None:
        """End the leases of runners without progress or long overdue, so that others sample the steps.

        Leases end only while another runner is free; otherwise late fragments would be wasted.
        """
        state = self._state
        leases = state.leases
        if all(kind.num_leases for kind in self._queues):
            return
        # No lease ends before its time-out, and they are in the order of their grants.
        late = itertools.takewhile(
            lambda lease: now >= lease.granted_at + lease.timeout_s, leases.leases.values()
        )
        for uuid in dict.fromkeys(lease.peer for lease in late):
            holder, held = state.runners[uuid], leases.of_peer(uuid)
            is_overdue = now >= self._due_at(holder, held[0])
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
        late_s = max(lease.timeout_s, FACTOR * holder.pace_s)
        return max(lease.granted_at, holder.fragment_at) + expected_s + late_s

    def progress(self, now: float) -> None:
        """Grant all leases that may be granted now."""
        state = self._state
        self._place_changed()
        if state.weights is None or state.driver is None:
            return
        update_id = state.next_plan
        if update_id is None:
            return
        # Asynchronous sampling does not wait for the driver to open the next update.
        update = state.terms_of(update_id)
        terms = update or state.terms
        if terms is None:
            return
        self._note_terms(terms)
        if update is not None and update.staleness == 0:
            self._grant_exact(update, now)
        elif terms.staleness > 0:
            self._grant_ahead(terms, now)

    def _grant_exact(self, update: OpenUpdate, now: float) -> None:
        """Staleness 0: grant exactly what the batch still lacks, with exactly its weights."""
        state, length = self._state, update.fragment_length
        assert state.weights is not None
        if (
            state.weights.version != update.weights_version
            or state.connector_version < update.connector_version
        ):
            return
        remaining = (
            state.batch_of(update)
            - state.ledger.free_steps(*state.version_bounds(update))
            - state.leases.leased_env_steps(update.update_id)
        )
        num_runners, mean_pace = max(1, len(self._places)), self._mean_pace()

        def grant(peer: Peer) -> bool:
            nonlocal remaining
            num_envs, full_length = self._counted_envs(peer), self._full_length(peer, update)
            num_steps = plan_lease(
                remaining,
                num_runners,
                num_envs,
                full_length,
                pace=(peer.pace.env_steps_per_s or mean_pace) / mean_pace if mean_pace else 1.0,
                leased_env_steps=state.leases.leased_env_steps(update.update_id),
                held_env_steps=state.leases.held_env_steps(peer.uuid),
                travel_steps=self._travel_steps(peer),
            )
            if not num_steps or (state.leases.num_of_peer(peer.uuid) and num_steps < length):
                # No second lease near the end of a batch: the rest is granted to free runners once it is known
                # exactly (as in a run in one process).
                return False
            self._grant(peer, update, update.update_id, num_steps, now)
            remaining -= num_steps * num_envs
            return True

        all_in_turn = length == 1 or len(state.runners) < 2
        while remaining > 0 and (
            first := self._first(kind for kind in self._queues if all_in_turn or not kind.num_leases)
        ):
            if not grant(self._at_hand(remaining) or first[0]):
                return
        while remaining > (length - 1) * min((kind.num_envs for kind in self._queues), default=0):
            batch = (remaining + state.leases.leased_env_steps(update.update_id)) / num_runners
            limits = {True: batch / mean_pace if mean_pace else 0.0, False: batch}
            turns = [
                turn
                for has_pace, seconds in self._seconds.items()
                for _, turn in seconds[
                    : bisect_right(seconds, limits[has_pace] * (1 + 1e-9), key=itemgetter(0))
                ]
            ]
            if not sum(grant(state.runners[turn.peer]) for turn in sorted(turns)):
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
        refused: set[_Kind] = set()
        while True:
            leased = state.leases.leased_env_steps()
            is_covered = free + leased >= batch
            first = self._first(
                kind
                for kind in self._queues
                if kind not in refused and not (is_covered and kind.has_no_window)
            )
            if first is None:
                return
            peer, kind = first
            num_envs = self._counted_envs(peer)
            allowance = step_allowance(
                batch=batch,
                staleness=terms.staleness,
                num_envs=num_envs,
                in_flight=held_slots + leased,
            )
            num_steps = min(self._full_length(peer, terms), allowance // num_envs)
            if (
                num_steps < 1
                or (num_steps < small and (leased or is_covered))
                or (kind.num_leases and num_steps < terms.fragment_length)
            ):
                refused.add(kind)
            elif is_covered and not self._has_memory():
                return
            elif is_covered and not self._has_window(peer, terms, batch):
                self._place(peer.uuid, has_no_window=True)
            else:
                self._grant(peer, terms, -1, num_steps, now)

    # ------------------------------------------------------------------ queues

    def _first(self, kinds: Iterable[_Kind]) -> tuple[Peer, _Kind] | None:
        """Return the runner of these kinds whose turn it is, with its kind."""
        kind = min(kinds, key=lambda kind: self._queues[kind][0], default=None)
        return (self._state.runners[self._queues[kind][0].peer], kind) if kind is not None else None

    def _place_changed(self) -> None:
        for uuid in self._state.leases.take_changed():
            self._place(uuid)

    def _note_terms(self, terms: OpenUpdate) -> None:
        """Place the runners again for which it matters that the terms, or the number of runners, have changed."""
        num_runners = len(self._state.runners)
        basis = (
            (num_runners < 2, terms.fragment_length, terms.staleness),
            (num_runners, self._state.batch_of(terms)),
        )
        if basis == self._basis:
            return
        is_same, self._basis = basis[0] == self._basis[0], basis
        without_window = (queue for kind, queue in self._queues.items() if kind.has_no_window)
        again = (
            [turn.peer for queue in without_window for turn in queue] if is_same else [*self._state.runners]
        )
        for uuid in again:
            self._place(uuid)

    def _place(self, uuid: str, *, has_no_window: bool = False) -> None:
        """Put a runner into the queues where it belongs now."""
        leases, peer = self._state.leases, self._state.runners.get(uuid)
        if (place := self._places.pop(uuid, None)) is not None:
            self._sum_paces -= place.pace
            self._num_paces -= place.pace > 0
            self._num_of_host[place.host] -= 1
            if place.kind.num_leases < leases.max_per_peer:
                _remove(self._queues[place.kind], place.turn)
                if not self._queues[place.kind]:
                    del self._queues[place.kind]
            if place.need is not None:
                _remove(self._seconds[place.pace > 0], (place.need, place.turn))
        if peer is None or peer.is_suspect:
            return
        turn, num_envs, pace = leases.turn_of(uuid), peer.hello.num_envs, peer.pace.env_steps_per_s
        kind = _Kind(turn.num_leases, num_envs, peer.has_worked, has_no_window)
        need, (is_alone, length, staleness) = None, self._basis[0]
        if turn.num_leases < leases.max_per_peer:
            insort(self._queues.setdefault(kind, []), turn)
            if turn.num_leases and peer.has_worked and not (is_alone or staleness):
                need = (leases.held_env_steps(uuid) + (length - 1) * num_envs) / (pace or 1.0)
                insort(self._seconds[pace > 0], (need, turn))
        self._places[uuid] = place = _Place(_host_of(peer), kind, turn, round(pace / _PACE_UNIT), need)
        self._sum_paces += place.pace
        self._num_paces += place.pace > 0
        self._num_of_host[place.host] += 1

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
        )

    def _has_memory(self) -> bool:
        """Return whether any runner may sample ahead."""
        state = self._state
        expected_bytes = len(state.leases.leases) * state.ledger.mean_bytes
        return state.ledger.num_bytes + expected_bytes <= state.options.memory_bytes

    def _mean_pace(self) -> float:
        """Return the mean env steps per second of the runners with a known pace; 0 if there is none."""
        return self._sum_paces / max(1, self._num_paces) * _PACE_UNIT

    def _max_s(self, peer: Peer, num_env_steps: int, terms: OpenUpdate) -> float:
        """Return the time after which a lease is cut short and others sample the rest; 0: never (a single runner)."""
        # Otherwise a runner that has become slow would delay the others and deliver stale data.
        if len(self._state.runners) < 2:
            return 0.0
        timeout_s = terms.lease_timeout_s
        pace = peer.pace.env_steps_per_s or self._mean_pace()
        expected_s = _SLACK * num_env_steps / pace if pace else timeout_s / 2
        max_s = expected_s if peer.has_worked else min(expected_s, timeout_s / 2)
        return max(TICK_S, min(max_s, self._fresh_s(terms)))

    def _fresh_s(self, terms: OpenUpdate) -> float:
        """Return how long data sampled now is likely to be fresh enough for a later update."""
        # With `max_policy_lag` L, data of version v is planned for update v + L at the latest, which happens about
        # L - 1 updates from now; for L = 1, while the next one is trained.
        pace = self._state.commit_pace.env_steps_per_s
        if terms.staleness == 0 or terms.max_policy_lag < 0 or not pace:
            return float("inf")
        return _FRESH * max(1, terms.max_policy_lag - 1) * self._state.batch_of(terms) / pace

    def _at_hand(self, remaining: int) -> Peer | None:
        """Return the external runner that delivered last, if all that is left takes less time than its weights' way."""
        # Then several runners would only share the path, and not be done any sooner.
        peer = self._state.runners.get(self._state.last_delivery)
        if peer is None or peer.is_suspect or self._state.leases.num_of_peer(peer.uuid):
            return None
        is_fast = peer.pace.env_steps_per_s >= _FAST * self._mean_pace()
        return peer if is_fast and remaining <= self._travel_steps(peer) else None

    def _travel_steps(self, peer: Peer) -> int:
        """Return the runner's part of the env steps that its host samples while weights and data travel."""
        # The weights reach a host once, so that its runners divide a batch without a second way.
        if not (host := _host_of(peer)):
            return 0
        return int(peer.travel.usual_s * peer.sampling.env_steps_per_s / self._num_of_host[host])

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
            num_vector_steps=num_steps,
            generation=state.weights.generation,
            weights_version=state.weights.version,
            exact=update_id >= 0,
            connector_version=state.connector_version,
            timeout_s=terms.lease_timeout_s,
            max_s=max_s,
            is_sorted_by_env=terms.keeps_episodes,
            accepted=state.receipts.take_accepted(peer.uuid),
        )
        state.send(peer, message)
        self._place_changed()


def _remove(items: list[_Item], item: _Item) -> None:
    """Remove an item from a sorted list."""
    del items[bisect_left(items, item)]


def _host_of(peer: Peer) -> str:
    """Return the host in an external runner's name; "" for a local one."""
    return peer.hello.name.partition("@")[2]
