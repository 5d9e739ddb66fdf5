"""Messages between an actor system and its actors: typed headers, and values as arrays.

The channel is a ROUTER at the system and a DEALER per actor. Between two live processes of one machine
it neither loses nor reorders nor duplicates; when one of them ends, its calls fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlzmq.core.errors import ProtocolError
from rlzmq.wire.codec import decode, encode
from rlzmq.wire.schema import from_header, to_header
from rlzmq.wire.values import pack_value, unpack_value

__all__ = [
    "NO_CALL_ID",
    "ActorMessage",
    "Answer",
    "Call",
    "Cancel",
    "Failure",
    "Shutdown",
    "decode_message",
    "encode_message",
    "pack",
    "pack_snapshot",
]

NO_CALL_ID = 0
"""The id of no call: real calls count from 1."""


@dataclass(frozen=True, slots=True)
class ActorMessage:
    """Base class of the messages; ``call_id`` is the number that the caller gave to the call."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Call(ActorMessage):
    """To the actor: run ``method``; carries (args, kwargs)."""

    method: str


@dataclass(frozen=True, slots=True)
class Cancel(ActorMessage):
    """To the actor: the caller no longer waits for this call. No answer follows."""


@dataclass(frozen=True, slots=True)
class Shutdown(ActorMessage):
    """To the actor: finish and exit; answered by an Answer."""


@dataclass(frozen=True, slots=True)
class Answer(ActorMessage):
    """From the actor: the call returned; carries the value."""


@dataclass(frozen=True, slots=True)
class Failure(ActorMessage):
    """From the actor: the call raised; see remote_errors."""

    error: dict[str, Any]


# The data plane uses the numbers below 128, so a message on the wrong channel is refused.
_KINDS: dict[int, type[ActorMessage]] = {
    128: Call,
    129: Cancel,
    130: Shutdown,
    131: Answer,
    132: Failure,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_WITH_VALUE = (Call, Answer)


def encode_message(message: ActorMessage, value: Sequence[Any] = ()) -> list[Any]:
    """Encode a message as frames.

    Args:
        message: The header.
        value: Arrays of ``pack_value`` for the kinds that carry a value.
    """
    return encode(_NUMBERS[type(message)], to_header(message), value)


def decode_message(frames: Sequence[Any]) -> tuple[ActorMessage, Any]:
    """Decode a message and the value that it carries (None if it carries none).

    Raises:
        ProtocolError: The frames are not a message of this channel.
    """
    message = decode(frames)
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise ProtocolError(f"message kind {message.kind} does not belong on an actor's channel")
    value = unpack_value(message.arrays) if kind in _WITH_VALUE else None
    return from_header(kind, message.header), value


def pack(value: object, what: str) -> list[Any]:
    """Call ``pack_value``; errors name the value as ``what``.

    Raises:
        TypeError, ValueError: A type that cannot be sent, or a value that is too large or too deep.
    """
    try:
        return list(pack_value(value))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: {error}") from None


def pack_snapshot(value: object, what: str) -> list[Any]:
    """Pack a value with copies of its arrays, so that the actor cannot change them while they are sent."""
    tree, small, *large = pack(value, what)  # the packer owns the first two
    return [tree, small, *(array.copy() for array in large)]
