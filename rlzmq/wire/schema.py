"""Messages of the data plane: their declaration, and their conversion to header maps and back.

Undeclared fields are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, dataclass_transform

from rlzmq.core.printable import printable
from rlzmq.wire.errors import SchemaError

__all__ = [
    "FOLDED",
    "FRAMES_NEEDED",
    "MESSAGES",
    "PUBLICATION",
    "FragmentId",
    "Spans",
    "WireMessage",
    "first_number",
    "from_header",
    "message",
    "to_header",
]

T = TypeVar("T")

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
"""The kind of a publication, which is only sent on PUB; see `rlzmq.protocol.weights`."""

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
