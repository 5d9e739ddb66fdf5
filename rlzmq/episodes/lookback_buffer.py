"""InfiniteLookbackBuffer: one column of an episode with a lookback part in front, its storage and its indexing.

Absolute position 0 is the first item of the lookback part, ``lookback`` the first item after it. A non-negative index
counts from the latter. A negative one counts from the end and may reach into the lookback part, or, with
``neg_index_as_lookback``, counts backwards from the first item after the lookback part.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import gymnasium as gym
import numpy as np

from rlzmq.core.spaces import one_hot, space_filler
from rlzmq.core.tree import (
    check_same_structure,
    is_nested,
    num_items,
    object_array,
    tree_leaves,
    tree_map,
    tree_rows,
    tree_stack,
    tree_unstack,
    value_kind,
)

__all__ = [
    "InfiniteLookbackBuffer",
    "index_list",
    "resolve",
    "resolve_int",
    "resolve_slice",
    "same_items",
]


def resolve_int(index: int, lookback: int, total: int, neg_index_as_lookback: bool) -> int:
    """Return the absolute position of an int index. It is outside of [0, total) if there is no such item."""
    if index >= 0 or neg_index_as_lookback:
        return lookback + index
    return total + index


def index_list(indices: object) -> list[int] | None:
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


def resolve(
    indices: object, lookback: int, total: int, neg_index_as_lookback: bool, *, filled: bool = False
) -> tuple[bool, Sequence[int | None]]:
    """Return whether the index is one int, and the absolute positions of the items; None stands for a filler.

    Args:
        indices: None for all items after the lookback part, an int, a list of ints or a slice.
        lookback: Number of items in the lookback part.
        total: Number of all items.
        neg_index_as_lookback: How negative indices count (see the module docstring).
        filled: Whether items that do not exist are filled.

    Raises:
        IndexError: An int refers to no item, and `filled` is False.
        TypeError: The index is of another kind.
    """
    if indices is None:
        return False, range(lookback, total)
    if isinstance(indices, slice):
        return False, resolve_slice(indices, lookback, total, neg_index_as_lookback, fill=filled)
    listed = index_list(indices)
    positions: list[int | None] = []
    for index in [_as_index(indices)] if listed is None else listed:
        position = resolve_int(index, lookback, total, neg_index_as_lookback)
        if 0 <= position < total:
            positions.append(position)
        elif filled:
            positions.append(None)
        else:
            low = -lookback if neg_index_as_lookback else -total
            raise IndexError(
                f"index {index} is out of range: expected {low}…{total - lookback - 1} (length {total - lookback}, "
                f"lookback {lookback}{', neg_index_as_lookback' if neg_index_as_lookback else ''}); fill= gives a "
                "value for what is not there."
            )
    return listed is None, positions


def resolve_slice(
    slice_: slice, lookback: int, total: int, neg_index_as_lookback: bool, *, fill: bool = False
) -> range | list[int | None]:
    """Return the positions of a slice's items, which is a range unless there are fillers (None) on its sides.

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
    existing = range(begin, begin + num_existing * step, step) if num_existing else range(0)
    if not fill:
        return existing
    num_left, num_right = first, count - first - num_existing
    if not num_existing:
        is_beside = (start < 0 and stop < 0) or (start >= total and stop >= total)
        num_left, num_right = -(-abs(start - stop) // abs(step)) if is_beside else count, 0
    if not num_left and not num_right:
        return existing
    return [*[None] * num_left, *existing, *[None] * num_right]


def _bound(bound: int | None, default: int, lookback: int, total: int, neg_index_as_lookback: bool) -> int:
    if bound is None:
        return default
    return resolve_int(operator.index(bound), lookback, total, neg_index_as_lookback)


class InfiniteLookbackBuffer:
    """A growing sequence with a lookback part in front, stored as a list or as a tree of arrays.

    Index 0 is the first item after the lookback part, and ``len`` counts from there. Negative indices count from the
    end and may reach into the lookback part. With ``neg_index_as_lookback=True`` they count backwards from the first
    item after it.

    A buffer on arrays may be a view of shared memory (`EpisodeBatch`). Reading never copies. Arrays are written to in
    place only if the buffer *owns* them: no other buffer reads them; before a change of others, it copies them.
    Appending to arrays copies them.

    Example:
        >>> buffer = InfiniteLookbackBuffer([10, 11, 12, 13, 14], lookback=2)
        >>> buffer.get(0), buffer.get(-4), buffer.get(-1, neg_index_as_lookback=True)
        (12, 11, 11)
        >>> buffer.get(slice(1, 5), fill=0)
        [13, 14, 0, 0]

    Args:
        data: Items, starting with the lookback part: a list of items (list-backed), an array ``[num_items, ...]`` or
            a dict/tuple tree of such arrays (array-backed), or None for an empty list.
        lookback: Number of items in the lookback part, clipped to the number of items.
        space: The space of one item; defines the shape and dtype of fillers, and the size of one-hots.

    Attributes:
        lookback: Number of items in the lookback part.
        space: The space of one item, or None.
    """

    __slots__ = ("_arrays", "_items", "_num", "_owned", "lookback", "space")

    _items: list[Any] | None
    _arrays: Any
    _num: int
    _owned: bool
    space: gym.Space[Any] | None

    # For buffers with opaque items (infos), the filler is the fill value itself.
    _opaque = False

    def __init__(self, data: Any = None, lookback: int = 0, space: gym.Space[Any] | None = None) -> None:
        if isinstance(data, InfiniteLookbackBuffer):
            data._owned = False
            data = data.data
        self._arrays, self._num, self._owned = None, 0, False
        # A tuple of items without a first dimension is not a tree of arrays.
        is_tree = isinstance(data, dict) or (isinstance(data, tuple) and any(map(np.ndim, tree_leaves(data))))
        if is_tree or isinstance(data, np.ndarray):  # copied only before a write
            self._items = None
            self._arrays = tree_map(_as_column, data)
            self._num = num_items(self._arrays)
        else:
            self._items = [] if data is None else list(data)
        self.lookback: int = min(operator.index(lookback), self.len_incl_lookback())
        if self.lookback < 0:
            raise ValueError(f"expected a lookback of at least 0, got {lookback}.")
        self.space = space

    @classmethod
    def _of_list(
        cls, items: list[Any] | None, lookback: int, space: gym.Space[Any] | None
    ) -> InfiniteLookbackBuffer:
        """Return a buffer that uses the list ``items`` without copying it."""
        self = cls.__new__(cls)
        self._items = items
        self._arrays = None
        self._num = 0
        self._owned = False
        self.lookback = lookback
        self.space = space
        return self

    @classmethod
    def _of_view(
        cls, arrays: object, num: int, lookback: int, space: gym.Space[Any] | None
    ) -> InfiniteLookbackBuffer:
        """Return a buffer that is a view of ``arrays`` (``num`` items each) and copies them before a write."""
        self = cls._of_list(None, lookback, space)
        self._arrays, self._num = arrays, num
        return self

    def _part(self, begin: int, end: int, lookback: int) -> InfiniteLookbackBuffer:
        """Return the items at absolute positions ``begin…end-1`` as a new buffer that shares the arrays."""
        if self._items is not None:
            return self._of_list(self._items[begin:end], lookback, self.space)
        self._owned = False
        return self._of_view(tree_rows(self._arrays, slice(begin, end)), end - begin, lookback, self.space)

    # -- facts ----------------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """All items, including the lookback part: the list itself, or arrays (views) ``[num_items, ...]``."""
        return self._arrays if self._items is None else self._items

    @property
    def finalized(self) -> bool:
        """Whether the items are stored as arrays."""
        return self._items is None

    def _at(self, position: int) -> object:
        return tree_rows(self._arrays, position) if self._items is None else self._items[position]

    def _truncate(self, num: int) -> None:
        """Drop all but the first ``num`` items (including the lookback part)."""
        if self._items is not None:
            del self._items[num:]
        elif num < self._num:
            self._arrays, self._num = tree_rows(self._arrays, slice(num)), num

    def len_incl_lookback(self) -> int:
        """Return the number of items, including the lookback part."""
        return self._num if self._items is None else len(self._items)

    def __len__(self) -> int:
        return (self._num if self._items is None else len(self._items)) - self.lookback

    def __iter__(self) -> Iterator[Any]:
        for position in range(self.lookback, self.len_incl_lookback()):
            yield self._at(position)

    def __repr__(self) -> str:
        backing = "array" if self._items is None else "list"
        return f"InfiniteLookbackBuffer(len={len(self)}, lookback={self.lookback}, {backing})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InfiniteLookbackBuffer):
            return NotImplemented
        return (
            self.finalized == other.finalized
            and self.lookback == other.lookback
            and self.len_incl_lookback() == other.len_incl_lookback()
            and same_items(self.data, other.data)
        )

    # -- reading --------------------------------------------------------------------------------------

    def get(
        self,
        indices: int | slice | Sequence[int] | None = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: object = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Return one item or several.

        Args:
            indices: None for all items after the lookback part; an int (also a numpy int) for one item; a list of
                ints or a slice for several.
            neg_index_as_lookback: Whether negative indices count backwards from the first item after the lookback
                part: -1 is then the last lookback item.
            fill: Value for every element of items that do not exist, before and after the data. Fillers have the
                structure, shape and dtype of the space (or of the data). Among objects, or in a list that is filled
                with something other than a number, a filler is the value itself.
            one_hot_discrete: Whether to return Discrete and MultiDiscrete values one-hot encoded (float32).

        Returns:
            The item, for an int. Otherwise a list of items, or, if array-backed, a tree of arrays ``[num_items,
            ...]``: views if the items are an unfilled slice, copies otherwise.

        Raises:
            IndexError: An int, or an element of a list, refers to no item, and there is no ``fill``.
            ValueError: ``one_hot_discrete`` is set without a space.
            TypeError: The index is of another kind.
        """
        items = self._items
        total = self._num if items is None else len(items)
        if type(indices) is int and not one_hot_discrete:
            position = indices + (self.lookback if indices >= 0 or neg_index_as_lookback else total)
            if 0 <= position < total:
                return self._at(position) if items is None else items[position]
        if one_hot_discrete and self.space is None:
            raise ValueError("one_hot_discrete=True needs the column's space, which is None.")
        is_single, positions = resolve(
            indices, self.lookback, total, neg_index_as_lookback, filled=fill is not None
        )
        if is_single:
            return self._one(positions[0], fill, one_hot_discrete)
        return self._several(positions, fill, one_hot_discrete)

    def __getitem__(self, indices: int | slice | Sequence[int]) -> Any:
        return self.get(indices)

    def _one(self, position: int | None, fill: object, hot: bool) -> object:
        """Return the item at an absolute position; None: a filler."""
        if position is None:
            return self._filler(fill, hot)
        item = self._at(position)
        return one_hot(self.space, item) if hot and self.space is not None else item

    def _several(self, positions: Sequence[int | None], fill: object, hot: bool) -> object:
        """Return the items at absolute positions, see `resolve`. Those of a range of arrays are views."""
        if self._items is not None:
            if isinstance(positions, range) and not hot:
                return self._items[_as_slice(positions)]
            return [self._one(position, fill, hot) for position in positions]
        if isinstance(positions, range):
            found = tree_rows(self._arrays, _as_slice(positions))
            return one_hot(self.space, found) if hot and self.space is not None else found
        existing = np.array([position is not None for position in positions], bool)
        found = tree_rows(self._arrays, [position for position in positions if position is not None])
        if hot and self.space is not None:
            found = one_hot(self.space, found)
        if existing.all():
            return found

        def spread(part: np.ndarray) -> np.ndarray:
            whole = _full((len(positions), *part.shape[1:]), fill, part.dtype)
            whole[existing] = part
            return whole

        return tree_map(spread, found)

    def _filler(self, fill: object, hot: bool) -> object:
        if self._opaque:
            return copy.copy(fill)
        if self._items is None:
            template = tree_map(lambda array: np.empty(array.shape[1:], array.dtype), self._arrays)
            if hot and self.space is not None:
                template = space_filler(self.space, fill, one_hot_discrete=True)
            return tree_map(
                lambda leaf: fill if leaf.dtype.hasobject else _full(leaf.shape, fill, leaf.dtype), template
            )
        if value_kind(np.asarray(fill).dtype) != "number":
            return fill
        if self.space is not None:
            return space_filler(self.space, fill, one_hot_discrete=hot)
        if not self._items or not any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(self._items[-1])):
            return tree_map(lambda _: fill, self._items[-1]) if self._items else fill
        return tree_map(
            lambda leaf: np.full(leaf.shape, fill, leaf.dtype) if isinstance(leaf, np.ndarray) else fill,
            self._items[-1],
        )

    # -- writing --------------------------------------------------------------------------------------

    def set(
        self,
        new_data: object,
        *,
        at_indices: int | slice | Sequence[int] | None = None,
        neg_index_as_lookback: bool = False,
    ) -> None:
        """Overwrite items. Their number never changes.

        Args:
            new_data: One item for an int; otherwise a list of items, or a tree of arrays ``[num_items, ...]``.
            at_indices: The items to overwrite, as in `get`; None: all items after the lookback part.
            neg_index_as_lookback: See `get`.

        Raises:
            IndexError: An index refers to no item, or ``new_data`` has another number of items.
            ValueError: An item's structure, or (array-backed) shape or kind, differs from the column's.
        """
        items = self._items
        if items is not None and type(at_indices) is int:
            begin = self.lookback if at_indices >= 0 or neg_index_as_lookback else len(items)
            if 0 <= at_indices + begin < len(items):
                items[at_indices + begin] = new_data
                return
        total = self.len_incl_lookback()
        is_single, positions = resolve(at_indices, self.lookback, total, neg_index_as_lookback)
        if not is_single:
            self._write(
                _as_slice(positions) if isinstance(positions, range) else positions, new_data, len(positions)
            )
        elif self._items is None:
            self._write_arrays(positions[0], new_data, ())
        else:
            self._items[cast(int, positions[0])] = new_data

    def __setitem__(self, indices: int | slice | Sequence[int], new_data: object) -> None:
        self.set(new_data, at_indices=indices)

    def _as_batch(self, new_data: object) -> object:
        """Return new items as a list of items or as a tree of arrays."""
        if isinstance(new_data, InfiniteLookbackBuffer):
            return new_data.get()
        one: object = self._arrays if self._items is None else next(reversed(self._items), None)
        if isinstance(new_data, tuple) and not isinstance(one, tuple):
            return list(new_data)
        if isinstance(new_data, (dict, tuple)):
            return tree_map(np.asarray, new_data)
        if isinstance(new_data, (list, np.ndarray)):
            return new_data
        return list(new_data) if isinstance(new_data, Iterator) else np.asarray(new_data)

    def _write(self, where: Any, new_data: object, num: int) -> None:
        batch = self._as_batch(new_data)
        given = len(batch) if isinstance(batch, list) else num_items(batch)
        if given != num:
            raise IndexError(
                f"expected new data for {num} items, got {given}: setting never changes the length."
            )
        if self._items is None:
            if num == 0:
                return
            everything = isinstance(where, slice) and num == self._num and (where.step or 1) == 1
            if everything and not self._has_structure_of(batch, (num,)):
                # Only replacing all items may change the structure, shape and kind.
                self._arrays = tree_map(np.array, _stacked(batch))
                self._owned = True
            else:
                self._write_arrays(where, batch, (num,))
            return
        items = batch if isinstance(batch, list) else tree_unstack(batch)
        if isinstance(where, slice):
            self._items[where] = items
        else:
            for position, item in zip(where, items, strict=True):
                self._items[position] = item

    def _write_arrays(self, where: Any, new_data: object, lead: tuple[int, ...]) -> None:
        """Write ``new_data`` (leaves ``[*lead, ...]``) at ``where``; widen a column's dtype if needed."""
        fitted = self._fitted(new_data, lead)
        is_owned, self._owned = self._owned, True

        def own(array: np.ndarray, new: np.ndarray) -> np.ndarray:
            return array.astype(_wide_enough(array.dtype, new), copy=not is_owned)

        self._arrays = tree_map(own, self._arrays, fitted)

        def write(array: np.ndarray, new: np.ndarray) -> None:
            array[where] = new[()]  # store the object inside a 0-d array, not the array

        tree_map(write, self._arrays, fitted)

    def _has_structure_of(self, new_data: object, lead: tuple[int, ...]) -> bool:
        try:
            self._fitted(new_data, lead)
        except (ValueError, TypeError):
            return False
        return True

    def _fitted(self, new_data: object, lead: tuple[int, ...]) -> object:
        """Convert one item (no ``lead``) or several to arrays ``[*lead, ...]`` of this column's form."""
        arrays = self._arrays
        if isinstance(arrays, np.ndarray) and arrays.dtype.hasobject:
            return _as_objects(new_data, lead)
        if lead and isinstance(new_data, list):
            new_data = tree_stack(new_data, objects=True)
        check_same_structure(arrays, new_data)

        def fit(array: np.ndarray, leaf: object) -> np.ndarray:
            return _as_objects(leaf, lead) if array.dtype.hasobject else _as_array(leaf)

        fitted = tree_map(fit, arrays, new_data)
        self._check_items(fitted, lead)
        return fitted

    def _check_items(self, new_data: object, lead: tuple[int, ...]) -> None:
        def check(array: np.ndarray, new: np.ndarray) -> None:
            if new.shape != (*lead, *array.shape[1:]):
                raise ValueError(
                    f"expected items of shape {array.shape[1:]}, got {new.shape[len(lead) :]} (only setting "
                    "all items at once, the lookback part included, may change their shape)."
                )
            if new.dtype != array.dtype and new.size and value_kind(new.dtype) != value_kind(array.dtype):
                raise ValueError(
                    f"expected a {value_kind(array.dtype)} ({array.dtype}), got a {value_kind(new.dtype)} "
                    f"({new.dtype}), {new.flat[0]!r} (only setting all items at once, the lookback part "
                    "included, may change their kind)."
                )

        tree_map(check, self._arrays, new_data)

    def _append_arrays(self, new: object, num: int) -> None:
        """Add ``num`` fitted items, arrays ``[num, ...]``; widen a column's dtype if needed."""

        def joined(array: np.ndarray, leaf: np.ndarray) -> np.ndarray:
            return np.concatenate([array, leaf], dtype=_wide_enough(array.dtype, leaf), casting="unsafe")

        self._arrays = tree_map(joined, self._arrays, new)
        self._num, self._owned = self._num + num, True

    # -- growing and shrinking ------------------------------------------------------------------------

    def append(self, item: object) -> None:
        """Add one item at the end.

        Raises:
            ValueError: The buffer is array-backed, and the item's structure, shape or kind (string or number) differs
                from the column's.
        """
        if self._items is not None:
            self._items.append(item)
            return
        if self._num == 0 and not self._has_structure_of(item, ()):
            self._arrays = tree_map(lambda leaf: leaf[:0], tree_stack([item], objects=True))
        self._append_arrays(tree_map(lambda leaf: leaf[None], self._fitted(item, ())), 1)

    def extend(self, items: object) -> None:
        """Add several items at the end: a list of items, a tree of arrays, or another buffer's items.

        Raises:
            ValueError: The buffer is array-backed, and a structure, shape or kind differs from the column's.
        """
        batch = self._as_batch(items)
        num = len(batch) if isinstance(batch, list) else num_items(batch)
        if num == 0:
            return
        if self._items is not None:
            self._items.extend(batch if isinstance(batch, list) else tree_unstack(batch))
            return
        if self._num == 0 and not self._has_structure_of(batch, (num,)):
            self._arrays = tree_map(lambda leaf: leaf[:0], _stacked(batch))
        self._append_arrays(self._fitted(batch, (num,)), num)

    def finalize(self) -> None:
        """Convert the list of items to arrays, in place. Does nothing if they are arrays already.

        Items other than numbers, strings and arrays of them become an array of dtype object.

        Raises:
            ValueError: Items differ in structure, shape or kind; the text names the first such item (counted from the
                first item of the lookback part).
        """
        if self._items is None:
            return
        if self._items:
            self._arrays = tree_stack(self._items, objects=True)
        elif self.space is not None:
            self._arrays = space_filler(self.space, 0, lead=(0,))
        else:
            # The shape is unknown until the first item is appended.
            self._arrays = np.zeros((0, 0), np.float32)
        self._num = len(self._items)
        self._items = None
        self._owned = True

    def concat(self, other: InfiniteLookbackBuffer) -> None:
        """Append the other buffer's items, without its lookback part."""
        self.extend(other.get())

    def pop(self, index: int = -1) -> Any:
        """Remove one item and return it (``index`` as in `get`).

        Raises:
            IndexError: There is no such item.
        """
        total = self.len_incl_lookback()
        position = cast(int, resolve(_as_index(index), self.lookback, total, False)[1][0])
        item = self._at(position)
        if self._items is not None:
            del self._items[position]
        elif position == total - 1:
            item = copy.deepcopy(item)
            self._truncate(position)
        else:
            self._arrays = tree_map(lambda array: np.delete(array, position, axis=0), self._arrays)
            self._owned = True
            self._num -= 1
        self.lookback -= position < self.lookback
        return item

    def __add__(self, other: object) -> InfiniteLookbackBuffer:
        """Return a new buffer with this one's items (including the lookback part) and the other's (without it)."""
        total = copy.copy(self)
        total.extend(other)
        return total

    # -- state ----------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the items and the number of those in the lookback part, without the space."""
        return {"data": copy.deepcopy(self.data), "lookback": self.lookback}

    @classmethod
    def from_state(cls, state: dict[str, Any], space: gym.Space[Any] | None = None) -> Self:
        """Return the buffer of a state from `get_state`."""
        return cls(state["data"], state["lookback"], space)

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "lookback": self.lookback, "space": self.space}

    def __setstate__(self, state: dict[str, Any]) -> None:
        InfiniteLookbackBuffer.__init__(self, **state)

    def __copy__(self) -> InfiniteLookbackBuffer:
        return self._part(0, self.len_incl_lookback(), self.lookback)


def _full(shape: tuple[int, ...], fill: object, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array filled with one value. String columns are widened to a longer value."""
    if dtype.hasobject:
        return object_array([fill] * math.prod(shape)).reshape(shape)
    return np.full(
        shape, fill, np.result_type(dtype, np.array(str(fill)).dtype) if dtype.kind == "U" else dtype
    )


def _as_slice(positions: range) -> slice:
    return slice(positions.start, positions.stop if positions.stop >= 0 else None, positions.step)


def _as_index(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(
            f"expected an index that is None, an int, a list of ints or a slice, got {type(index).__name__} "
            f"{index!r}."
        ) from None


def _as_column(leaf: object) -> np.ndarray:
    """Convert given items to ``[num_items, ...]``. Items of dtype object have no further dimensions."""
    array = np.asarray(leaf)
    return object_array(list(array)) if array.dtype.hasobject and array.ndim > 1 else array


def _as_objects(leaf: Any, lead: tuple[int, ...]) -> np.ndarray:
    """Convert one leaf (no ``lead``) or several ``[*lead]`` of any kind to an array of dtype object."""
    return object_array(leaf) if lead else object_array([leaf]).reshape(())


def _stacked(batch: object) -> object:
    return tree_stack(batch, objects=True) if isinstance(batch, list) else tree_map(_as_column, batch)


def _as_array(leaf: object) -> np.ndarray:
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise ValueError(
            f"expected numbers, strings or arrays of them, got {type(leaf).__name__} {leaf!r:.80}, which is "
            "none to numpy (dtype object)."
        )
    return array


def same_items(left: object, right: object) -> bool:
    """Return whether two items or batches of items have equal structure, shapes and values (NaN == NaN)."""
    if type(left) is list and type(right) is list:
        return len(left) == len(right) and all(map(same_items, left, right))
    if left is right:
        return True
    if is_nested(left) or is_nested(right):
        try:
            check_same_structure(left, right)
        except (ValueError, TypeError):
            return False
        return all(map(same_items, tree_leaves(left), tree_leaves(right)))
    try:
        a, b = np.asarray(left), np.asarray(right)
    except ValueError:
        return bool(left == right)
    if a.shape != b.shape:
        return False
    if a.dtype.hasobject or b.dtype.hasobject:
        return all(x is y or bool(np.all(x == y)) for x, y in zip(a.flat, b.flat, strict=True))
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")


def _wide_enough(dtype: np.dtype[Any], new: np.ndarray) -> np.dtype[Any]:
    """Return a column's dtype, or a wider one if it cannot hold new values without a change of their kind."""
    if new.dtype.kind in "iu" and dtype.kind in "iu":
        info = np.iinfo(dtype)
        fits = new.size == 0 or bool(info.min <= new.min() and new.max() <= info.max)
    else:
        fits = np.can_cast(new.dtype, dtype, "safe" if dtype.kind in "SU" else "same_kind")
    return dtype if fits else np.result_type(dtype, new.dtype)
