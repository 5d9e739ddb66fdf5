"""How a broker behaves: its timers, limits and patience."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEARTBEAT_S", "BrokerOptions"]

HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """How a broker behaves. Durations in seconds.

    Attributes:
        run_id: Of the run; peers of another one are refused.
        incarnation: Rises with every start of the run's broker, e.g. milliseconds of wall time.
        heartbeat_s: How often everyone reports.
        peer_timeout_s: A peer silent for this long is lost (the transport usually knows sooner).
        driver_timeout_s: Without a driver for this long the broker stops.
        resend_s: Before something unanswered is sent again.
        recovery_grace_s: How long a restarted broker waits for runners to send again what an update
            that was trained meanwhile has used, so that its report is complete.
        max_leases_per_runner: 1 would idle a runner for a round trip between two leases.
        window_messages, window_bytes: Uncommitted fragments per runner beyond which it may not run
            ahead of the update that is being collected.
        memory_bytes: Fragments held, and those still to come of leases, beyond which nobody may run ahead.
        resent_bytes: Fragments held beyond which a runner may add no more than its share of `memory_bytes`
            without a lease, as it does to a broker that was restarted.
        forget_after_s: A runner that was away for so long is forgotten; it may not come back.
        death_limit: A fragment in flight at so many learner deaths is quarantined.
        push_weights_below_bytes: Larger weights are only announced; receivers ask for them.
        journal: Accepted fragments are acknowledged once a journal on disk holds them.
        first_hung_after_s: Least limit before the first minibatch of a rank that is alone; it learns its own
            pace then (see `ProgressWatch`).
        late_after_s: A peer at work that says nothing for so long, or that other ranks wait for, is
            looked after; see `SilenceWatch` and `RankWatch`.
        rank_first_hung_after_s: The latter's limit until every rank has trained an update.
    """

    run_id: str
    incarnation: int
    heartbeat_s: float = HEARTBEAT_S
    peer_timeout_s: float = 10.0
    driver_timeout_s: float = 30.0
    resend_s: float = 2.0
    recovery_grace_s: float = 2.0
    max_leases_per_runner: int = 2
    window_messages: int = 64
    window_bytes: int = 32 * 1024 * 1024
    memory_bytes: int = 1024 * 1024 * 1024
    resent_bytes: int = 1024 * 1024 * 1024
    forget_after_s: float = 3600.0
    death_limit: int = 3
    push_weights_below_bytes: int = 32 * 1024 * 1024
    first_hung_after_s: float = 300.0
    journal: bool = False
    late_after_s: float = 2.0
    rank_first_hung_after_s: float = 60.0
