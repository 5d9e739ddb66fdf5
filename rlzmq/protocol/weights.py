"""Weights publications: their frame format, the order of versions, and a receiver's state machine.

A publication is one frame, so that the transport (conflation, a dropped part) cannot separate the
weights from their version:

```
[wire version][kind PUBLICATION][header length: 2 bytes][msgpack header][zeros up to 512][body]
```

Weights are ordered by (generation, version). A generation is one formation of the learner group, in which the version
increases by one per committed update. A receiver applies only weights that are newer than its own and match their
digest. Each version is published at most once. A receiver that missed one (a late joiner, a slow subscriber) requests a
snapshot and gets the latest one, never a queue of old ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlzmq.wire.codec import (
    PUBLICATION,
    WIRE_VERSION,
    ArrayMismatchError,
    BoundExceededError,
    Buffer,
    MalformedFrameError,
    UnknownVersionError,
    from_header,
    pack_header,
    to_header,
    unpack_header,
    wire_decoder,
)

__all__ = [
    "PUBLICATION_PREFIX_BYTES",
    "PUBLICATION_TOPIC",
    "Publication",
    "WeightsReceiver",
    "new_publication_buffer",
    "notice_of",
    "open_publication",
    "seal_publication",
    "weights_digest",
]

# Fixed, so that a learner copies its weights directly after it and the body stays aligned.
PUBLICATION_PREFIX_BYTES = 512
# Prefix that a SUB socket subscribes to: publications of this wire version only.
PUBLICATION_TOPIC = bytes((WIRE_VERSION, PUBLICATION))


@dataclass(frozen=True, slots=True)
class Publication:
    """The header of a weights publication.

    Attributes:
        run_id: Weights of another run are refused.
        generation, version: Their place in the order of all weights.
        digest: `weights_digest` of the body. "" in shared memory, which cannot change while anyone holds it.
        layout_digest: ``WeightsLayout.digest``: names, shapes and dtypes of the parameters in the body.
        num_bytes: Size of the body.
        has_body: False for a notice. The body is then fetched with a snapshot request.
        num_env_steps: Lifetime env steps of the run that updates received before these weights.
    """

    run_id: str
    generation: int
    version: int
    digest: str
    layout_digest: str
    num_bytes: int
    has_body: bool = True
    num_env_steps: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """(generation, version). Newer weights compare greater."""
        return (self.generation, self.version)


def new_publication_buffer(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a uint8[512 + num_bytes] buffer: copy the weights into ``buffer[512:]``, then seal it."""
    return np.zeros(PUBLICATION_PREFIX_BYTES + num_bytes, np.uint8)


def weights_digest(body: Buffer) -> str:
    """Return the hex SHA-256 of the flat weights."""
    return hashlib.sha256(body).hexdigest()


def seal_publication(
    buffer: npt.NDArray[np.uint8],
    *,
    run_id: str,
    generation: int,
    version: int,
    layout_digest: str,
    num_env_steps: int = 0,
    has_digest: bool = True,
) -> Publication:
    """Write the header before the body at ``buffer[512:]``. The buffer is then the frame.

    Raises:
        BoundExceededError: The ids are so long that the header does not fit into the prefix.
    """
    body = buffer[PUBLICATION_PREFIX_BYTES:]
    header = Publication(
        run_id,
        generation,
        version,
        weights_digest(body.data) if has_digest else "",
        layout_digest,
        len(body),
        num_env_steps=num_env_steps,
    )
    prefix = _prefix(header)
    buffer[:PUBLICATION_PREFIX_BYTES] = np.frombuffer(prefix, np.uint8)
    return header


def notice_of(header: Publication) -> bytes:
    """Return a frame that announces weights without carrying them."""
    return _prefix(replace(header, has_body=False))


@wire_decoder
def open_publication(frame: Buffer) -> tuple[Publication, memoryview]:
    """Return the header and body of a publication frame; `WeightsReceiver` checks the digest.

    Raises:
        WireError: It is not a publication of this wire version, or the body's length differs from the declared one.
    """
    view = memoryview(frame).cast("B")
    if len(view) < PUBLICATION_PREFIX_BYTES:
        raise MalformedFrameError(f"a publication has at least 512 bytes, got {len(view)}")
    if view[0] != WIRE_VERSION:
        raise UnknownVersionError(f"publication of wire version {view[0]}, this side speaks {WIRE_VERSION}")
    length = int.from_bytes(view[2:4], "little")
    if view[1] != PUBLICATION or length > PUBLICATION_PREFIX_BYTES - 4:
        raise MalformedFrameError("not a publication: wrong kind or header length")
    fields = unpack_header(view[4 : 4 + length])
    if not isinstance(fields, dict):
        raise MalformedFrameError("a publication's header is a map")
    header = from_header(Publication, fields)
    body = view[PUBLICATION_PREFIX_BYTES:]
    if len(body) != (header.num_bytes if header.has_body else 0):
        raise ArrayMismatchError(f"weights of {header.num_bytes} bytes declared, {len(body)} came")
    return header, body


def _prefix(header: Publication) -> bytes:
    packed = pack_header(to_header(header))
    if len(packed) > PUBLICATION_PREFIX_BYTES - 4:
        raise BoundExceededError(f"a publication's header has at most 508 bytes, got {len(packed)}")
    first = PUBLICATION_TOPIC + len(packed).to_bytes(2, "little") + packed
    return first.ljust(PUBLICATION_PREFIX_BYTES, b"\0")


class WeightsReceiver:
    """Decides which weights a receiver applies. It stores no weights, only their order.

    Guarantees: weights accepted by `offer` are strictly newer than all accepted before, belong to
    this run and layout, and match their digest if they have one.

    Args:
        run_id: Expected run; "" accepts any.
        layout_digest: Expected layout; "" accepts any.
    """

    generation: int
    version: int

    def __init__(self, run_id: str = "", layout_digest: str = "") -> None:
        self.run_id = run_id
        self.layout_digest = layout_digest
        self.generation = -1
        self.version = -1
        self.refused: dict[str, int] = {}

    @property
    def order(self) -> tuple[int, int]:
        """(generation, version) of the applied weights; (-1, -1) before the first."""
        return (self.generation, self.version)

    def offer(self, header: Publication, body: object) -> bool:
        """Return whether to apply these weights now; True also records them as applied.

        A notice (no body) is never applied. Refusals are counted in ``refused`` by reason:
        "old", "run", "layout", "digest".
        """
        if self.run_id and header.run_id != self.run_id:
            return self._refuse("run")
        if not header.has_body:
            return False
        if header.order <= self.order:
            return self._refuse("old")
        if self.layout_digest and header.layout_digest != self.layout_digest:
            return self._refuse("layout")
        if header.digest and weights_digest(body) != header.digest:
            return self._refuse("digest")
        self.generation, self.version = header.order
        return True

    def satisfies(self, generation: int, version: int, *, exact: bool) -> bool:
        """Return whether a lease that requires these weights may be sampled with the applied ones."""
        if self.generation < generation:
            return False
        return self.version == version if exact else self.version >= version

    def _refuse(self, reason: str) -> bool:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        return False
