"""Errors for refused messages: ProtocolError subclasses, each with a reason code that callers count."""

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
        reason: Short code for counters, e.g. ``"dtype"``; the text names expected and actual.
    """

    reason: ClassVar[str] = "wire"


class MalformedFrameError(WireError):
    """Not a message at all: no frames, a short first frame, a header that msgpack cannot read."""

    reason = "malformed"


class UnknownVersionError(WireError):
    """A different wire protocol version; the text names both."""

    reason = "version"


class BoundExceededError(WireError):
    """A decoder's limit was exceeded: header bytes, container sizes, nesting, number of arrays."""

    reason = "bound"


class UnsupportedDtypeError(WireError):
    """An array dtype outside the whitelist, e.g. objects or long doubles."""

    reason = "dtype"


class ArrayMismatchError(WireError):
    """An array's declared shape does not match the received bytes, or frames are missing."""

    reason = "array"


class SchemaError(WireError):
    """A header with an unknown, missing or wrongly typed field, or of an unknown kind."""

    reason = "schema"


# Decorates functions that decode bytes from a peer: any exception is converted to a WireError.
wire_decoder = refuses_as(MalformedFrameError, passes=WireError)
