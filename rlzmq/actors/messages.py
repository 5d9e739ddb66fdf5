"""Messages between an actor system and its actors: typed headers, and values as arrays.

The channel is a ROUTER at the system and a DEALER per actor. Between two live processes of one machine
it neither loses nor reorders nor duplicates; when one of them ends, its calls fail. What is pickled
(`rlzmq.core.by_value`) has a socketpair that only the two processes hold, and a length before each message.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from rlzmq.core import errors
from rlzmq.core.errors import ProtocolError, RemoteError, cut, printable
from rlzmq.core.tracebacks import origin_parts
from rlzmq.wire.codec import decode, encode, from_header, to_header
from rlzmq.wire.payloads import pack_value, unpack_value

__all__ = [
    "NO_CALL_ID",
    "ActorMessage",
    "Answer",
    "Call",
    "Cancel",
    "Failure",
    "RemoteOrigin",
    "Shutdown",
    "decode_message",
    "encode_message",
    "pack",
    "pack_error",
    "pack_snapshot",
    "receive_privately",
    "send_privately",
    "unpack_error",
]


NO_CALL_ID = 0
"""The id of no call: real calls count from 1."""

_LENGTH_BYTES, _PART_BYTES = 8, 1 << 20


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


# Together with the text these fit into a message's header (64 KiB) in any alphabet.
_MAX_ARGS_BYTES = 8 * 1024
_MAX_TRACEBACK_BYTES = 24 * 1024
_MAX_ARGS = 8
# Limit of an exception's text within a traceback: the whole text is sent beside it.
_MAX_REPEATED_BYTES = 1000
_LINES = "\n\t"

# Neither can be raised from an awaited call, where both have another meaning.
_NOT_RAISABLE = {"StopIteration", "StopAsyncIteration"}

_KNOWN: dict[str, type[Exception]] = {
    name: kind
    for module in (builtins, errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and name == kind.__name__
    and name not in _NOT_RAISABLE
}


@dataclass(frozen=True, slots=True)
class RemoteOrigin:
    """Where a remote exception was raised; its ``remote_origin`` attribute.

    Attributes:
        host, pid, role: The process.
        traceback_text: The user's own frames there and the errors that led to it; with ``RLZMQ_TRACEBACK=full`` the
            whole traceback.
    """

    host: str
    pid: int
    role: str
    traceback_text: str


def pack_error(error: BaseException, role: str) -> dict[str, Any]:
    """Convert an exception to plain values."""
    kind = type(error)
    is_known = _KNOWN.get(kind.__name__) is kind
    try:
        text = str(error)
    except Exception:
        text = "(the exception's own __str__ raised)"
    arguments = list(error.args)
    if isinstance(error, OSError) and error.filename is not None and len(arguments) == 2:
        arguments.append(error.filename)  # args leave it out
    is_plain = len(arguments) <= _MAX_ARGS and all(_is_plain(argument) for argument in arguments)
    is_plain = is_plain and sum(_num_bytes(a) for a in arguments if type(a) is str) <= _MAX_ARGS_BYTES
    traceback = _format(error).encode(errors="replace")[-_MAX_TRACEBACK_BYTES:]
    return {
        "type": kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "known_as": kind.__name__ if is_known else _known_base(kind),
        "is_known": is_known,
        "text": cut(text),
        "args": arguments if is_plain else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "role": role,
        "traceback": traceback.decode(errors="ignore"),
    }


def unpack_error(packed: dict[str, Any]) -> Exception:
    """Return the exception to raise here: the same builtin or rlzmq type, else a RemoteError.

    A type unknown here that derives from a builtin or rlzmq type arrives as a RemoteError that is also
    of that type, so ``except ValueError`` catches a remote subclass of ValueError.
    """
    origin = RemoteOrigin(
        printable(str(packed["host"])),
        int(packed["pid"]),
        printable(str(packed["role"])),
        printable(str(packed["traceback"]), keep=_LINES),
    )
    text = printable(str(packed["text"]), keep=_LINES)
    known = _KNOWN.get(str(packed["known_as"]))
    error = _rebuild(known, packed["args"], text) if packed["is_known"] and known is not None else None
    if error is None:
        name = printable(str(packed["type"]))
        message = f"{name}: {text}" if text else name
        facts = {
            "remote_type": name,
            "host": origin.host,
            "role": origin.role,
            "traceback_text": origin.traceback_text,
        }
        try:
            error = _remote_error_type(known)(message, pid=origin.pid, **facts)
        except TypeError:  # the base class has a different constructor
            error = RemoteError(message, pid=origin.pid, **facts)
    cast(Any, error).remote_origin = origin
    where = f"raised in actor {origin.role!r} (pid {origin.pid} on {origin.host})"
    error.add_note(f"{where}:\n{origin.traceback_text}" if origin.traceback_text else f"{where}.")
    return error


def _rebuild(kind: type[Exception], arguments: object, text: str) -> Exception | None:
    try:
        if not isinstance(arguments, list):
            return kind(text)
        return kind(*(printable(a, keep=_LINES) if isinstance(a, str) else a for a in arguments))
    except Exception:  # its constructor differs: a RemoteError carries all facts instead
        return None


def _remote_error_type(base: type[Exception] | None) -> type[RemoteError]:
    if base is None or base in (Exception, errors.RlzmqError) or issubclass(base, RemoteError):
        return RemoteError
    kind = _combined.get(base)
    if kind is None:
        try:
            kind = type(f"Remote{base.__name__}", (RemoteError, base), {"__module__": RemoteError.__module__})
        except TypeError:  # the two have incompatible layouts
            kind = RemoteError
        _combined[base] = kind
    return kind


_combined: dict[type[Exception], type[RemoteError]] = {}


def _known_base(kind: type[BaseException]) -> str:
    for base in kind.__mro__:
        if base is not Exception and _KNOWN.get(base.__name__) is base:
            return base.__name__
    return ""


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, float, str) or (type(value) is int and abs(value) < 2**63)


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _format(error: BaseException) -> str:
    return "".join(_short(part) for part in origin_parts(error)).rstrip()


def _short(part: str) -> str:
    """Cut one part of a traceback: a frame, or an exception's text."""
    return (
        part
        if len(part.encode(errors="replace")) <= _MAX_REPEATED_BYTES
        else cut(part, _MAX_REPEATED_BYTES) + "\n"
    )


async def send_privately(channel: socket.socket, *parts: bytes) -> None:
    """Send one message, in parts; wait while the other side is slow. Only one sender may be active at a time.

    Raises:
        OSError: The other side is gone.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(channel, sum(map(len, parts)).to_bytes(_LENGTH_BYTES, "little"))
    for part in parts:
        await loop.sock_sendall(channel, part)


async def receive_privately(channel: socket.socket) -> memoryview | None:
    """Receive the next message; return None at the end of the stream."""
    head = await _receive_exactly(channel, _LENGTH_BYTES)
    return None if head is None else await _receive_exactly(channel, int.from_bytes(head, "little"))


async def _receive_exactly(channel: socket.socket, num_bytes: int) -> memoryview | None:
    data = bytearray()
    while left := num_bytes - len(data):
        if not (part := await asyncio.get_running_loop().sock_recv(channel, min(left, _PART_BYTES))):
            return None
        data += part
    return memoryview(data)
