"""Messages between runners and the broker: leases, fragments, acknowledgements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rlzmq.wire.kinds import Kind, Spans, WireMessage
from rlzmq.wire.schema import FragmentId

__all__ = [
    "Accepted",
    "Committed",
    "Fragment",
    "Lease",
    "LeaseReturned",
    "Rejected",
]


@dataclass(frozen=True, slots=True)
class Lease(WireMessage):
    """Permission to sample. Payload: (none).

    Attributes:
        update_id: The update it is for; -1 when the data may go to any (staleness >= 1).
        num_vector_steps: Exactly so many steps of the runner's vector env, unless `max_s` ends it.
        generation, weights_version: At least these weights; exactly this version if ``exact``.
        connector_version: At least this connector state; -1 if there is none.
        timeout_s: After so long without progress the broker may grant the steps to someone else.
        accepted: Sequence numbers accepted since the last message to this runner.
        max_s: Hand over what there is after this many seconds of sampling; 0: however long it takes.
        by_env: The fragment has its chunks in order of environments, and says in `env_steps` where each begins.
    """

    kind: ClassVar[Kind] = Kind.LEASE
    lease_id: int
    update_id: int
    num_vector_steps: int
    generation: int
    weights_version: int
    exact: bool
    connector_version: int
    timeout_s: float
    accepted: Spans = ()
    max_s: float = 0.0
    by_env: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReturned(WireMessage):
    """A lease that the runner will not fulfil, e.g. its weights are already newer. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.LEASE_RETURNED
    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fragment(WireMessage):
    """Sampled steps. Encoded with array specs (`fragments.encode_fragment`).

    Payload: one frame per column array of ``EpisodeBatch.to_wire()``, then one uint8 frame, the
    `values.pack_blob` of its meta (episode metrics, connector delta).

    Attributes:
        num_env_steps: Steps in it that can be trained (autoreset steps do not count).
        weights_version: The oldest version used for any of its actions.
        batch: The header of ``EpisodeBatch.to_wire()``.
        env_steps: If asked for by the lease: of each environment in order, its env steps.
    """

    kind: ClassVar[Kind] = Kind.FRAGMENT
    runner: str
    incarnation: int
    seq: int
    lease_id: int
    num_env_steps: int
    generation: int
    weights_version: int
    connector_version: int
    batch: dict[str, Any]
    env_steps: tuple[int, ...] = ()

    @property
    def fragment_id(self) -> FragmentId:
        """The id within the run."""
        return FragmentId(self.runner, self.incarnation, self.seq)


@dataclass(frozen=True, slots=True)
class Accepted(WireMessage):
    """These are in the broker's ledger; the runner keeps them until COMMITTED. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.ACCEPTED
    incarnation: int
    accepted: Spans


@dataclass(frozen=True, slots=True)
class Committed(WireMessage):
    """These are trained, or dropped with a reason: the runner forgets them. Payload: (none).

    Attributes:
        watermark: Every sequence number below it is committed.
        committed: Further committed ones.
    """

    kind: ClassVar[Kind] = Kind.COMMITTED
    incarnation: int
    watermark: int
    committed: Spans


@dataclass(frozen=True, slots=True)
class Rejected(WireMessage):
    """A message that was refused; a fragment's seq, else -1. Payload: (none)."""

    kind: ClassVar[Kind] = Kind.REJECTED
    seq: int
    reason: str
    detail: str
