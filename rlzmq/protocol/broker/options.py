"""Options of the broker: timers and limits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEARTBEAT_S", "BrokerOptions"]

HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Timers and limits of the broker. Durations in seconds.

    Attributes:
        run_id: Id of the run; peers of another run are refused.
        incarnation: Increases with every start of the run's broker, e.g. milliseconds of wall time.
        heartbeat_s: Interval of all heartbeats.
        peer_timeout_s: A peer silent for this long is lost, or for longer if it often is; see `Patience`. Usually the
            transport notices sooner.
        resend_s: Time after which an unanswered message is sent again.
        recovery_grace_s: How long a restarted broker waits for runners to send fragments again that were used by an
            update trained in the meantime, so that its report is complete. It does not wait for runners that have been
            replaced.
        max_leases_per_runner: Maximum number of leases per runner. With 1, a runner would idle for a round trip
            between two leases.
        window_messages, window_bytes: Uncommitted fragments per runner beyond which it may not sample
            ahead of the update being collected.
        memory_bytes: Bytes of held and leased fragments beyond which no runner may sample ahead.
        resent_bytes: Bytes of held fragments beyond which a runner may add only its share of `memory_bytes`
            without a lease, as runners do after a restart of the broker.
        forget_after_s: A runner absent for this long is forgotten and may not come back.
        death_limit: Number of learner deaths during its training after which a fragment is quarantined.
        push_weights_below_bytes: Larger weights are only announced; receivers request them.
    """

    run_id: str
    incarnation: int
    heartbeat_s: float = HEARTBEAT_S
    peer_timeout_s: float = 10.0
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
