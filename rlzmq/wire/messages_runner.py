"""Messages between runners and the broker: leases, fragments, acknowledgements."""

from __future__ import annotations

from typing import Any

from rlzmq.wire.schema import FragmentId, Spans, WireMessage, message

__all__ = [
    "Accepted",
    "Committed",
    "Fragment",
    "Lease",
    "LeaseReturned",
    "Rejected",
]


@message(16)
class Lease(WireMessage):
    """Permission to sample. Payload: (none).

    Attributes:
        update_id: The update that it is for; -1 if any update may use the data (staleness >= 1).
        num_vector_steps: Number of steps of the runner's vector env, unless `max_s` ends the lease.
        generation, weights_version: Minimum weights; exactly this version if ``exact``.
        connector_version: Minimum connector state; -1 if there is none.
        timeout_s: Time without progress after which the broker may grant the steps to another runner.
        accepted: Sequence numbers accepted since the last message to this runner.
        max_s: Number of seconds after which the sampled data must be delivered; 0: no limit.
        by_env: Whether the fragment must order its chunks by environment and fill in `env_steps`.
    """

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


@message(17, "runner")
class LeaseReturned(WireMessage):
    """A lease that the runner will not fulfil, e.g. because its weights are newer. Payload: (none)."""

    lease_id: int
    reason: str


@message(18, "runner")
class Fragment(WireMessage):
    """Sampled steps, encoded with array specs (`fragment_message.encode_fragment`).

    Payload: one frame per column array of ``EpisodeBatch.to_wire()``, then one uint8 frame, the
    `values.pack_blob` of its meta (episode metrics, connector delta).

    Attributes:
        num_env_steps: Number of trainable steps (autoreset steps do not count).
        weights_version: The oldest version used for any of its actions.
        batch: The header of ``EpisodeBatch.to_wire()``.
        env_steps: Env steps of each environment, in order, if the lease asks for them.
        busy_s: How long the runner sampled, and sampled what it was asked for before: the rest of the lease's time
            was needed by messages, weights and data on their way.
    """

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
    busy_s: float = 0.0

    @property
    def fragment_id(self) -> FragmentId:
        """The fragment's id within the run."""
        return FragmentId(self.runner, self.incarnation, self.seq)


@message(19)
class Accepted(WireMessage):
    """Fragments that are in the broker's ledger. The runner keeps them until COMMITTED. Payload: (none)."""

    incarnation: int
    accepted: Spans


@message(20)
class Committed(WireMessage):
    """Fragments that were trained, or dropped with a reason. The runner forgets them. Payload: (none).

    Attributes:
        watermark: All sequence numbers below it are committed.
        committed: Further committed sequence numbers.
    """

    incarnation: int
    watermark: int
    committed: Spans


@message(21)
class Rejected(WireMessage):
    """Refusal of a fragment, or of another message (then ``seq`` is -1). Payload: (none)."""

    seq: int
    reason: str
    detail: str
