"""The typed tree: the one form in which Python values are stored and sent.

A value becomes a tree of None, bool, int, float, str, lists and dicts with str keys. A value of another type becomes a
dict with one key, the type's tag. A `PlainType` is such a type: its tag, how its content is written, and how it is
read. A writer and its reader have a registry of them (`PlainTypes`). Nothing else is created from a tree, so trees from
files and peers are safe to read:

| writer and reader        | for                                   | registry              | an array's place          |
|--------------------------|---------------------------------------|-----------------------|---------------------------|
| `to_plain`, `from_plain` | episodes, metrics, a new rank's state | `BASIC_TYPES`         | ``[dtype, shape, bytes]`` |
| `rlzmq.core.spaces`      | spaces                                | these, spaces         | as `to_plain`             |
| `rlzmq.core.checkpoint`  | states in files: JSON and safetensors | basic, bytes, tensors | a name in the second file |
| `rlzmq.wire.payloads`    | messages                              | all these, episodes … | a frame, or a part of one |
| `rlzmq.config.plain`     | settings                              | its own               | as `to_plain`             |

Types are preserved: tuples remain tuples, numpy scalars numpy scalars. Of subclasses, those of dicts, arrays, tensors
and spaces come back as the type itself; others, such as enums and named tuples, are refused (checkpoints convert them).
Only settings name code (`rlzmq.config.plain`), which is imported if it is trusted (`rlzmq.core.trust`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlzmq.core.errors import NotPlainError

__all__ = [
    "BASIC_TYPES",
    "BYTES",
    "TENSOR",
    "NotPlainError",
    "PlainType",
    "PlainTypes",
    "TreeReader",
    "TreeWriter",
    "checked_dtype",
    "expect_list",
    "from_plain",
    "to_plain",
]

_INT64 = range(-(2**63), 2**64)
_MAX_DIGITS = 4000
# Receivers of messages limit the length of maps, so longer dicts become lists of pairs.
_MAX_KEYS = 4000
_DTYPE = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f[248]|c(?:8|16)|[SU][1-9][0-9]{0,5}|[mM]8(?:\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?)"
)
_known_dtypes: dict[str, np.dtype[Any]] = {}


class _TooDeepError(NotPlainError, ValueError):
    """A value is nested too deep."""


def checked_dtype(text: object) -> np.dtype[Any]:
    """Return the numpy dtype of an untrusted ``dtype.str``: bool, numbers, datetimes, fixed-size strings only.

    Raises:
        ValueError: It is another dtype (objects, records, raw bytes), or not a string.
    """
    known = _known_dtypes.get(text) if isinstance(text, str) else None
    if known is not None:
        return known
    if not isinstance(text, str) or len(text) > 32 or not _DTYPE.fullmatch(text):
        raise ValueError(
            f"expected the dtype of a bool, number, datetime or fixed-size string, got {str(text)[:64]!r}."
        )
    try:
        dtype = np.dtype(text)
    except TypeError as error:
        raise ValueError(f"expected a numpy dtype, got {text!r}: {error}.") from None
    if len(_known_dtypes) < 256:
        _known_dtypes[text] = dtype
    return dtype


@dataclass(frozen=True)
class PlainType:
    """A type of values that trees hold as ``{tag: content}``.

    Attributes:
        tag: Its tag, which begins with two underscores.
        kind: The class or classes, none if a writer's method chooses the tag; or the name ``"module:qualname"`` of a
            base class that need not be imported.
        write: ``(writer, value, where, depth) -> content``, which is a tree.
        read: ``(reader, content, depth) -> value``. The content is not trusted: everything is checked before it is
            used. A TypeError or KeyError means that no writer makes such a content.
        with_subclasses: Whether an instance of a subclass is written too; it comes back as one of the type itself.
    """

    tag: str
    kind: type | tuple[type, ...] | str
    write: Callable[[Any, Any, str, int], object]
    read: Callable[[Any, Any, int], object]
    with_subclasses: bool = False

    def holds(self, kind: type) -> bool:
        """Return whether values of a class are of this type."""
        if isinstance(self.kind, str):
            return any(f"{base.__module__}:{base.__qualname__}" == self.kind for base in kind.__mro__)
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        return issubclass(kind, kinds) if self.with_subclasses else kind in kinds


class PlainTypes(dict[type, PlainType | None]):
    """A registry of types: of which type a class's values are, or None.

    Args:
        types: The types. Of several that a value is of, the first one counts.

    Attributes:
        by_tag: The types by tag.
    """

    def __init__(self, *types: PlainType) -> None:
        self.by_tag: dict[str, PlainType] = {each.tag: each for each in types}

    def __missing__(self, kind: type) -> PlainType | None:
        found = self[kind] = next((each for each in self.by_tag.values() if each.holds(kind)), None)
        return found

    def with_types(self, *more: PlainType) -> PlainTypes:
        """Return a registry of these types, and then those of this one."""
        return PlainTypes(*more, *self.by_tag.values())


def _write_pairs(w: TreeWriter, value: Mapping[Any, Any], where: str, depth: int) -> list[Any]:
    return [
        [w.write(key, f"{where}: key {key!r}", depth + 1), w.write(item, f"{where}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]


def _read_pairs(reader: TreeReader, content: object, depth: int) -> dict[Any, Any]:
    pairs = [expect_list(pair) for pair in expect_list(content)]
    return {reader.read(key, depth + 1): reader.read(item, depth + 1) for key, item in pairs}


def _read_int(reader: TreeReader, content: object, depth: int) -> int:
    if not isinstance(content, str) or len(content) > _MAX_DIGITS:
        raise ValueError(f"expected an integer as text of at most {_MAX_DIGITS} digits.")
    return int(content)


def _read_scalar(reader: TreeReader, content: object, depth: int) -> object:
    array = reader.fetch(content)
    if array.ndim:
        raise ValueError(f"expected a scalar without dimensions, got shape {array.shape}.")
    return array[()]


def _write_tensor(writer: TreeWriter, value: Any, where: str, depth: int) -> list[Any]:
    import torch

    tensor = value.detach().cpu()
    is_bfloat16 = tensor.dtype is torch.bfloat16  # which numpy lacks
    array = (tensor.contiguous().view(torch.int16) if is_bfloat16 else tensor).numpy()
    return [writer.place(array, where), is_bfloat16]


def _read_tensor(reader: TreeReader, content: object, depth: int) -> object:
    import torch

    place, is_bfloat16 = expect_list(content)
    array = reader.fetch(place)
    try:
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.view(torch.bfloat16) if is_bfloat16 is True else tensor
    except (TypeError, RuntimeError):
        raise ValueError(f"no torch tensor has dtype {array.dtype}") from None


_PAIRS = PlainType("__dict__", Mapping, _write_pairs, _read_pairs, with_subclasses=True)
"""A dict with keys that are not texts, or with tags as keys. Other dicts are in the tree as they are."""

BASIC_TYPES = PlainTypes(
    PlainType(
        "__scalar__", np.generic, lambda w, v, where, _: w.place(np.asarray(v), where), _read_scalar, True
    ),
    PlainType(
        "__array__", np.ndarray, lambda w, v, where, _: w.place(v, where), lambda r, c, _: r.fetch(c), True
    ),
    PlainType(
        "__tuple__",
        tuple,
        lambda w, v, where, depth: w.items(v, where, depth),
        lambda r, c, depth: tuple(r.read(expect_list(c), depth)),
    ),
    _PAIRS,
    PlainType("__int__", int, lambda w, v, where, _: str(int(v)), _read_int),  # beyond 64 bits
    PlainType("__complex__", complex, lambda w, v, where, _: [v.real, v.imag], lambda r, c, _: complex(*c)),
)
BYTES = PlainType(
    "__bytes__",
    bytes,
    lambda w, v, where, _: w.place(np.frombuffer(v, np.uint8), where),
    lambda r, content, _: r.fetch(content).tobytes(),
)
TENSOR = PlainType("__tensor__", "torch:Tensor", _write_tensor, _read_tensor)


class TreeWriter:
    """Converts values to trees, with arrays as in `to_plain`. Subclasses have other types and places for arrays.

    Attributes:
        types: The types of values, besides those in the tree as they are.
        leaves: Types that are in the tree unchanged.
        max_depth: Maximum number of nested containers.
        is_short: Whether spaces are written as short as possible.
    """

    types: PlainTypes = BASIC_TYPES
    leaves: ClassVar[frozenset[type]] = frozenset({type(None), bool, str, float, bytes})
    max_depth: ClassVar[int] = 64
    is_short: ClassVar[bool] = True

    def write(self, value: object, where: str = "value", depth: int = 0) -> Any:
        """Return the tree of a value.

        Raises:
            NotPlainError: A type is unknown; the message names its path.
        """
        kind = type(value)
        if kind in self.leaves or (kind is int and value in _INT64):
            return value
        if depth >= self.max_depth:
            raise _TooDeepError(f"{where[:200]}: nested deeper than {self.max_depth}, or contains itself.")
        if kind is list:
            return self.items(value, where, depth)
        found = _PAIRS if kind is dict else self.types[kind]
        if found is _PAIRS:
            return self.dict_(value, where, depth)  # type: ignore[arg-type]
        if found is not None:
            return {found.tag: found.write(self, value, where, depth)}
        return self.other(value, where, depth)

    def items(self, value: Any, where: str, depth: int) -> Any:
        """Return the trees of a list's or tuple's items."""
        leaves = self.leaves
        return [
            item if type(item) in leaves else self.write(item, f"{where}[{i}]", depth + 1)
            for i, item in enumerate(value)
        ]

    def dict_(self, value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
        """Return the tree of a dict."""
        is_plain = all(type(key) is str and key[:2] != "__" for key in value)
        if not is_plain or len(value) > _MAX_KEYS:
            return {_PAIRS.tag: _PAIRS.write(self, value, where, depth)}
        leaves = self.leaves
        return {
            key: item if type(item) in leaves else self.write(item, f"{where}[{key!r}]", depth + 1)
            for key, item in value.items()
        }

    def place(self, array: np.ndarray, where: str) -> Any:
        """Store an array at this encoding's place for arrays; return its place.

        Raises:
            NotPlainError: Arrays of this dtype cannot be stored.
        """
        if array.dtype.kind not in "biufcmMSU":
            raise NotPlainError(f"{where}: expected an array of numbers or strings, got dtype {array.dtype}.")
        return [array.dtype.str, list(array.shape), array.tobytes()]

    def other(self, value: object, where: str, depth: int) -> Any:
        """Raise NotPlainError for a value of another type, or return its tree."""
        kind = type(value)
        raise NotPlainError(
            f"{where}: expected None, bool, number, str, bytes, list, tuple, dict or a numpy array of numbers, "
            f"got {kind.__module__}.{kind.__qualname__}."
        )


class TreeReader:
    """Converts trees of a `TreeWriter` with the same types back. The input is not trusted.

    Attributes:
        types: The types of values that may be created.
        max_depth: Maximum nesting of the tree.
    """

    types: PlainTypes = BASIC_TYPES
    leaves: ClassVar[frozenset[type]] = frozenset({type(None), bool, int, float, str, bytes})
    max_depth: ClassVar[int] = 2 * TreeWriter.max_depth + 2

    def read(self, tree: Any, depth: int = 0) -> Any:
        """Return the value of a tree.

        Raises:
            ValueError: No writer creates such a tree.
        """
        kind, leaves = type(tree), self.leaves
        if kind in leaves:
            return tree
        if depth > self.max_depth:
            raise ValueError(f"expected values nested at most {TreeWriter.max_depth} deep, got deeper ones.")
        if kind is list:
            return [item if type(item) in leaves else self.read(item, depth + 1) for item in tree]
        if kind is not dict:
            raise ValueError(f"expected a plain value, got {kind.__qualname__}.")
        if len(tree) == 1:
            ((tag, content),) = tree.items()
            if type(tag) is str and tag[:2] == "__":
                if (found := self.types.by_tag.get(tag)) is None:
                    raise ValueError(f"expected a known tag, got {tag[:32]!r}.")
                try:
                    return found.read(self, content, depth)
                except (LookupError, TypeError, AttributeError, AssertionError, OverflowError) as error:
                    raise ValueError(
                        f"expected the content of {tag!r}, got another one ({type(error).__name__})."
                    ) from error
        return {
            key: item if type(item) in leaves else self.read(item, depth + 1) for key, item in tree.items()
        }

    def spend(self, num_bytes: int) -> None:
        """Count memory that is about to be allocated; may raise an error."""

    def fetch(self, place: object) -> np.ndarray:
        """Return the array at a place from `TreeWriter.place`."""
        text, shape, data = expect_list(place)
        dtype = checked_dtype(text)
        if len(expect_list(shape)) > 32 or any(type(n) is not int or not 0 <= n < 2**48 for n in shape):
            raise ValueError(f"expected a shape of at most 32 sizes from 0, got {str(shape)[:200]}.")
        expected = math.prod(shape) * dtype.itemsize
        if not isinstance(data, bytes) or len(data) != expected:
            actual = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__qualname__
            raise ValueError(f"expected {expected} bytes for shape {shape} of {dtype}, got {actual}.")
        if dtype.kind == "b" and data.strip(b"\x00\x01"):
            raise ValueError("expected bools of 0 or 1, got other bytes.")
        if expected == 0:
            return np.zeros(shape, dtype)
        return np.frombuffer(data, dtype).reshape(shape).copy()


def expect_list(value: object) -> list[Any]:
    """Return the value, a list in a tree; raise ValueError if it is not a list."""
    if type(value) is not list:
        raise ValueError(f"expected a list, got {type(value).__qualname__}.")
    return value


_writer, _reader = TreeWriter(), TreeReader()


def to_plain(value: object, where: str = "value") -> Any:
    """Return the tree of ``value``, which msgpack can pack. Arrays become bytes.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict (with keys of any of these types), numpy
            scalars and arrays (no object dtype), nested up to 64 deep.
        where: Name of the value in error messages.

    Raises:
        NotPlainError: A value has another type; the message names its path.
    """
    return _writer.write(value, where)


def from_plain(tree: object) -> Any:
    """Return the value of a tree from `to_plain`.

    Raises:
        ValueError: It is not such a tree (unknown tag, wrong size or dtype, too deep).
    """
    return _reader.read(tree)
