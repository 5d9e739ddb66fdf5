"""Leases: who may sample how many vector steps next. The one flow control of the system.

`plan_lease` sizes a lease, purely; a run in one process calls the same function with one runner and
so plans the same leases as a distributed run with one runner. `LeaseBook` keeps who holds what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["GrantedLease", "LeaseBook", "Pace", "plan_lease", "small_lease", "step_allowance"]


_MEMORY = 0.7  # of what came before, with each fragment


def plan_lease(
    remaining_env_steps: int,
    num_runners: int,
    num_envs: int,
    fragment_length: int,
    *,
    pace: float = 1.0,
    leased_env_steps: int = 0,
    held_env_steps: int = 0,
) -> int:
    """Vector steps of the next lease of a batch; 0 when the batch is covered.

    Full leases while there is much to do; towards the end a runner's part of the rest, but no less
    than a small lease (a quarter of a full one, less for a slow runner); never more than what covers
    the rest. A runner's part goes by its pace. So runners finish together and less than one small
    lease is surplus. Growing `remaining_env_steps` never shrinks the result.

    Args:
        remaining_env_steps: Batch minus what came and minus what is leased (counted in full).
        num_runners: That share the rest, >= 1.
        num_envs: Env steps per vector step of the runner that asks.
        fragment_length: Vector steps of a full lease.
        pace: Env steps per second of the runner that asks, over the mean of all runners.
        leased_env_steps: What all runners hold of this batch, the one that asks included.
        held_env_steps: What the one that asks holds of it.

    Example:
        >>> plan_lease(1000, 1, 8, 50), plan_lease(100, 1, 8, 50), plan_lease(0, 1, 8, 50)
        (50, 13, 0)
        >>> plan_lease(400, 2, 8, 50), plan_lease(400, 2, 8, 50, pace=0.2), plan_lease(400, 2, 8, 50, pace=1.8)
        (25, 5, 45)
    """
    if remaining_env_steps <= 0:
        return 0
    covering = -(-remaining_env_steps // num_envs)
    part = (remaining_env_steps + leased_env_steps) * pace / max(1, num_runners) - held_env_steps
    least = max(1, int(small_lease(fragment_length) * min(1.0, pace)))
    return min(fragment_length, covering, max(math.ceil(part / num_envs), least))


class Pace:
    """Env steps per second of a runner of late: its last few fragments count most."""

    def __init__(self) -> None:
        self._num_env_steps = 0.0
        self._seconds = 0.0

    @property
    def env_steps_per_s(self) -> float:
        """0 as long as nothing came."""
        return self._num_env_steps / self._seconds if self._seconds else 0.0

    def note(self, num_env_steps: int, seconds: float) -> None:
        """A fragment came, so many seconds after its runner could begin it."""
        if num_env_steps > 0:
            self._num_env_steps = _MEMORY * self._num_env_steps + num_env_steps
            self._seconds = _MEMORY * self._seconds + max(seconds, 1e-6)


def small_lease(fragment_length: int) -> int:
    """Vector steps below which a lease is not split further: a quarter of a full one, at least 1."""
    return max(1, fragment_length // 4)


def step_allowance(
    *,
    batch: int,
    staleness: int,
    num_envs: int,
    in_flight: int,
) -> int:
    """Env steps that may be leased now in an asynchronous run (staleness S >= 1).

    S+1 slots of one batch each; a slot is held from the lease until the data was trained *and* the weights that
    came of it were published. In FIFO order the data is then at most S versions old when it is trained. Where
    learners replay data, an update trains what its fresh steps call for (`core.replay_ratio`), so the slots bound
    how far sampling may be ahead of the ratio, too.

    Args:
        batch: Env steps per update over all ranks.
        staleness: S.
        num_envs: Of the runner that asks; the slots always leave room for one vector step beyond a
            batch, or a batch smaller than a vector step could never be filled.
        in_flight: Leased (in full), pending, in training, or trained and not yet published.
    """
    if not batch:
        return 0
    return max((staleness + 1) * batch, batch + num_envs) - in_flight


@dataclass(slots=True)
class GrantedLease:
    """One lease that is out.

    Attributes:
        num_env_steps: If no step is an autoreset step: the most it can yield.
        counted_env_steps: What is expected of it; others sample the rest.
        deadline: If its holder shows no progress until then, its steps may be granted anew.
        max_s: After so many seconds of sampling its holder hands over what it has; 0: never.
    """

    lease_id: int
    peer: str
    update_id: int
    num_vector_steps: int
    num_env_steps: int
    counted_env_steps: int
    granted_at: float
    timeout_s: float
    deadline: float
    max_s: float


class LeaseBook:
    """Leases that are out, by id and by peer, and whose turn it is.

    Fairness: among peers that may get a lease, the one that was granted one the longest ago comes
    first (ties by peer key), so no order of arrival or of a dict decides.
    """

    def __init__(self, first_id: int = 1, max_per_peer: int = 2) -> None:
        self.leases: dict[int, GrantedLease] = {}
        self.max_per_peer = max_per_peer
        # Peers that may hold another lease; kept up to date so that a grant never looks at all peers.
        self.available: set[str] = set()
        self._by_peer: dict[str, dict[int, GrantedLease]] = {}
        self._last_turn: dict[str, int] = {}
        self._env_steps: dict[int, int] = {}
        self._next_id = first_id
        self._turn = 0

    def grant(
        self,
        peer: str,
        update_id: int,
        num_vector_steps: int,
        num_envs: int,
        now: float,
        timeout_s: float,
        *,
        max_s: float = 0.0,
        counted_envs: int | None = None,
    ) -> GrantedLease:
        """Records a new lease for a peer.

        Args:
            peer, update_id, num_vector_steps, timeout_s, max_s: See `GrantedLease`.
            num_envs: Env steps per vector step that the peer says it makes.
            counted_envs: Those expected of it; None: as many.
        """
        lease = GrantedLease(
            self._next_id,
            peer,
            update_id,
            num_vector_steps,
            num_vector_steps * num_envs,
            num_vector_steps * (num_envs if counted_envs is None else counted_envs),
            now,
            timeout_s,
            now + timeout_s,
            max_s,
        )
        self._next_id += 1
        self._turn += 1
        self._last_turn[peer] = self._turn
        self.leases[lease.lease_id] = lease
        self._env_steps[update_id] = self._env_steps.get(update_id, 0) + lease.counted_env_steps
        held = self._by_peer.setdefault(peer, {})
        held[lease.lease_id] = lease
        if len(held) >= self.max_per_peer:
            self.available.discard(peer)
        return lease

    def end(self, lease_id: int) -> GrantedLease | None:
        """A lease was fulfilled, returned or lost; None if it is not out (any more)."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            held = self._by_peer[lease.peer]
            del held[lease_id]
            if len(held) < self.max_per_peer:
                self.available.add(lease.peer)
            self._env_steps[lease.update_id] -= lease.counted_env_steps
            if not self._env_steps[lease.update_id]:
                del self._env_steps[lease.update_id]
        return lease

    def of_peer(self, peer: str) -> list[GrantedLease]:
        """The peer's leases, oldest first."""
        return list(self._by_peer.get(peer, {}).values())

    def num_of_peer(self, peer: str) -> int:
        """How many leases the peer holds."""
        return len(self._by_peer.get(peer, ()))

    def add_peer(self, peer: str) -> None:
        """A peer may be granted leases from now on."""
        if self.num_of_peer(peer) < self.max_per_peer:
            self.available.add(peer)

    def forget_peer(self, peer: str) -> list[GrantedLease]:
        """Ends all leases of a peer that left."""
        ended = [lease for lease in self.of_peer(peer) if self.end(lease.lease_id)]
        self._by_peer.pop(peer, None)
        self._last_turn.pop(peer, None)
        self.available.discard(peer)
        return ended

    def leased_env_steps(self, update_id: int | None = None) -> int:
        """Env steps expected of the leases of an update (or of all)."""
        if update_id is None:
            return sum(self._env_steps.values())
        return self._env_steps.get(update_id, 0)

    def renew(self, peer: str, now: float, patience_s: float) -> None:
        """The peer shows progress: its leases have their time-out, or `patience_s` if that is more, from now."""
        for lease in self.of_peer(peer):
            lease.deadline = max(lease.deadline, now + max(lease.timeout_s, patience_s))

    def extend(self, seconds: float) -> None:
        """Nobody could fulfil a lease for so long: all of this is later."""
        for lease in self.leases.values():
            lease.granted_at += seconds
            lease.deadline += seconds

    def in_turn(self, peers: Iterable[str]) -> list[str]:
        """Peers in the order in which they are served."""
        return sorted(peers, key=lambda peer: (self._last_turn.get(peer, 0), peer))
