"""What the broker keeps account of: every accepted fragment until it is committed, and who holds which leases.

Definitions. A fragment is *accepted* when its header is valid, its id is new, and it is in this ledger. It is
*committed* when each of its env steps was trained in a committed update or dropped with a reason. Its runner keeps a
copy until then, so each accepted, uncommitted fragment is in two processes, and any one of them may die.

A fragment's steps are always taken from the front: ``[0, done)`` are trained or skipped, ``[done,
taken)`` are allocated to updates in flight, ``[taken, num_steps)`` are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from rlzmq.wire.codec import Buffer, FragmentId
from rlzmq.wire.payloads import FragmentRange

__all__ = [
    "DROP_REASONS",
    "DropReason",
    "Entry",
    "GrantedLease",
    "LeaseBook",
    "Ledger",
    "Pace",
    "RunnerRecord",
    "StepAccount",
    "Turn",
]


# surplus: on-policy, after its batch was complete; stale: sampled under weights that are too old; fenced: from a
# superseded incarnation; rejected: malformed, wrong shape or not finite; quarantined: learners died
# while training it; rolled_back: from a lineage that was abandoned for a checkpoint; skipped: of an
# update in which no rank took a step, as its loss or gradients were not finite.
DropReason = Literal["surplus", "stale", "fenced", "rejected", "quarantined", "rolled_back", "skipped"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


class StepAccount:
    """Counts of env steps: each one that was sampled is trained, dropped for a reason, or pending."""

    def __init__(self) -> None:
        self.sampled: int = 0
        self.trained: int = 0
        self.dropped: dict[str, int] = {}
        self.num_duplicates = 0

    @property
    def pending(self) -> int:
        """Number of env steps neither trained nor dropped so far."""
        return self.sampled - self.trained - sum(self.dropped.values())

    def add(self, *, sampled: int = 0, trained: int = 0, dropped: Mapping[str, int] | None = None) -> None:
        """Count steps; those that are not `sampled` now were pending. They may be fewer, e.g. if sent twice."""
        self.sampled += sampled
        self.trained += trained
        for reason, num_steps in (dropped or {}).items():
            if num_steps:
                self.dropped[reason] = self.dropped.get(reason, 0) + num_steps
        least = min(self.sampled, self.trained, self.pending, *self.dropped.values())
        assert least >= 0, f"a count is negative: {self.counts()}, dropped {self.dropped}"

    def counts(self) -> dict[str, int]:
        """Return ``{"sampled", "trained", "pending"}``, without ``dropped``."""
        return {"sampled": self.sampled, "trained": self.trained, "pending": self.pending}


@dataclass(slots=True)
class Entry:
    """One accepted fragment.

    Attributes:
        num_steps: Number of env steps to train. After a drop it is smaller than ``size``, the number of sampled steps.
        order: Position in the order of acceptance.
        frames: The runner's message, forwarded unchanged; dropped after the commit.
        deaths: Number of learner deaths while it was being trained.
        is_reported: Whether the driver has its meta.
        accepted_at: Time of acceptance, by the clock of `BrokerCore.handle`.
        env_steps: Env steps of each environment, in order; () if unknown.
    """

    id: FragmentId
    num_steps: int
    size: int
    generation: int
    version: int
    order: int
    frames: tuple[Buffer, ...]
    num_bytes: int
    runner_name: str
    done: int = 0
    taken: int = 0
    deaths: int = 0
    is_reported: bool = False
    accepted_at: float = 0.0
    env_steps: tuple[int, ...] = ()

    @property
    def free(self) -> int:
        """Number of steps that no update has taken."""
        return self.num_steps - self.taken


@dataclass(slots=True)
class RunnerRecord:
    """Committed sequence numbers and used memory of one (runner, incarnation).

    Attributes:
        watermark, beyond: Sequence numbers below `watermark` and those in `beyond` are committed.
        told: The last watermark sent to the driver.
        is_known: Whether the driver has received any watermark of it.
        absent_since: When it was first found not to be registered.
    """

    watermark: int = 0
    beyond: set[int] = field(default_factory=set)
    num_uncommitted: int = 0
    uncommitted_bytes: int = 0
    told: int = 0
    is_known: bool = False
    absent_since: float | None = None

    def is_committed(self, seq: int) -> bool:
        """Return whether this sequence number is committed."""
        return seq < self.watermark or seq in self.beyond

    def commit(self, seq: int) -> None:
        """Mark a sequence number as committed and advance the watermark over contiguous ones."""
        if seq >= self.watermark:
            self.beyond.add(seq)
        self.commit_below(self.watermark)

    def commit_below(self, watermark: int) -> None:
        """Mark everything below as committed, since the runner no longer holds it."""
        if watermark > self.watermark:
            self.watermark = watermark
            self.beyond = {seq for seq in self.beyond if seq >= watermark}
        while self.watermark in self.beyond:
            self.beyond.discard(self.watermark)
            self.watermark += 1


class Ledger:
    """All accepted and uncommitted fragments, the committed ids, and the step accounting."""

    def __init__(self) -> None:
        self.accounting: StepAccount = StepAccount()
        self.entries: dict[FragmentId, Entry] = {}
        self.runners: dict[tuple[str, int], RunnerRecord] = {}
        self.num_bytes: int = 0
        self.num_accepted: int = 0
        self._bytes_accepted = 0
        self._free: dict[FragmentId, Entry] = {}
        self._free_steps_by_version: dict[int, int] = {}
        # For fragments of an earlier broker that have not been sent again yet: the end of their trained steps, and
        # the end of those taken by an update in training.
        self._done_elsewhere: dict[FragmentId, int] = {}
        self._taken_elsewhere: dict[FragmentId, int] = {}
        self._next_order = 0
        self._newly_committed: list[FragmentId] = []
        self._moved: dict[
            tuple[str, int], None
        ] = {}  # those whose watermarks may have moved since the last report
        self._forgotten: list[tuple[str, int]] = []

    def runner(self, runner: str, incarnation: int) -> RunnerRecord:
        """Return the record of a (runner, incarnation), created on first use."""
        return self.runners.setdefault((runner, incarnation), RunnerRecord())

    @property
    def mean_bytes(self) -> int:
        """Mean size of all accepted fragments."""
        return self._bytes_accepted // max(1, self.num_accepted)

    def is_committed(self, fragment: FragmentId) -> bool:
        """Return whether the fragment is committed."""
        record = self.runners.get((fragment.runner, fragment.incarnation))
        return record is not None and record.is_committed(fragment.seq)

    # ------------------------------------------------------------------ acceptance

    def accept(
        self,
        fragment: FragmentId,
        num_steps: int,
        *,
        generation: int,
        version: int,
        frames: Sequence[Buffer] = (),
        num_bytes: int = 0,
        runner_name: str = "",
        now: float = 0.0,
        env_steps: tuple[int, ...] = (),
    ) -> Entry | None:
        """Add a fragment; return None if it was accepted or refused before (idempotent).

        Steps that were trained under an earlier broker are marked as done and not counted.
        """
        if fragment in self.entries or self.is_committed(fragment):
            self.accounting.num_duplicates += 1
            return None
        entry = Entry(
            fragment,
            num_steps,
            num_steps,
            generation,
            version,
            self._next_order,
            tuple(frames),
            num_bytes,
            runner_name or fragment.runner,
            taken=num_steps,
            accepted_at=now,
            env_steps=env_steps if sum(env_steps) == num_steps and all(n >= 0 for n in env_steps) else (),
        )
        self._next_order += 1
        self.entries[fragment] = entry
        record = self.runner(fragment.runner, fragment.incarnation)
        record.num_uncommitted += 1
        record.uncommitted_bytes += num_bytes
        self.num_bytes += num_bytes
        self.num_accepted += 1
        self._bytes_accepted += num_bytes
        entry.done = min(self._done_elsewhere.pop(fragment, 0), num_steps)
        taken = min(self._taken_elsewhere.pop(fragment, 0), num_steps)
        self.accounting.add(sampled=num_steps - entry.done)
        self._change(entry, taken=max(entry.done, taken))
        self._close_if_done(entry)
        return entry

    def refuse(self, fragment: FragmentId, num_steps: int, reason: DropReason) -> bool:
        """Count a fragment as dropped on arrival, once; return False if it was seen before."""
        if fragment in self.entries or self.is_committed(fragment):
            self.accounting.num_duplicates += 1
            return False
        self._moved[fragment.runner, fragment.incarnation] = None
        self.runner(fragment.runner, fragment.incarnation).commit(fragment.seq)
        self.accounting.add(sampled=num_steps, dropped={reason: num_steps})
        return True

    # ------------------------------------------------------------------ allocation

    def free_steps(self, min_version: int = -1, max_version: int | None = None) -> int:
        """Return the free steps of fragments whose weights version is within the bounds."""
        total = 0
        for version, steps in self._free_steps_by_version.items():  # hot path: a plain loop
            if version >= min_version and (max_version is None or version <= max_version):
                total += steps
        return total

    def free_entries(self) -> list[Entry]:
        """Return the entries with free steps, in the order of acceptance."""
        return sorted(self._free.values(), key=lambda entry: entry.order)

    def take(self, entry: Entry, num_steps: int) -> FragmentRange:
        """Allocate the next free steps of an entry to an update."""
        assert 0 < num_steps <= entry.free, f"{entry.id}: {num_steps} of {entry.free} free steps"
        taken = FragmentRange(entry.id, entry.taken, num_steps)
        self._change(entry, taken=entry.taken + num_steps)
        return taken

    def reserve(self, ranges: Iterable[FragmentRange]) -> None:
        """Take the ranges of an update that began training under an earlier broker.

        Earlier steps in the same fragments belong to earlier updates and are taken, too.
        """
        for fragment, first, num_steps in ranges:
            end = first + num_steps
            entry = self.entries.get(fragment)
            if entry is not None:
                self._change(entry, taken=max(entry.taken, min(end, entry.num_steps)))
            elif not self.is_committed(fragment):
                self._taken_elsewhere[fragment] = max(self._taken_elsewhere.get(fragment, 0), end)

    def release(self, ranges: Iterable[FragmentRange]) -> None:
        """Free all steps of these fragments that are not done. Remaining updates must `reserve` theirs again."""
        for fragment, _, _ in ranges:
            entry = self.entries.get(fragment)
            if entry is not None:
                self._change(entry, taken=entry.done)
            self._taken_elsewhere.pop(fragment, None)

    # ------------------------------------------------------------------ commitment

    def commit(self, ranges: Iterable[FragmentRange], *, is_skipped: bool = False) -> int:
        """Commit an update's ranges as trained; or drop them, if the update was skipped.

        Steps trained or sent under an earlier broker are also counted here, once.

        Args:
            ranges: The whole batch.
            is_skipped: Whether no rank took a step.

        Returns:
            The number of trained env steps.
        """
        num_trained = 0
        for item in ranges:
            (fragment, first, num_steps), end = item, item.first + item.num_steps
            entry = self.entries.get(fragment)
            newly = 0
            if entry is not None:
                # Updates are committed in order, so there should be no gap before `first`. If there is one, count it
                # as skipped instead of trained.
                gap = max(0, min(first, entry.num_steps) - entry.done)
                newly = max(0, min(end, entry.num_steps) - entry.done - gap)
                self._advance(entry, end)
                if gap:
                    self.accounting.add(dropped={"skipped": gap})
                self._close_if_done(entry)
            elif not self.is_committed(fragment):
                self._remember_done(fragment, end)
            if is_skipped:
                self.accounting.add(sampled=num_steps - newly, dropped={"skipped": num_steps})
            else:
                self.accounting.add(sampled=num_steps - newly, trained=num_steps)
                num_trained += num_steps
        return num_trained

    def note_trained(self, ranges: Iterable[FragmentRange]) -> None:
        """Mark ranges that learners report as trained, possibly under an earlier broker, as done.

        They are counted with the update that trained them.
        """
        for fragment, first, num_steps in ranges:
            entry, end = self.entries.get(fragment), first + num_steps
            if entry is not None:
                before = entry.done
                self._advance(entry, end)
                self.accounting.add(sampled=before - entry.done)
                self._close_if_done(entry)
            elif not self.is_committed(fragment):
                self._remember_done(fragment, end)

    def disown_below(self, watermarks: Iterable[FragmentId]) -> None:
        """Mark fragments below these, of the same runners, as done: the driver has counted them already."""
        below = {(runner, incarnation): seq for runner, incarnation, seq in watermarks}
        for fragment, entry in list(self.entries.items()):
            if fragment.seq < below.get((fragment.runner, fragment.incarnation), 0):
                before = entry.done
                self._advance(entry, entry.num_steps)
                self.accounting.add(sampled=before - entry.done)
                self._close_if_done(entry)
        for (runner, incarnation), watermark in below.items():
            self.commit_below(runner, incarnation, watermark)

    def commit_below(self, runner: str, incarnation: int, watermark: int) -> None:
        """Mark a runner's fragments below `watermark` as committed, since it no longer holds them."""
        self._moved[runner, incarnation] = None
        self.runner(runner, incarnation).commit_below(watermark)

    def drop(self, entry: Entry, reason: DropReason) -> int:
        """Drop an entry's free steps and return their number. Steps taken by updates in flight are kept."""
        dropped = entry.free
        self._change(entry, num_steps=entry.taken)
        self.accounting.add(dropped={reason: dropped})
        self._close_if_done(entry)
        return dropped

    def pop_committed(self) -> list[FragmentId]:
        """Return the ids committed since the last call, in order, for their runners."""
        committed, self._newly_committed = self._newly_committed, []
        return committed

    def take_watermarks(self) -> list[FragmentRange]:
        """Return the watermarks that moved since the last call.

        They are ranges of 0 steps; forgotten runners are ranges of 1 step.
        """
        moved = []
        for runner, incarnation in self._moved:
            record = self.runners.get((runner, incarnation))
            if record is not None and record.watermark != record.told:
                record.told = record.watermark
                record.is_known = True
                moved.append(FragmentRange(FragmentId(runner, incarnation, record.watermark), 0, 0))
        self._moved.clear()
        gone = [FragmentRange(FragmentId(*key, 0), 0, 1) for key in self._forgotten]
        self._forgotten.clear()
        return [*moved, *gone]

    def tell_again(self) -> None:
        """Make the next `take_watermarks` return all watermarks, after reports were discarded."""
        self._moved = dict.fromkeys(self.runners)
        for record in self.runners.values():
            record.told = 0

    def forget(self, runner: str, incarnation: int) -> None:
        """Remove the record of a runner that is gone for good. The next report informs the driver."""
        record = self.runners.pop((runner, incarnation))
        if record.is_known:
            self._forgotten.append((runner, incarnation))

    def missing(self, ranges: Iterable[FragmentRange]) -> bool:
        """Return whether some of these fragments are neither held nor committed: not sent again yet."""
        return any(
            item.fragment not in self.entries and not self.is_committed(item.fragment) for item in ranges
        )

    # ------------------------------------------------------------------ private

    def _remember_done(self, fragment: FragmentId, end: int) -> None:
        self._done_elsewhere[fragment] = max(self._done_elsewhere.get(fragment, end), end)

    def _advance(self, entry: Entry, end: int) -> None:
        """Mark the steps up to `end` as done."""
        entry.done = max(entry.done, min(end, entry.num_steps))
        self._change(entry, taken=max(entry.taken, entry.done))

    def _close_if_done(self, entry: Entry) -> None:
        if entry.done < entry.num_steps or self.entries.pop(entry.id, None) is None:
            return
        record = self.runner(entry.id.runner, entry.id.incarnation)
        record.num_uncommitted -= 1
        record.uncommitted_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        self._moved[entry.id.runner, entry.id.incarnation] = None
        record.commit(entry.id.seq)
        self._newly_committed.append(entry.id)

    def _change(self, entry: Entry, *, taken: int | None = None, num_steps: int | None = None) -> None:
        """Change an entry's free steps. No other method does."""
        before = entry.free
        entry.taken = entry.taken if taken is None else taken
        entry.num_steps = entry.num_steps if num_steps is None else num_steps
        if entry.free == before:
            return
        assert entry.done <= entry.taken <= entry.num_steps, f"{entry}: done, taken, num_steps out of order"
        total = self._free_steps_by_version.pop(entry.version, 0) + entry.free - before
        if total:
            self._free_steps_by_version[entry.version] = total
        if entry.free:
            self._free[entry.id] = entry
        else:
            self._free.pop(entry.id, None)


_MEMORY = 0.7  # weight of earlier fragments, applied once per fragment


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

    def end(self, lease_id: int) -> None:
        """Remove a lease that was fulfilled, returned or lost, if it is outstanding."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            del self._by_peer[lease.peer][lease_id]
            self.changed.add(lease.peer)
            self._env_steps[lease.update_id] -= lease.counted_env_steps
            if not self._env_steps[lease.update_id]:
                del self._env_steps[lease.update_id]

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

    def forget_peer(self, peer: str) -> None:
        """End all leases of a peer that left."""
        for lease in self.of_peer(peer):
            self.end(lease.lease_id)
        self._by_peer.pop(peer, None)
        self._last_turn.pop(peer, None)
        self.changed.add(peer)

    def leased_env_steps(self, update_id: int | None = None) -> int:
        """Return the number of env steps expected from the leases of an update (or of all updates)."""
        if update_id is None:
            return sum(self._env_steps.values())
        return self._env_steps.get(update_id, 0)

    def renew(self, peer: str, now: float, patience_s: float) -> None:
        """Extend the leases of a peer that shows progress by their time-out, or by `patience_s` if that is longer."""
        for lease in self.of_peer(peer):
            lease.deadline = max(lease.deadline, now + max(lease.timeout_s, patience_s))
