"""Messages between a policy server and its clients: typed headers, and arrays in frames.

The server has a ROUTER socket, each client a DEALER. Each request gets one answer, in any order. An answer is lost if
its client's connection breaks. Asking again is safe: the server keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from rlzmq.core.errors import ProtocolError
from rlzmq.wire.codec import decode, encode
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


@dataclass(frozen=True, slots=True)
class PolicyMessage:
    """Base class of the messages; ``request_id`` is the client's number for the request."""

    request_id: int


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


def encode_message(message: PolicyMessage, arrays: Sequence[npt.NDArray[Any]] = ()) -> list[Any]:
    """Encode a message and its arrays as frames."""
    return encode(_NUMBERS[type(message)], to_header(message), arrays)


def decode_message(frames: Sequence[Any]) -> tuple[PolicyMessage, tuple[npt.NDArray[Any], ...]]:
    """Decode a message and its arrays.

    Raises:
        ProtocolError: The frames are not a message of this channel.
    """
    message = decode(frames)
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise ProtocolError(f"message kind {message.kind} does not belong on the channel of a policy server")
    return from_header(kind, message.header), message.arrays
