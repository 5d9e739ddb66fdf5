"""All messages of the data plane, between the broker's ROUTER and runners, learners and the driver.

Each message is a frozen dataclass, the typed header. Large data follows in *payload* frames, which each docstring
describes. `encode_message` and `decode_message` convert a message and its payload to frames and back. Unknown kinds and
fields are refused.

Update ``u`` starts from weights version ``u`` and produces version ``u + 1``, so an update's id is also the weights
version that it starts from. Sequence numbers are sent as *spans*: ``(first, last)``, both included.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlzmq.wire.codec import Buffer, Head, decode_head, encode_opaque
from rlzmq.wire.errors import ArrayMismatchError, SchemaError, wire_decoder
from rlzmq.wire.messages_driver import *
from rlzmq.wire.messages_learner import *
from rlzmq.wire.messages_peers import *
from rlzmq.wire.messages_runner import *
from rlzmq.wire.schema import MESSAGES as MESSAGES
from rlzmq.wire.schema import FragmentId as FragmentId
from rlzmq.wire.schema import Spans as Spans
from rlzmq.wire.schema import WireMessage as WireMessage
from rlzmq.wire.schema import first_number as first_number
from rlzmq.wire.schema import from_header, to_header


def encode_message(message: WireMessage, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the frames of a message. The payload frames are unchanged."""
    return encode_opaque(message.kind, to_header(message), payload)


@wire_decoder
def decode_message(frames: Sequence[Buffer]) -> tuple[WireMessage, tuple[Buffer, ...]]:
    """Return the message and its payload frames. Array specs are checked, but no arrays are created.

    Raises:
        WireError: It is not a message of this protocol version, or its header does not match its kind.
    """
    return message_from_head(decode_head(frames), frames), tuple(frames[1:])


def message_from_head(head: Head, frames: Sequence[Buffer]) -> WireMessage:
    """Return the typed message of a decoded first frame. The lengths of a fragment's frames are checked."""
    cls = MESSAGES.get(head.kind)
    if cls is None:
        raise SchemaError(f"message kind {head.kind} is unknown here")
    if (head.specs is None) == (cls is Fragment):
        raise SchemaError(
            f"{cls.__name__}: array specs {'missing' if head.specs is None else 'not expected'}"
        )
    if head.specs is not None:
        for position, (dtype, shape) in enumerate(head.specs):
            num_bytes = dtype.itemsize
            for size in shape:
                num_bytes *= size
            length = memoryview(frames[position + 1]).nbytes
            if num_bytes != length:
                raise ArrayMismatchError(
                    f"array {position}: shape {list(shape)} of {dtype.str} needs {num_bytes} bytes, "
                    f"its frame has {length}"
                )
    return from_header(cls, head.header)
