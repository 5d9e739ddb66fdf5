"""Codec of messages: one bounded header frame, then arrays as raw frames, not copied.

```
frame 0:  [wire version: 1 byte][kind: 1 byte][msgpack: [header map, array specs]]
frame 1…: the bytes of one C-contiguous little-endian array each; spec = [dtype, *shape]
```

A message may also carry *opaque* frames (another message's frames, forwarded unchanged). The specs are then ``None``,
and the frames are not inspected. Received data is never imported, executed, or trusted: every count, dtype and shape is
checked against the received bytes, and a refusal is a `WireError` with a reason code, which the caller counts.

The messages of the data plane are dataclasses, declared with `message`: a header has exactly their fields.

A publication of weights is one frame, so that the transport (conflation, a dropped part) cannot separate the weights
from their version:

```
[wire version][kind PUBLICATION][header length: 2 bytes][msgpack header][zeros up to 512][body]
```
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar, dataclass_transform

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from rlzmq.core.errors import ProtocolError, printable, refuses_as

__all__ = [
    "FOLDED",
    "FRAMES_NEEDED",
    "MAX_ARRAYS",
    "MAX_DEPTH",
    "MAX_HEADER_BYTES",
    "MESSAGES",
    "PUBLICATION",
    "PUBLICATION_PREFIX_BYTES",
    "PUBLICATION_TOPIC",
    "WIRE_VERSION",
    "ArrayMismatchError",
    "BoundExceededError",
    "Buffer",
    "FragmentId",
    "Head",
    "MalformedFrameError",
    "Message",
    "Publication",
    "SchemaError",
    "Spans",
    "UnknownVersionError",
    "UnsupportedDtypeError",
    "WireError",
    "WireMessage",
    "check_header",
    "checked_view",
    "decode",
    "decode_arrays",
    "decode_head",
    "decode_spec",
    "encode",
    "encode_opaque",
    "first_number",
    "from_header",
    "kind_of",
    "message",
    "new_publication_buffer",
    "notice_of",
    "open_publication",
    "pack_header",
    "seal_publication",
    "to_header",
    "unpack_header",
    "weights_digest",
    "wire_array",
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


# A frame as it is sent or received: bytes, a memoryview, an array, or any other buffer (a zmq.Frame).
Buffer = Any

# Incremented with every incompatible change of frames or headers. Peers of another version are refused.
WIRE_VERSION = 8

# A byte limit alone is not enough (16 MiB of empty maps take 1.2 GiB once decoded), so headers are
# small, their containers are bounded, and large data has separate frames.
MAX_HEADER_BYTES = 64 * 1024
MAX_ARRAYS = 1024
MAX_DEPTH = 64  # a column's tree of 16 levels takes three for each
_MAX_CONTAINER_LENGTH = 16 * 1024
_MAX_MAP_LENGTH = 4 * 1024
_MAX_NDIM = 32

# Received frames below this size are copied, since they are unaligned and would pin a larger receive buffer.
_COPY_BELOW_BYTES = 8192

_NUMBER_DTYPES = {
    code: np.dtype(code)
    for code in [
        "|b1",
        "|i1",
        "|u1",
        "<i2",
        "<u2",
        "<i4",
        "<u4",
        "<i8",
        "<u8",
        "<f2",
        "<f4",
        "<f8",
        "<c8",
        "<c16",
    ]
}
_TEXT_MAX_ITEM_BYTES = 1 << 20
_TIME_UNITS = frozenset(["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"])


@dataclass(frozen=True, slots=True)
class Head:
    """A message's first frame, decoded. It is sufficient for forwarding.

    Attributes:
        kind: Kind of the message (`rlzmq.wire.codec` on the data plane).
        header: The header map; its fields are not checked yet.
        specs: ``(dtype, shape)`` of each array frame, or None when the frames are opaque.
    """

    kind: int
    header: dict[str, Any]
    specs: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...] | None


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message, decoded and checked.

    Attributes:
        kind: Kind of the message.
        header: The header map; its fields are not checked yet.
        arrays: Views of the received frames (frames below 8 KiB are copied); empty if opaque.
    """

    kind: int
    header: dict[str, Any]
    arrays: tuple[npt.NDArray[Any], ...]


def encode(kind: int, header: Mapping[str, Any], arrays: Sequence[npt.NDArray[Any]] = ()) -> list[Buffer]:
    """Return the frames of a message: the header frame, then each array's memory.

    Args:
        kind: 0 … 255.
        header: Plain values that msgpack supports, with str keys; at most 64 KiB packed.
        arrays: At most 1024 arrays of whitelisted dtypes. C-contiguous little-endian ones are not copied: do not
            overwrite them until they are sent.

    Returns:
        ``[bytes, array, …]``, every item a buffer. A socket sends an array's memory directly.

    Raises:
        UnsupportedDtypeError: An array has an object, structured or platform-specific dtype.
        BoundExceededError: The header is too large, or there are too many arrays.
    """
    if len(arrays) > MAX_ARRAYS:
        raise BoundExceededError(f"a message carries at most {MAX_ARRAYS} arrays, got {len(arrays)}")
    specs: list[list[Any]] = []
    frames: list[Buffer] = [b""]
    for position, array in enumerate(arrays):
        wire = wire_array(array, position)
        specs.append([wire.dtype.str, *wire.shape])
        # A zero-size array has no memory to send, and datetimes do not export a buffer.
        frames.append(b"" if wire.size == 0 else wire.view(np.int64) if wire.dtype.kind in "mM" else wire)
    frames[0] = _first_frame(kind, header, specs)
    return frames


def encode_opaque(kind: int, header: Mapping[str, Any], frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the frames of a message whose payload is forwarded unchanged (no array specs)."""
    if len(frames) > MAX_ARRAYS + 1:
        raise BoundExceededError(f"a message carries at most {MAX_ARRAYS + 1} frames, got {len(frames)}")
    return [_first_frame(kind, header, None), *frames]


@wire_decoder
def decode(frames: Sequence[Buffer]) -> Message:
    """Decode and check a whole message.

    Raises:
        WireError: The message is malformed. No memory beyond the frames was allocated.
    """
    head = decode_head(frames)
    arrays = () if head.specs is None else decode_arrays(head.specs, frames[1:])
    return Message(head.kind, head.header, arrays)


def decode_head(frames: Sequence[Buffer]) -> Head:
    """Decode and check only the first frame and the number of frames, which is enough for forwarding."""
    if not frames:
        raise MalformedFrameError("a message has at least one frame, got none")
    if len(frames) > MAX_ARRAYS + 2:
        raise BoundExceededError(f"a message has at most {MAX_ARRAYS + 2} frames, got {len(frames)}")
    view = _byte_view(frames[0])
    if len(view) < 2:
        raise MalformedFrameError(f"the first frame has at least 2 bytes (version, kind), got {len(view)}")
    if view[0] != WIRE_VERSION:
        raise UnknownVersionError(
            f"wire protocol version {view[0]} is not spoken here, this side speaks version {WIRE_VERSION}: "
            "install the same rlzmq release on both sides"
        )
    unpacked = unpack_header(view[2:])
    if not isinstance(unpacked, list) or len(unpacked) != 2 or not isinstance(unpacked[0], dict):
        raise MalformedFrameError(f"the header is [map, array specs], got {_brief(unpacked)}")
    header, raw_specs = unpacked
    if raw_specs is None:
        return Head(view[1], header, None)
    if not isinstance(raw_specs, list):
        raise MalformedFrameError(f"array specs are a list or nil, got {_brief(raw_specs)}")
    if len(raw_specs) != len(frames) - 1:
        raise ArrayMismatchError(f"{len(raw_specs)} arrays declared, {len(frames) - 1} frames came with them")
    specs = tuple(decode_spec(spec, position) for position, spec in enumerate(raw_specs))
    return Head(view[1], header, specs)


@wire_decoder
def kind_of(frames: Sequence[Buffer]) -> int:
    """Return the kind of a message, without any other check.

    Raises:
        WireError: The first frame is too short.
    """
    return _byte_view(frames[0])[1]


def decode_arrays(
    specs: Sequence[tuple[np.dtype[Any], tuple[int, ...]]], frames: Sequence[Buffer]
) -> tuple[npt.NDArray[Any], ...]:
    """Return arrays as views of their frames. Each shape is checked against the frame's length."""
    arrays = []
    for position, ((dtype, shape), frame) in enumerate(zip(specs, frames, strict=True)):
        view = checked_view(frame, dtype, shape, position)
        if not len(view):
            arrays.append(_empty(shape, dtype, position))
            continue
        flat = np.frombuffer(view, dtype)
        arrays.append((flat.copy() if len(view) < _COPY_BELOW_BYTES else flat).reshape(shape))
    return tuple(arrays)


def checked_view(frame: Buffer, dtype: np.dtype[Any], shape: tuple[int, ...], position: int) -> memoryview:
    """Return the bytes of an array's frame, if they are as many as its shape needs."""
    view, num_bytes = _byte_view(frame), math.prod(shape) * dtype.itemsize
    if len(view) != num_bytes:
        raise ArrayMismatchError(
            f"array {position}: shape {list(shape)} of {dtype.str} needs {num_bytes} bytes, "
            f"its frame has {len(view)}"
        )
    return view


def pack_header(value: object, *, max_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """Pack plain values with msgpack, within the header's size limit.

    Raises:
        BoundExceededError: There are more than `max_bytes`: move large values into arrays.
        TypeError: msgpack does not support a value.
    """
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    if len(packed) > max_bytes:
        raise BoundExceededError(
            f"a header has at most {max_bytes} bytes, this one has {len(packed)}: "
            "move its largest values into arrays"
        )
    return packed


def unpack_header(data: Buffer, *, max_bytes: int = MAX_HEADER_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Unpack msgpack with bounded size, container lengths and nesting, str map keys, no extension types.

    Raises:
        WireError: The data violates a bound or is malformed. The text does not quote it at length.
    """
    num_bytes = len(data)
    if num_bytes > max_bytes:
        raise BoundExceededError(f"a header has at most {max_bytes} bytes, got {num_bytes}")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_array_len=_MAX_CONTAINER_LENGTH,
            max_map_len=_MAX_MAP_LENGTH,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        # Do not quote received text in the message: it may be long, binary or hostile.
        raise MalformedFrameError(f"the header is not valid msgpack ({type(error).__name__})") from None
    check_header(value, max_depth)
    return value


def check_header(value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Check that nesting is at most `max_depth` deep, map keys are str and values plain (no timestamps).

    The check proceeds level by level, so that malicious nesting causes no recursion.

    Raises:
        WireError: The value violates a rule.
    """
    level = [value]
    for _ in range(max_depth):
        deeper: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                for key in item:
                    if type(key) is not str:
                        raise MalformedFrameError(f"map keys are text, got {type(key).__name__}")
                deeper.extend(item.values())
            elif kind is list:
                deeper.extend(item)
            elif kind not in _SCALARS:
                raise MalformedFrameError(f"a header holds plain values only, got {kind.__name__}")
        if not deeper:
            return
        level = deeper
    raise BoundExceededError(f"a header is nested at most {max_depth} deep")


_SCALARS = frozenset({int, str, float, bool, bytes, type(None)})


def _first_frame(kind: int, header: Mapping[str, Any], specs: list[list[Any]] | None) -> bytes:
    if not 0 <= kind <= 255:
        raise ValueError(f"a message kind is one byte, got {kind}")
    return bytes((WIRE_VERSION, kind)) + pack_header([header, specs])


def wire_array(array: npt.NDArray[Any], position: int) -> npt.NDArray[Any]:
    """Return an array as its memory is sent: C-contiguous, little-endian. Raises the errors of `encode`."""
    dtype = array.dtype
    if not _is_allowed(dtype):
        little = dtype.newbyteorder("<")
        if dtype.hasobject or not _is_allowed(little):
            raise UnsupportedDtypeError(
                f"array {position} has dtype {dtype}: only bool, int, uint, float16/32/64, complex, "
                "datetime, timedelta and text arrays travel; convert it first"
            )
        array = array.astype(little)
    if array.ndim > _MAX_NDIM:
        raise BoundExceededError(f"array {position} has {array.ndim} dimensions, at most {_MAX_NDIM} travel")
    return array if array.flags.c_contiguous else np.array(array, order="C")


def _is_allowed(dtype: np.dtype[Any]) -> bool:
    if dtype.str in _NUMBER_DTYPES:
        return True
    if dtype.kind in "SU":
        return dtype.str[0] in "<|" and 0 < dtype.itemsize <= _TEXT_MAX_ITEM_BYTES
    if dtype.kind not in "mM" or dtype.str[0] != "<":
        return False
    unit, multiple = np.datetime_data(dtype)
    return unit in _TIME_UNITS and multiple == 1


def decode_spec(spec: object, position: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Parse and check ``[dtype, *shape]``: a whitelisted dtype, at most 32 sizes >= 0."""
    if not isinstance(spec, list) or not spec or not isinstance(spec[0], str):
        raise MalformedFrameError(f"array {position}: a spec is [dtype, *shape], got {_brief(spec)}")
    shape = tuple(spec[1:])
    if len(shape) > _MAX_NDIM:
        raise BoundExceededError(f"array {position}: at most {_MAX_NDIM} dimensions, got {len(shape)}")
    for size in shape:
        if type(size) is not int or not 0 <= size < 2**63:
            raise MalformedFrameError(f"array {position}: a shape holds sizes >= 0, got {_brief(size)}")
    return _decode_dtype(spec[0], position), shape


def _decode_dtype(text: str, position: int) -> np.dtype[Any]:
    known = _NUMBER_DTYPES.get(text)
    if known is not None:
        return known
    # Only text and time dtypes remain; their exact spelling is rebuilt from checked parts.
    if len(text) <= 16 and text[:2] in ("|S", "<U") and text[2:].isascii() and text[2:].isdecimal():
        num_chars = int(text[2:])
        if 0 < num_chars * (4 if text[1] == "U" else 1) <= _TEXT_MAX_ITEM_BYTES:
            return np.dtype(f"{text[:2]}{num_chars}")
    if text[:4] in ("<M8[", "<m8[") and text[4:-1] in _TIME_UNITS and text[-1:] == "]":
        return np.dtype(f"{text[:4]}{text[4:-1]}]")
    raise UnsupportedDtypeError(f"array {position}: dtype {_brief(text)} is not in the whitelist")


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], position: int) -> npt.NDArray[Any]:
    try:
        return np.empty(shape, dtype)
    except ValueError:  # a zero beside sizes whose product numpy cannot hold
        raise ArrayMismatchError(
            f"array {position}: shape {list(shape)} is beyond what numpy holds"
        ) from None


def _byte_view(frame: Buffer) -> memoryview:
    try:
        return memoryview(frame).cast("B")
    except TypeError:
        raise MalformedFrameError(f"a frame is a contiguous buffer, got {type(frame).__name__}") from None


def _brief(value: object) -> str:
    """Return at most 60 characters of a received value, without recursion."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, (int, float, bool, type(None))):
        return repr(value)
    return type(value).__name__


# ---------------------------------------------------------------------- typed headers

# Names and ids are short, and details are one sentence.
_MAX_TEXT_CHARS = 4096
_MAX_COUNT = 2**48


class FragmentId(NamedTuple):
    """Unique id of a fragment within a run.

    Attributes:
        runner: The runner process's uuid.
        incarnation: Assigned by the broker at registration; fences a predecessor of the same name.
        seq: Number of the fragment within this incarnation, from 0.
    """

    runner: str
    incarnation: int
    seq: int

    def __str__(self) -> str:
        return f"{self.runner}/{self.incarnation}/{self.seq}"


T = TypeVar("T")


def to_header(message: object) -> dict[str, Any]:
    """Return the header map of a message dataclass: every field by name."""
    return {name: getattr(message, name) for name, _ in _fields_of(type(message))}


def from_header(cls: type[T], header: dict[str, Any]) -> T:
    """Return the message of a header map.

    Raises:
        SchemaError: A field is unknown, missing, or of another type; the text names the message and the field.
    """
    fields = _fields_of(cls)
    values = []
    for name, check in fields:
        try:
            values.append(check(header[name]))
        except KeyError:
            raise SchemaError(f"{cls.__name__}: field {name!r} is missing") from None
        except (TypeError, ValueError):
            got = type(header[name]).__name__
            raise SchemaError(f"{cls.__name__}.{name}: does not accept this {got}") from None
    if len(header) != len(fields):
        unknown = sorted(set(header) - {name for name, _ in fields})[0]
        raise SchemaError(f"{cls.__name__}: unknown field {unknown[:60]!r}")
    return cls(*values)


_cache: dict[type, tuple[tuple[str, Callable[[Any], Any]], ...]] = {}


def _fields_of(cls: type) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    fields = _cache.get(cls)
    if fields is None:
        declared = dataclasses.fields(cls)
        fields = _cache[cls] = tuple(
            (field.name, _IDS.get(field.name) or _CHECKS[str(field.type)]) for field in declared
        )
    return fields


def _id(value: object) -> int:
    # -1 means "none"; no smaller number is valid in a header.
    if type(value) is int and -1 <= value < 2**63:
        return value
    raise TypeError


def _int(value: object) -> int:
    # No count reaches this bound, not even milliseconds, and sums of such counts fit into 64 bits.
    if type(value) is int and -1 <= value <= _MAX_COUNT:
        return value
    raise TypeError


def _float(value: Any) -> float:
    if type(value) in (float, int) and 0.0 <= value < 1e15:
        return float(value)
    raise TypeError


def _str(value: object) -> str:
    if type(value) is str and len(value) <= _MAX_TEXT_CHARS:
        return printable(value)  # names and details are shown in logs and on terminals
    raise TypeError


def _bool(value: object) -> bool:
    if type(value) is bool:
        return value
    raise TypeError


def _several(check: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def checked(value: Any) -> tuple[Any, ...]:
        if type(value) in (list, tuple):
            return tuple(map(check, value))
        raise TypeError

    return checked


def _spans(value: Any) -> tuple[tuple[int, int], ...]:
    if type(value) not in (list, tuple):
        raise TypeError
    spans = []
    for span in value:
        first, last = span
        if not 0 <= _int(first) <= _int(last):
            raise ValueError
        spans.append((first, last))
    return tuple(spans)


def _counts(value: object) -> dict[str, int]:
    if type(value) is not dict:
        raise TypeError
    return {_str(key): _int(count) for key, count in value.items()}


def _map(value: object) -> dict[str, Any]:
    # Free-form within the codec's bounds. Its consumer checks it (e.g. EpisodeBatch.from_wire).
    if type(value) is dict:
        return value
    raise TypeError


def _fragment_id(value: Any) -> FragmentId:
    runner, incarnation, seq = value
    return FragmentId(_str(runner), _int(incarnation), _int(seq))


# Ids that start at the broker's incarnation shifted left (see `kinds.first_number`).
_IDS: dict[str, Callable[[Any], Any]] = {
    "lease_id": _id,
    "leases": _several(_id),
    "attempt": _id,
    "attempts": _several(_id),
    "training_attempts": _several(_id),
}
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "float": _float,
    "str": _str,
    "bool": _bool,
    "tuple[str, ...]": _several(_str),
    "tuple[int, ...]": _several(_int),
    "Spans": _spans,
    "dict[str, int]": _counts,
    "dict[str, Any]": _map,
    "FragmentId": _fragment_id,
}


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
"""The kind of a publication, which is only sent on PUB."""

FOLDED, FRAMES_NEEDED = 96, 97
"""The kinds between the sockets of one host that no role sees, see `rlzmq.net.shared_memory`."""

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


# Fixed, so that a learner copies its weights directly after it and the body stays aligned.
PUBLICATION_PREFIX_BYTES = 512
# Prefix that a SUB socket subscribes to: publications of this wire version only.
PUBLICATION_TOPIC = bytes((WIRE_VERSION, PUBLICATION))


@dataclass(frozen=True, slots=True)
class Publication:
    """The header of a weights publication.

    Attributes:
        run_id: Weights of another run are refused.
        generation, version: Their place in the order of all weights.
        digest: `weights_digest` of the body. "" in shared memory, which cannot change while anyone holds it.
        layout_digest: ``WeightsLayout.digest``: names, shapes and dtypes of the parameters in the body.
        num_bytes: Size of the body.
        has_body: False for a notice. The body is then fetched with a snapshot request.
        num_env_steps: Lifetime env steps of the run that updates received before these weights.
    """

    run_id: str
    generation: int
    version: int
    digest: str
    layout_digest: str
    num_bytes: int
    has_body: bool = True
    num_env_steps: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """(generation, version). Newer weights compare greater."""
        return (self.generation, self.version)


def new_publication_buffer(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a uint8[512 + num_bytes] buffer: copy the weights into ``buffer[512:]``, then seal it."""
    return np.zeros(PUBLICATION_PREFIX_BYTES + num_bytes, np.uint8)


def weights_digest(body: Buffer) -> str:
    """Return the hex SHA-256 of the flat weights."""
    return hashlib.sha256(body).hexdigest()


def seal_publication(
    buffer: npt.NDArray[np.uint8],
    *,
    run_id: str,
    generation: int,
    version: int,
    layout_digest: str,
    num_env_steps: int = 0,
    has_digest: bool = True,
) -> Publication:
    """Write the header before the body at ``buffer[512:]``. The buffer is then the frame.

    Raises:
        BoundExceededError: The ids are so long that the header does not fit into the prefix.
    """
    body = buffer[PUBLICATION_PREFIX_BYTES:]
    header = Publication(
        run_id,
        generation,
        version,
        weights_digest(body.data) if has_digest else "",
        layout_digest,
        len(body),
        num_env_steps=num_env_steps,
    )
    prefix = _prefix(header)
    buffer[:PUBLICATION_PREFIX_BYTES] = np.frombuffer(prefix, np.uint8)
    return header


def notice_of(header: Publication) -> bytes:
    """Return a frame that announces weights without carrying them."""
    return _prefix(replace(header, has_body=False))


@wire_decoder
def open_publication(frame: Buffer) -> tuple[Publication, memoryview]:
    """Return the header and body of a publication frame; `WeightsReceiver` checks the digest.

    Raises:
        WireError: It is not a publication of this wire version, or the body's length differs from the declared one.
    """
    view = memoryview(frame).cast("B")
    if len(view) < PUBLICATION_PREFIX_BYTES:
        raise MalformedFrameError(f"a publication has at least 512 bytes, got {len(view)}")
    if view[0] != WIRE_VERSION:
        raise UnknownVersionError(f"publication of wire version {view[0]}, this side speaks {WIRE_VERSION}")
    length = int.from_bytes(view[2:4], "little")
    if view[1] != PUBLICATION or length > PUBLICATION_PREFIX_BYTES - 4:
        raise MalformedFrameError("not a publication: wrong kind or header length")
    fields = unpack_header(view[4 : 4 + length])
    if not isinstance(fields, dict):
        raise MalformedFrameError("a publication's header is a map")
    header = from_header(Publication, fields)
    body = view[PUBLICATION_PREFIX_BYTES:]
    if len(body) != (header.num_bytes if header.has_body else 0):
        raise ArrayMismatchError(f"weights of {header.num_bytes} bytes declared, {len(body)} came")
    return header, body


def _prefix(header: Publication) -> bytes:
    packed = pack_header(to_header(header))
    if len(packed) > PUBLICATION_PREFIX_BYTES - 4:
        raise BoundExceededError(f"a publication's header has at most 508 bytes, got {len(packed)}")
    first = PUBLICATION_TOPIC + len(packed).to_bytes(2, "little") + packed
    return first.ljust(PUBLICATION_PREFIX_BYTES, b"\0")
