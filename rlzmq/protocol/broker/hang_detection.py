"""Detection of hung peers: registered and connected, but silent or without progress."""

from __future__ import annotations

from rlzmq.protocol.broker.registration import Registration
from rlzmq.protocol.broker.state import BrokerState, Peer
from rlzmq.protocol.progress_deadlines import ExpectedPeers, SlowRankDetector
from rlzmq.wire.messages import DriverState, LearnerState

__all__ = ["HangDetection"]


class HangDetection:
    """Reports hung peers to the driver.

    These are silent runners and ranks, ranks that block the others, and expected peers that have not registered
    (`ExpectedPeers`).

    A silent runner that the driver does not expect is external. No supervisor can check it, so it counts as lost; it
    registers again when it can. The transport may notice an unreachable host only much later.

    A runner whose environments hang exits by itself (see `roles.runner.env_watchdog`).
    """

    def __init__(self, state: BrokerState, registration: Registration) -> None:
        self._state = state
        self._registration = registration
        self._generation: int | None = None
        self._absences = ExpectedPeers()
        self._expected: set[tuple[str, str]] = set()
        self._expected_by = ""
        self._ranks = SlowRankDetector(
            min_s=state.options.late_after_s, first_s=state.options.rank_first_hung_after_s
        )

    def learner_reports(self, peer: Peer, message: LearnerState, now: float) -> None:
        """Handle a rank's heartbeat."""
        if message.generation != self._state.generation:
            return
        if message.generation != self._generation:
            self._generation = message.generation
            self._ranks.begin()
        peer.has_worked = message.progress > 0
        is_training = 2 in message.phases
        self._ranks.heard(peer.uuid, message.progress, message.next_update, now, is_training=is_training)
        # A single rank has no others waiting for it, so it is judged by its own pace.
        if is_training:
            if peer.watch.stamp(message.progress, now):
                self._state.moved("training", now)
        else:
            peer.watch.idle(now)

    def driver_expects(self, peer: Peer, message: DriverState) -> None:
        """Handle the driver's heartbeat: the peers that it expects."""
        self._expected_by = peer.uuid
        self._expect(
            {("runner", name) for name in message.runners} | {("learner", name) for name in message.learners}
        )

    def patience_s(self) -> float:
        """Return how long a peer working on the next update may be silent before it counts as hung."""
        state = self._state
        is_training = state.next_commit in state.runs
        if is_training and state.num_ranks > 1:
            return self._ranks.limit_s()
        at_work = (
            state.ranks.values()
            if is_training
            else [peer for peer in state.runners.values() if state.leases.of_peer(peer.uuid)]
        )
        return max((peer.watch.hung_after_s() for peer in at_work), default=0.0)

    def forgive(self, away_s: float, now: float) -> None:
        """Discount a time in which this broker was stopped."""
        for peer in self._state.by_routing.values():
            peer.forgive(away_s, now)
        self._ranks.forgive(away_s, now)
        self._absences.forgive(away_s, now)

    def tick(self, now: float) -> None:
        """Check all peers."""
        state = self._state
        quiet_since = now - state.options.late_after_s
        quiet = [p for p in (*state.runners.values(), *state.ranks.values()) if p.heard_at <= quiet_since]
        for peer in quiet:
            if not peer.is_late and peer.has_worked and peer.silence.is_late(now):
                peer.is_late = True
                detail = f"it has been silent for {peer.silence.limit_s():.1f} s"
                if self._is_from_outside(peer):
                    self._registration.forget(peer, "lost", detail)
                else:
                    state.notify("silent", peer.hello.role, peer.hello.name, detail)
        self._call_the_roll(now)
        if state.num_ranks == 1:
            self._watch_alone(now)
        elif state.group_is_complete and state.generation == self._generation:
            self._watch_ranks(now)

    def _is_from_outside(self, peer: Peer) -> bool:
        driver, hello = self._state.driver, peer.hello
        has_told = driver is not None and driver.uuid == self._expected_by
        return has_told and hello.role == "runner" and ("runner", hello.name) not in self._expected

    def _expect(self, expected: set[tuple[str, str]]) -> None:
        self._state.is_roll_new |= expected != self._expected
        self._expected = expected

    def _call_the_roll(self, now: float) -> None:
        state = self._state
        if state.driver is None or state.driver.uuid != self._expected_by:
            self._expect(set())  # a new driver names the peers that it expects
        if state.is_roll_new:
            state.is_roll_new = False
            here = [("runner", peer.hello.name) for peer in state.runners.values()]
            here += [("learner", peer.hello.name) for peer in state.ranks.values()]
            self._absences.look(self._expected, here, now)
        for role, name, absence in self._absences.overdue(now):
            detail = f"it has not registered for {now - absence.since:.1f} s"
            state.notify(absence.event, role, name, detail)

    def _watch_ranks(self, now: float) -> None:
        limit_s = self._ranks.limit_s()
        for uuid in self._ranks.hung(now):
            for peer in self._state.ranks.values():
                if peer.uuid == uuid:
                    detail = f"the other ranks have waited for it in a collective for {limit_s:.1f} s"
                    self._state.notify("hung", "learner", peer.hello.name, detail)

    def _watch_alone(self, now: float) -> None:
        for peer in self._state.ranks.values():
            if not peer.is_suspect and peer.watch.health(now) == "hung":
                peer.is_suspect = True
                detail = f"no minibatch for {peer.watch.hung_after_s():g} s"
                self._state.notify("hung", "learner", peer.hello.name, detail)
