"""Conversion of lookback buffer indices to absolute positions and fillers.

Absolute position 0 is the first item of the lookback part, ``lookback`` the first item after it. A non-negative index
counts from the latter. A negative one counts from the end and may reach into the lookback part, or, with
``neg_index_as_lookback``, counts backwards from the first item after the lookback part.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

__all__ = ["Span", "index_list", "resolve_int", "resolve_slice"]


def resolve_int(index: int, lookback: int, total: int, neg_index_as_lookback: bool) -> int:
    """Return the absolute position of an int index. It is outside of [0, total) if there is no such item."""
    if index >= 0 or neg_index_as_lookback:
        return lookback + index
    return total + index


def index_list(indices: Any) -> list[int] | None:
    """Convert a list, tuple, range or 1-D array of ints to a list of ints; return None for anything else."""
    if isinstance(indices, np.ndarray):
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            return None
        return [int(index) for index in indices]
    if not isinstance(indices, (list, tuple, range)):
        return None
    try:
        return [operator.index(index) for index in indices]
    except TypeError:
        return None


class Span:
    """The items of a slice: a slice of existing ones, with fillers on both sides.

    Attributes:
        existing: Python slice into the whole data (including lookback); its bounds are never negative.
        num_existing: Number of existing items.
        num_left, num_right: Number of fillers before and after the existing items.
    """

    __slots__ = ("existing", "num_existing", "num_left", "num_right")

    def __init__(self, existing: slice, num_existing: int, num_left: int, num_right: int) -> None:
        self.existing: slice = existing
        self.num_existing: int = num_existing
        self.num_left: int = num_left
        self.num_right: int = num_right


def resolve_slice(
    slice_: slice, lookback: int, total: int, neg_index_as_lookback: bool, *, fill: bool = False
) -> Span:
    """Return the existing items and the fillers of a slice.

    Args:
        slice_: If ``start`` is None, it is the first item after the lookback part; if ``stop`` is None, it is the
            end; for steps of any sign.
        lookback: Number of items in the lookback part.
        total: Number of all items.
        neg_index_as_lookback: How negative bounds count (see the module docstring).
        fill: Whether positions without an item count, each on the slice's own stride. A slice that is completely on
            one side of the data counts the positions between its bounds, even if reversed. If False, bounds are
            clipped to the data, as in a list.

    Raises:
        ValueError: The step is 0.
    """
    step = 1 if slice_.step is None else operator.index(slice_.step)
    if step == 0:
        raise ValueError("expected a slice step other than 0, got 0.")
    start = _bound(slice_.start, lookback, lookback, total, neg_index_as_lookback)
    stop = _bound(slice_.stop, total, lookback, total, neg_index_as_lookback)
    if not fill:
        low, high = (0, total) if step > 0 else (-1, total - 1)
        start, stop = min(max(start, low), high), min(max(stop, low), high)

    count = len(range(start, stop, step))
    if step > 0:
        skipped = -(start // step) if start < 0 else 0
        end = -((start - total) // step) if start < total else 0
    else:
        last = total - 1
        skipped = -((last - start) // -step) if start > last else 0
        end = start // -step + 1 if start >= 0 else 0
    first = min(skipped, count)
    num_existing = max(0, min(end, count) - first)
    begin = start + first * step
    if num_existing:
        beyond = begin + num_existing * step
        existing = slice(begin, beyond if beyond >= 0 else None, step)
    else:
        existing = slice(0, 0, 1)
    if not fill:
        return Span(existing, num_existing, 0, 0)
    if num_existing:
        return Span(existing, num_existing, first, count - first - num_existing)
    if (start < 0 and stop < 0) or (start >= total and stop >= total):
        count = -(-abs(start - stop) // abs(step))
    return Span(existing, 0, count, 0)


def _bound(bound: int | None, default: int, lookback: int, total: int, neg_index_as_lookback: bool) -> int:
    if bound is None:
        return default
    return resolve_int(operator.index(bound), lookback, total, neg_index_as_lookback)
