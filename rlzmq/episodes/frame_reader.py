"""FrameReader: reads arrays from a peer's frames, and checks every count, dtype, shape and length before use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlzmq.core.errors import ProtocolError
from rlzmq.core.plain import checked_dtype

__all__ = [
    "MAX_ARRAYS",
    "MAX_COUNT",
    "MAX_DEPTH",
    "MAX_NAME",
    "FrameReader",
    "checked_count",
    "checked_fields",
    "checked_list",
    "checked_pair",
]

MAX_ARRAYS = 1024
MAX_DEPTH = 16
MAX_NAME = 256
# Far above any real count, but small enough for sums of two to fit into int64.
MAX_COUNT = 2**61
_MAX_DIMS = 32


class FrameReader:
    """Reads frames one by one as arrays of an expected dtype and shape, without copies.

    Only a frame that is misaligned for its dtype is copied (a small frame inside a receive buffer).

    Args:
        frames: Buffers: bytes, memoryviews, arrays.

    Raises:
        ProtocolError: There are too many frames. Every method raises it if a frame is not as expected.
    """

    def __init__(self, frames: Sequence[Any]) -> None:
        if len(frames) > MAX_ARRAYS:
            raise ProtocolError(f"expected at most {MAX_ARRAYS} frames, got {len(frames)}.")
        self._frames: Iterator[Any] = iter(frames)
        self._num = len(frames)
        self._num_read = 0

    def buffer(self, where: str) -> memoryview:
        """Return the next frame's bytes."""
        try:
            frame = next(self._frames)
        except StopIteration:
            raise ProtocolError(f"{where}: expected another frame, got only {self._num}.") from None
        self._num_read += 1
        try:
            view = memoryview(frame)
            return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                f"{where}: expected contiguous bytes, got {type(frame).__name__}: {error}."
            ) from None

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> np.ndarray:
        """Return the next frame as an array ``shape`` of ``dtype``."""
        view = self.buffer(where)
        expected = math.prod(shape) * dtype.itemsize
        if view.nbytes != expected:
            raise ProtocolError(
                f"{where}: expected {expected} bytes for shape {shape} of {dtype}, got {view.nbytes}."
            )
        if expected == 0:
            if max(shape, default=0) > MAX_COUNT:
                raise ProtocolError(f"{where}: expected a shape within bounds, got {shape}.")
            try:
                return np.empty(shape, dtype)
            except ValueError as error:
                raise ProtocolError(f"{where}: expected a possible shape, got {shape}: {error}.") from None
        if dtype.kind == "b" and np.frombuffer(view, np.uint8).max() > 1:
            raise ProtocolError(
                f"{where}: expected bools of 0 or 1, got {np.frombuffer(view, np.uint8).max()}."
            )
        array = np.frombuffer(view, dtype).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def tree(self, spec: Any, lead: int, where: str, depth: int = 0) -> Any:
        """Return the next frames as the tree of a spec from `tree_spec`, leaves ``[lead, *item_shape]``."""
        if depth > MAX_DEPTH:
            raise ProtocolError(f"{where}: expected a tree at most {MAX_DEPTH} deep.")
        if isinstance(spec, dict):
            if spec.keys() == {"tuple"}:
                parts = checked_list(spec["tuple"], where)
                return tuple(
                    self.tree(part, lead, f"{where}[{i}]", depth + 1) for i, part in enumerate(parts)
                )
            if spec.keys() != {"dict"}:
                raise ProtocolError(
                    f"{where}: expected a dict or tuple node, got {sorted(map(str, spec))[:8]}."
                )
            tree: dict[str, Any] = {}
            for entry in checked_list(spec["dict"], where):
                key, part = checked_pair(entry, where)
                if not isinstance(key, str) or len(key) > MAX_NAME or key in tree:
                    raise ProtocolError(
                        f"{where}: expected different keys of type str, got {str(key)[:80]!r}."
                    )
                tree[key] = self.tree(part, lead, f"{where}[{key!r}]", depth + 1)
            return tree
        text, shape = checked_pair(spec, where)
        shape = checked_list(shape, where)
        if len(shape) > _MAX_DIMS - 1:
            raise ProtocolError(f"{where}: expected at most {_MAX_DIMS} dimensions, got {len(shape) + 1}.")
        try:
            dtype = checked_dtype(text)
        except ValueError as error:
            raise ProtocolError(f"{where}: {error}") from None
        return self.array(dtype, (lead, *(checked_count(size, where) for size in shape)), where)

    def finish(self) -> None:
        """Check that all frames have been read."""
        if self._num_read != self._num:
            raise ProtocolError(f"expected {self._num_read} frames, got {self._num}.")


def checked_fields(value: Any, names: frozenset[str], where: str) -> dict[str, Any]:
    """Return the value after checking that it is a dict with exactly these keys."""
    if not isinstance(value, dict) or value.keys() != names:
        actual = sorted(map(str, value))[:16] if isinstance(value, dict) else type(value).__name__
        raise ProtocolError(f"{where}: expected the fields {sorted(names)}, got {actual}.")
    return value


def checked_list(value: Any, where: str) -> list[Any]:
    """Return the value after checking that it is a list."""
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(f"{where}: expected a list, got {type(value).__name__}.")
    return list(value)


def checked_pair(value: Any, where: str) -> tuple[Any, Any]:
    """Return the value after checking that it is a list of two items."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ProtocolError(f"{where}: expected a pair, got {str(value)[:80]}.")
    return value[0], value[1]


def checked_count(value: Any, where: str) -> int:
    """Return the value after checking that it is a whole number from 0 to `MAX_COUNT`."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ProtocolError(
            f"{where}: expected a count from 0, got {str(value)[:40]} ({type(value).__name__})."
        )
    return value
