"""Leases: permissions to sample a number of vector steps, which are the only flow control of the system.

`plan_lease` computes the size of a lease. A run in one process calls it with one runner, and so plans the same leases
as a distributed run with one runner. `LeaseBook` records who holds which leases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GrantedLease", "LeaseBook", "Pace", "Turn", "plan_lease", "small_lease", "step_allowance"]


_MEMORY = 0.7  # weight of earlier fragments, applied once per fragment


def plan_lease(
    remaining_env_steps: int,
    num_runners: int,
    num_envs: int,
    fragment_length: int,
    *,
    pace: float = 1.0,
    leased_env_steps: int = 0,
    held_env_steps: int = 0,
    travel_steps: int = 0,
) -> int:
    """Return the number of vector steps of the next lease of a batch; 0 if the batch is covered.

    Leases are full while much of the batch remains. Towards the end a runner gets its share of the rest, in
    proportion to its pace: at least a small lease (a quarter of a full one, less for a slow runner), at most what
    covers the rest. Runners therefore finish together, and the surplus stays below one small lease. The result
    never decreases as `remaining_env_steps` grows.

    Args:
        remaining_env_steps: Batch minus the steps that have arrived and those leased (counted in full).
        num_runners: Number of runners that share the rest, >= 1.
        num_envs: Env steps per vector step of the asking runner.
        fragment_length: Vector steps of a full lease.
        pace: Env steps per second of the asking runner, divided by the mean of all runners.
        leased_env_steps: Env steps of this batch leased to all runners, including the asking one.
        held_env_steps: Env steps of this batch leased to the asking runner.
        travel_steps: Env steps that the asking runner samples while a lease and its data are on their way: a smaller
            lease would take longer to travel than to sample.

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
    least = max(1, int(small_lease(fragment_length) * min(1.0, pace)), travel_steps // num_envs)
    return min(fragment_length, covering, max(math.ceil(part / num_envs), least))


class Pace:
    """Recent env steps per second of a runner, weighted towards its last few fragments."""

    def __init__(self) -> None:
        self._num_env_steps = 0.0
        self._seconds = 0.0

    @property
    def env_steps_per_s(self) -> float:
        """The current estimate; 0 before the first fragment."""
        return self._num_env_steps / self._seconds if self._seconds else 0.0

    def note(self, num_env_steps: int, seconds: float) -> None:
        """Add a fragment that took this many seconds."""
        if num_env_steps > 0:
            self._num_env_steps = _MEMORY * self._num_env_steps + num_env_steps
            self._seconds = _MEMORY * self._seconds + max(seconds, 1e-6)


def small_lease(fragment_length: int) -> int:
    """Return the number of vector steps below which a lease is not split: a quarter of a full one, at least 1."""
    return max(1, fragment_length // 4)


def step_allowance(
    *,
    batch: int,
    staleness: int,
    num_envs: int,
    in_flight: int,
) -> int:
    """Return the number of env steps that may be leased now in an asynchronous run (staleness S >= 1).

    There are S+1 slots of one batch each. A slot is occupied from the lease until the data was trained *and* the
    resulting weights were published. In FIFO order the data is then at most S versions old when it is trained. With
    replay, an update trains in proportion to its fresh steps (`core.update_plan`), so the slots also limit how far
    sampling may run ahead of the ratio.

    Args:
        batch: Env steps per update over all ranks.
        staleness: S.
        num_envs: Env steps per vector step of the asking runner. The slots leave room for one vector step beyond a
            batch; otherwise a batch smaller than a vector step could never be filled.
        in_flight: Env steps leased (in full), pending, in training, or trained but not yet published.
    """
    if not batch:
        return 0
    return max((staleness + 1) * batch, batch + num_envs) - in_flight


@dataclass(slots=True)
class GrantedLease:
    """One outstanding lease.

    Attributes:
        num_env_steps: Maximum number of env steps (if no step is an autoreset step).
        counted_env_steps: Expected number of env steps; other runners sample the rest.
        deadline: Time at which its steps may be granted again if its holder shows no progress until then.
        max_s: Seconds of sampling after which its holder delivers what it has; 0: no limit.
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


class Turn(NamedTuple):
    """Place of a peer in the order of service: those with the fewest leases first, then the oldest last grant.

    Ties are broken by the peer's key, so the order does not depend on any arrival or dict order.
    """

    num_leases: int
    last: int
    peer: str


class LeaseBook:
    """Outstanding leases, by id, in the order of their grants, and by peer.

    Attributes:
        changed: Peers whose place in the order of service may have changed, until `take_changed`.
    """

    def __init__(self, first_id: int = 1, max_per_peer: int = 2) -> None:
        self.leases: dict[int, GrantedLease] = {}
        self.max_per_peer = max_per_peer
        self.changed: set[str] = set()
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
        """Record a new lease for a peer.

        Args:
            peer, update_id, num_vector_steps, timeout_s, max_s: See `GrantedLease`.
            num_envs: Env steps per vector step that the peer declared.
            counted_envs: Expected env steps per vector step; None: `num_envs`.
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
        self._by_peer.setdefault(peer, {})[lease.lease_id] = lease
        self.changed.add(peer)
        return lease

    def end(self, lease_id: int) -> GrantedLease | None:
        """Remove and return a lease that was fulfilled, returned or lost; None if it is not outstanding."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            del self._by_peer[lease.peer][lease_id]
            self.changed.add(lease.peer)
            self._env_steps[lease.update_id] -= lease.counted_env_steps
            if not self._env_steps[lease.update_id]:
                del self._env_steps[lease.update_id]
        return lease

    def of_peer(self, peer: str) -> list[GrantedLease]:
        """Return the peer's leases, oldest first."""
        return list(self._by_peer.get(peer, {}).values())

    def num_of_peer(self, peer: str) -> int:
        """Return the number of leases that the peer holds."""
        return len(self._by_peer.get(peer, ()))

    def held_env_steps(self, peer: str) -> int:
        """Return the number of env steps expected from the peer's leases."""
        return sum(lease.counted_env_steps for lease in self._by_peer.get(peer, {}).values())

    def turn_of(self, peer: str) -> Turn:
        """Return the peer's place in the order of service."""
        return Turn(self.num_of_peer(peer), self._last_turn.get(peer, 0), peer)

    def take_changed(self) -> set[str]:
        """Return and clear `changed`."""
        changed, self.changed = self.changed, set()
        return changed

    def forget_peer(self, peer: str) -> list[GrantedLease]:
        """End and return all leases of a peer that left."""
        ended = [lease for lease in self.of_peer(peer) if self.end(lease.lease_id)]
        self._by_peer.pop(peer, None)
        self._last_turn.pop(peer, None)
        self.changed.add(peer)
        return ended

    def leased_env_steps(self, update_id: int | None = None) -> int:
        """Return the number of env steps expected from the leases of an update (or of all updates)."""
        if update_id is None:
            return sum(self._env_steps.values())
        return self._env_steps.get(update_id, 0)

    def renew(self, peer: str, now: float, patience_s: float) -> None:
        """Extend the leases of a peer that shows progress by their time-out, or by `patience_s` if that is longer."""
        for lease in self.of_peer(peer):
            lease.deadline = max(lease.deadline, now + max(lease.timeout_s, patience_s))
