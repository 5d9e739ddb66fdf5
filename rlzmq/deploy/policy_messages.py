"""Messages between a policy server and its clients: typed headers, and arrays in frames.

The server has a ROUTER socket, each client a DEALER. Each request gets one answer, in any order. An answer is lost if
its client's connection breaks. Asking again is safe: the server keeps no state.

```
frame 0:  [a message as in rlzmq.wire.codec][request id: 8 bytes]
frame 1…: arrays
```

The request id is not part of the header, so a client's requests have the same header as long as their shapes are the
same. Headers are encoded and decoded once, and remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlzmq.wire.codec import Head, decode_arrays, decode_head, encode
from rlzmq.wire.errors import ArrayMismatchError, MalformedFrameError, SchemaError, wire_decoder
from rlzmq.wire.schema import from_header, to_header

__all__ = [
    "CLIENT_ROLE",
    "ENDING",
    "Act",
    "Actions",
    "Describe",
    "Description",
    "Failure",
    "PolicyMessage",
    "decode_message",
    "encode_message",
]

CLIENT_ROLE = "client"
"""Role of the key with which clients authenticate."""

ENDING = 410
"""Code of a Failure: the server is ending and takes no new requests."""


class PolicyMessage:
    """Base class of the messages."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Describe(PolicyMessage):
    """To the server: request a description of the served policies."""


@dataclass(frozen=True, slots=True)
class Description(PolicyMessage):
    """From the server: the served policies.

    Carries a list of dicts (`rlzmq.wire.values`) with ``module_id``, ``agent_id``, ``observation_space``,
    ``action_space``, ``states`` (names), ``reads_rewards``.
    """


@dataclass(frozen=True, slots=True)
class Act(PolicyMessage):
    """To the server: request actions for N observations.

    Carries arrays ``[N, ...]``: the leaves of the observations, the rewards (if `has_rewards`), the state (if
    `has_state`), each in the order of the policy's inputs.

    Attributes:
        module_id, agent_id: See `ServedCheckpoint.choose`.
    """

    module_id: str
    agent_id: str
    explore: bool
    has_rewards: bool
    has_state: bool


@dataclass(frozen=True, slots=True)
class Actions(PolicyMessage):
    """From the server: carries the leaves of the actions, then those of the next state.

    Attributes:
        checkpoint: Name of the checkpoint that computed them.
    """

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Failure(PolicyMessage):
    """From the server: the request failed.

    Attributes:
        code: As in HTTP: 400 a request that does not fit, 404 no such module, 410 `ENDING`, 500 the policy raised an
            error, 503 too many requests wait.
        detail: One sentence.
    """

    code: int
    detail: str


# Actors use the kinds 128 to 135, the data plane the kinds below.
_KINDS: dict[int, type[PolicyMessage]] = {
    144: Describe,
    145: Description,
    146: Act,
    147: Actions,
    148: Failure,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}

_ID_BYTES = 8
_MAX_REMEMBERED = 1024  # headers, each of at most this many bytes
_MAX_HEADER_BYTES = 512

# (message, dtypes and shapes of its arrays) -> header.
_encoded: dict[Any, bytes] = {}
# Header -> (message, its head).
_decoded: dict[bytes, tuple[PolicyMessage, Head]] = {}


def encode_message(
    request_id: int, message: PolicyMessage, arrays: Sequence[npt.NDArray[Any]] = ()
) -> list[Any]:
    """Encode a message and its arrays as frames."""
    key = (message, *[(array.dtype, array.shape) for array in arrays])
    header = _encoded.get(key)
    if header is None:
        frames = encode(_NUMBERS[type(message)], to_header(message), arrays)
        header = frames[0]
        # The memory of all other arrays is not what is sent.
        is_plain = all(array.size and array.dtype.isnative and array.dtype.kind in "biuf" for array in arrays)
        if is_plain and len(header) <= _MAX_HEADER_BYTES:
            if len(_encoded) >= _MAX_REMEMBERED:
                _encoded.clear()
            _encoded[key] = header
    else:
        frames = [
            header,
            *[array if array.flags.c_contiguous else np.array(array, order="C") for array in arrays],
        ]
    frames[0] = header + request_id.to_bytes(_ID_BYTES, "little")
    return frames


@wire_decoder
def decode_message(frames: Sequence[Any]) -> tuple[int, PolicyMessage, tuple[npt.NDArray[Any], ...]]:
    """Decode a message; return (request id, message, its arrays).

    Raises:
        WireError: The frames are not a message of this channel.
    """
    first = bytes(frames[0])
    if len(first) <= _ID_BYTES:
        raise MalformedFrameError(f"the first frame of a policy message has more than {_ID_BYTES} bytes")
    header, payload = first[:-_ID_BYTES], frames[1:]
    known = _decoded.get(header)
    if known is None:
        head = decode_head([header, *payload])
        kind = _KINDS.get(head.kind)
        if kind is None:
            raise SchemaError(f"message kind {head.kind} does not belong on the channel of a policy server")
        known = from_header(kind, head.header), head
        if len(header) <= _MAX_HEADER_BYTES:
            if len(_decoded) >= _MAX_REMEMBERED:
                _decoded.clear()
            _decoded[header] = known
    message, head = known
    if len(head.specs or ()) != len(payload):
        raise ArrayMismatchError(
            f"{len(head.specs or ())} arrays declared, {len(payload)} frames came with them"
        )
    arrays = decode_arrays(head.specs, payload) if head.specs else ()
    return int.from_bytes(first[-_ID_BYTES:], "little"), message, arrays
