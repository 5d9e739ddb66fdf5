"""Declaration of the messages of the data plane."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, TypeAlias, TypeVar, dataclass_transform

__all__ = [
    "FOLDED",
    "FRAMES_NEEDED",
    "MESSAGES",
    "PUBLICATION",
    "Spans",
    "WireMessage",
    "first_number",
    "message",
]

Spans: TypeAlias = tuple[tuple[int, int], ...]


# Attempts and lease ids never repeat across restarts of the broker: their high bits are its incarnation, which must
# increase (e.g. milliseconds of its start).
_COUNTER_BITS = 20


def first_number(broker_incarnation: int) -> int:
    """Return the first attempt number and lease id of a broker incarnation (< 2**42)."""
    return (broker_incarnation << _COUNTER_BITS) + 1


class WireMessage:
    """Base class of the messages.

    Attributes:
        kind: The second byte of the message.
        senders: Roles that may send it to the broker; others are refused and counted, so a runner's key cannot publish
            weights. Empty: only the broker sends it, or a peer that has not registered yet.
    """

    __slots__ = ()
    kind: ClassVar[int]
    senders: ClassVar[tuple[str, ...]]


M = TypeVar("M", bound=WireMessage)

MESSAGES: dict[int, type[WireMessage]] = {}
"""The messages of the data plane by kind."""

PUBLICATION = 51
"""The kind of a publication, which is only sent on PUB; see `rlzmq.protocol.weights`."""

FOLDED, FRAMES_NEEDED = 96, 97
"""The kinds between the sockets of one host that no role sees, see `rlzmq.net.shared_frames`."""

_RESERVED = (PUBLICATION, FOLDED, FRAMES_NEEDED)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def message(kind: int, senders: str = "") -> Callable[[type[M]], type[M]]:
    """Declare a message of the data plane, a frozen dataclass. Its kind is below 128 and never reused.

    Args:
        kind: See `WireMessage`.
        senders: Roles that may send it, separated by spaces.
    """

    def declare(cls: type[M]) -> type[M]:
        if not 0 < kind < 128 or kind in _RESERVED or kind in MESSAGES:
            raise ValueError(f"kind {kind} of {cls.__name__}: expected a free number below 128")
        declared = dataclasses.dataclass(frozen=True, slots=True)(cls)
        declared.kind, declared.senders = kind, tuple(senders.split())
        MESSAGES[kind] = declared
        return declared

    return declare
