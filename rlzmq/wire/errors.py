"""Why a message was refused: ProtocolError subclasses, each with a reason code that callers count."""

from __future__ import annotations

from typing import ClassVar

from rlzmq.core.errors import ProtocolError, refuses_as

__all__ = [
    "ArrayMismatchError",
    "BoundExceededError",
    "MalformedFrameError",
    "SchemaError",
    "UnknownVersionError",
    "UnsupportedDtypeError",
    "WireError",
    "wire_decoder",
]


class WireError(ProtocolError):
    """A received message that was refused before anything acted on it.

    Attributes:
        reason: Short code for counters, e.g. ``"dtype"``; the text says expected and actual.
    """

    reason: ClassVar[str] = "wire"


class MalformedFrameError(WireError):
    """Not a message at all: no frames, a short first frame, a header that msgpack cannot read."""

    reason = "malformed"


class UnknownVersionError(WireError):
    """Another wire protocol version: both versions are in the text."""

    reason = "version"


class BoundExceededError(WireError):
    """More than a decoder accepts: header bytes, container sizes, nesting, number of arrays."""

    reason = "bound"


class UnsupportedDtypeError(WireError):
    """An array dtype outside the whitelist, e.g. objects or long doubles."""

    reason = "dtype"


class ArrayMismatchError(WireError):
    """An array's declared shape does not fit the bytes that came, or frames are missing."""

    reason = "array"


class SchemaError(WireError):
    """A header with an unknown, missing or wrongly typed field, or of an unknown kind."""

    reason = "schema"


# Decorates what decodes bytes from a peer: whatever it raises is a WireError.
wire_decoder = refuses_as(MalformedFrameError, passes=WireError)
