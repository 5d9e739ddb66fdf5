"""Publications, and a receiver that applies only what is newer and whole."""

from __future__ import annotations

import pytest

from rlzmq.protocol.runner_core import WeightsReceiver
from rlzmq.wire import codec
from rlzmq.wire.codec import (
    PUBLICATION_PREFIX_BYTES,
    new_publication_buffer,
    notice_of,
    open_publication,
    seal_publication,
)


def _publication(
    version: int, generation: int = 0, run_id: str = "run", layout: str = "layout", fill: int = 1
):
    buffer = new_publication_buffer(100)
    buffer[PUBLICATION_PREFIX_BYTES:] = fill
    seal_publication(buffer, run_id=run_id, generation=generation, version=version, layout_digest=layout)
    return buffer


def test_damaged_publications_are_refused():
    frame = bytearray(_publication(3).tobytes())
    for damaged in (frame[:100], frame[:-1], frame + b"x", b"\x63" + frame[1:], bytes(2) + frame[2:]):
        with pytest.raises(codec.WireError):
            open_publication(bytes(damaged))
    for length in (509, 65_535):  # what is left of the prefix is 508
        frame[2:4] = length.to_bytes(2, "little")
        with pytest.raises(codec.MalformedFrameError, match="wrong kind or header length"):
            open_publication(bytes(frame))


def test_wrong_run_layout_and_digest_are_refused():
    receiver = WeightsReceiver("run", "layout")
    header, body = open_publication(_publication(1))
    assert not receiver.offer(*open_publication(_publication(2, run_id="other")))
    assert not receiver.offer(*open_publication(_publication(2, layout="other")))
    assert not receiver.offer(header, bytes(100))
    assert receiver.order == (-1, -1)
    assert receiver.offer(header, body)
    assert not receiver.offer(header, body)


def test_a_notice_is_never_applied():
    receiver = WeightsReceiver()
    header, _ = open_publication(_publication(4))
    notice, body = open_publication(notice_of(header))
    assert len(body) == 0
    assert not receiver.offer(notice, body)


@pytest.mark.parametrize(
    ("have", "want", "exact", "allowed"),
    [
        ((0, 3), (0, 3), True, True),
        ((0, 4), (0, 3), True, False),
        ((0, 2), (0, 3), False, False),
        ((0, 4), (0, 3), False, True),
        ((1, 3), (0, 3), True, True),
        ((0, 3), (1, 3), True, False),
        ((-1, -1), (0, 0), False, False),
    ],
)
def test_a_lease_is_sampled_only_under_the_weights_it_names(have, want, exact, allowed):
    receiver = WeightsReceiver()
    receiver.generation, receiver.version = have
    assert receiver.satisfies(*want, exact=exact) is allowed
