"""Errors for refused messages: ProtocolError subclasses, each with a reason code that callers count."""

from __future__ import annotations

from typing import ClassVar, Final

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
    """A received message was refused before any use.

    Attributes:
        reason: Short code for counters, e.g. ``"dtype"``. The text names the expected and the actual value.
    """

    reason: ClassVar[str] = "wire"


class MalformedFrameError(WireError):
    """It is not a message: no frames, a short first frame, or a header that msgpack cannot read."""

    reason = "malformed"


class UnknownVersionError(WireError):
    """The wire protocol version differs; the text names both."""

    reason = "version"


class BoundExceededError(WireError):
    """A decoder's limit was exceeded: header bytes, container sizes, nesting, number of arrays."""

    reason = "bound"


class UnsupportedDtypeError(WireError):
    """An array's dtype is not in the whitelist, e.g. objects or long doubles."""

    reason = "dtype"


class ArrayMismatchError(WireError):
    """An array's declared shape does not match the received bytes, or frames are missing."""

    reason = "array"


class SchemaError(WireError):
    """A header has an unknown, missing or wrongly typed field, or is of an unknown kind."""

    reason = "schema"


# Decorates functions that decode bytes from a peer: any exception is converted to a WireError.
wire_decoder: Final = refuses_as(MalformedFrameError, passes=WireError)
