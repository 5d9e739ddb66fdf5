"""The typed tree: the common form in which Python values are stored and sent.

A value becomes a tree of None, bool, int, float, str, bytes, lists and dicts with str keys. Values of other types
become a dict with one key, the tag:

    tuple                          {"__tuple__": [item, …]}
    dict with other or tagged keys {"__dict__": [[key, value], …]}
    int beyond 64 bits             {"__int__": digits}
    complex                        {"__complex__": [real, imag]}
    numpy array, numpy scalar      {"__array__": place}, {"__scalar__": place}

The encodings differ in the place of arrays, and in additional types with their own tags:

| encoding                               | for                                     | an array's place             |
|----------------------------------------|-----------------------------------------|------------------------------|
| `to_plain`, `from_plain`               | episodes, message headers, spaces       | ``[dtype, shape, bytes]``    |
| `rlzmq.core.checkpoint`                | states in files: JSON and safetensors   | a name in the second file    |
| `rlzmq.wire.payloads`                    | messages; also episodes, metrics, spaces | a frame, or a part of one    |
| `rlzmq.config.plain`                   | settings; also sets and names of code   | as `to_plain`                |

Types are preserved (tuples remain tuples, numpy scalars numpy scalars). Only this fixed set of types is ever created
from a tree, so trees from files and peers are safe to read. Only settings name
code (`rlzmq.config.plain`), which is imported if it is trusted (`rlzmq.core.trust`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rlzmq.core.errors import NotPlainError

__all__ = [
    "NotPlainError",
    "TreeReader",
    "TreeWriter",
    "checked_dtype",
    "expect_list",
    "from_plain",
    "to_plain",
]

_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
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


class TreeWriter:
    """Converts values to trees, with arrays as in `to_plain`. Subclasses place arrays elsewhere and support more types.

    Attributes:
        leaves: Types that are in the tree unchanged.
        max_depth: Maximum number of nested containers.
    """

    leaves: ClassVar[frozenset[type]] = frozenset({type(None), bool, str, float, bytes})
    max_depth: ClassVar[int] = 64

    def write(self, value: object, where: str = "value", depth: int = 0) -> Any:
        """Return the tree of a value.

        Raises:
            NotPlainError: A type is unknown; the message names its path.
        """
        kind = type(value)
        if kind in self.leaves:
            return value
        if kind is int:
            return value if value in _INT64 else {"__int__": str(value)}
        if depth >= self.max_depth:
            raise _TooDeepError(f"{where[:200]}: nested deeper than {self.max_depth}, or contains itself.")
        if kind is list:
            return self.items(value, where, depth)
        if kind is tuple:
            return {"__tuple__": self.items(value, where, depth)}
        if isinstance(value, dict):
            return self.dict_(value, where, depth)
        if isinstance(value, np.ndarray):
            return self.array(value, where)
        if isinstance(value, np.generic):
            return self.scalar(value, where)
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
        if is_plain and len(value) <= _MAX_KEYS:
            leaves = self.leaves
            return {
                key: item if type(item) in leaves else self.write(item, f"{where}[{key!r}]", depth + 1)
                for key, item in value.items()
            }
        pairs = [
            [
                self.write(key, f"{where}: key {key!r}", depth + 1),
                self.write(item, f"{where}[{key!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]
        return {"__dict__": pairs}

    def array(self, array: np.ndarray, where: str) -> Any:
        """Return the tree of an array."""
        return {"__array__": self.place(array, where)}

    def scalar(self, value: np.generic, where: str) -> Any:
        """Return the tree of a numpy scalar."""
        return {"__scalar__": self.place(np.asarray(value), where)}

    def place(self, array: np.ndarray, where: str) -> Any:
        """Store an array at this encoding's place for arrays; return its place.

        Raises:
            NotPlainError: Arrays of this dtype cannot be stored.
        """
        if array.dtype.kind not in "biufcmMSU":
            raise NotPlainError(f"{where}: expected an array of numbers or strings, got dtype {array.dtype}.")
        return [array.dtype.str, list(array.shape), array.tobytes()]

    def other(self, value: object, where: str, depth: int) -> Any:
        """Return the tree of a value of another type."""
        if type(value) is complex:
            return {"__complex__": [value.real, value.imag]}
        raise NotPlainError(
            f"{where}: expected None, bool, number, str, bytes, list, tuple, dict or a numpy array of numbers, "
            f"got {_described(value)}."
        )


class TreeReader:
    """Converts trees of `TreeWriter` back. A subclass reads the additional types of the matching writer.

    The input is not trusted: everything is checked before it is used.
    """

    max_depth: ClassVar[int] = 2 * TreeWriter.max_depth + 2

    def read(self, tree: Any, depth: int = 0) -> Any:
        """Return the value of a tree.

        Raises:
            ValueError: No writer creates such a tree.
        """
        kind = type(tree)
        if kind in _LEAVES:
            return tree
        if depth > self.max_depth:
            raise ValueError(f"expected values nested at most {TreeWriter.max_depth} deep, got deeper ones.")
        if kind is list:
            return [item if type(item) in _LEAVES else self.read(item, depth + 1) for item in tree]
        if kind is not dict:
            raise ValueError(f"expected a plain value, got {kind.__qualname__}.")
        if len(tree) == 1:
            ((tag, content),) = tree.items()
            if type(tag) is str and tag[:2] == "__":
                try:
                    return self.tagged(tag, content, depth)
                except (KeyError, TypeError, OverflowError) as error:
                    raise ValueError(
                        f"expected the content of {tag[:32]!r}, got another one ({type(error).__name__})."
                    ) from error
        return {
            key: item if type(item) in _LEAVES else self.read(item, depth + 1) for key, item in tree.items()
        }

    def tagged(self, tag: str, content: Any, depth: int) -> Any:
        """Return the value of a tagged dict."""
        if tag == "__tuple__":
            return tuple([self.read(item, depth + 1) for item in expect_list(content)])
        if tag == "__dict__":
            pairs = [expect_list(pair) for pair in expect_list(content)]
            return {self.read(key, depth + 1): self.read(item, depth + 1) for key, item in pairs}
        if tag == "__array__":
            return self.fetch(content)
        if tag == "__scalar__":
            array = self.fetch(content)
            if array.ndim:
                raise ValueError(f"expected a scalar without dimensions, got shape {array.shape}.")
            return array[()]
        if tag == "__int__":
            if not isinstance(content, str) or len(content) > _MAX_DIGITS:
                raise ValueError(f"expected an integer as text of at most {_MAX_DIGITS} digits.")
            return int(content)
        if tag == "__complex__":
            real, imag = content
            return complex(real, imag)
        raise ValueError(f"expected a known tag, got {tag[:32]!r}.")

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


def _described(value: object) -> str:
    kind = type(value)
    dtype = getattr(value, "dtype", None)
    return f"{kind.__module__}.{kind.__qualname__}" + (f" of dtype {dtype}" if dtype is not None else "")
