"""ColumnStore: storage of one column's items, as a list or as arrays that may be shared until the first write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.core.tree import (
    check_same_structure,
    is_nested,
    num_items,
    object_array,
    space_filler,
    tree_leaves,
    tree_map,
    tree_stack,
    tree_unstack,
    value_kind,
)

__all__ = ["ColumnStore", "same_items"]


class ColumnStore:
    """Base class of `InfiniteLookbackBuffer`: items in a list, or in a tree of arrays ``[num_items, ...]``.

    Arrays are written to in place only if nobody else reads them. They are *owned* if no other store writes to the same
    memory, and *shared* if others read the current items. Appending after shared items is possible in place. Before a
    change of shared items, this store copies its items. Arrays grow by doubling.

    Attributes:
        space: The space of one item, or None. It defines the shape of empty arrays.
    """

    __slots__ = ("_arrays", "_items", "_num", "_owned", "_shared", "space")

    _items: list[Any] | None
    _arrays: Any
    _num: int
    _owned: bool
    _shared: bool
    space: gym.Space[Any] | None

    def _hold(self, data: Any) -> int:
        """Store ``data`` (see `InfiniteLookbackBuffer`). Lists are copied; arrays are copied only before a write.

        Returns:
            The number of items.
        """
        self._items = None
        self._arrays = None
        self._num = 0
        self._owned = False
        self._shared = False
        if data is None:
            self._items = []
            return 0
        # A tuple of items without a first dimension is not a tree of arrays.
        is_tree = isinstance(data, dict) or (isinstance(data, tuple) and any(map(np.ndim, tree_leaves(data))))
        if is_tree or isinstance(data, np.ndarray):
            self._arrays = tree_map(_as_column, data)
            self._num = num_items(self._arrays)
            return self._num
        self._items = list(data)
        return len(self._items)

    # -- reading --------------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """All items, including the lookback part: the list itself, or arrays (views) ``[num_items, ...]``."""
        if self._items is not None:
            return self._items
        num = self._num
        if isinstance(self._arrays, np.ndarray):
            return self._arrays if len(self._arrays) == num else self._arrays[:num]
        return tree_map(lambda array: array[:num], self._arrays)

    @property
    def finalized(self) -> bool:
        """Whether the items are stored as arrays."""
        return self._items is None

    def _at(self, position: int) -> Any:
        if self._items is not None:
            return self._items[position]
        if isinstance(self._arrays, np.ndarray):
            return self._arrays[position]
        return tree_map(lambda array: array[position], self._arrays)

    def _after_lookback(self) -> Any:
        """Return the items to append when this store is added to another one."""
        return self.data

    def _truncate(self, num: int) -> None:
        """Drop all but the first ``num`` items (including the lookback part)."""
        if self._items is not None:
            del self._items[num:]
        elif num < self._num:
            self._num = num
            self._owned = self._owned and not self._shared

    # -- growing and shrinking ------------------------------------------------------------------------

    def append(self, item: Any) -> None:
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
        new = self._fitted(item, ())
        self._own(new, 1)

        def write(array: np.ndarray, leaf: np.ndarray) -> None:
            array[self._num] = leaf[()]

        tree_map(write, self._arrays, new)
        self._num += 1

    def extend(self, items: Any) -> None:
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
        new = self._fitted(batch, (num,))
        self._own(new, num)
        begin, end = self._num, self._num + num

        def write(array: np.ndarray, leaf: np.ndarray) -> None:
            array[begin:end] = leaf

        tree_map(write, self._arrays, new)
        self._num = end

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
        self._owned, self._shared = True, False

    # -- overwriting ----------------------------------------------------------------------------------

    def _as_batch(self, new_data: Any) -> Any:
        """Return new items as a list of items or as a tree of arrays."""
        if isinstance(new_data, ColumnStore):
            return new_data._after_lookback()
        if isinstance(new_data, tuple) and not isinstance(self._structure(), tuple):
            return list(new_data)
        if isinstance(new_data, (dict, tuple)):
            return tree_map(np.asarray, new_data)
        if isinstance(new_data, (list, np.ndarray)):
            return new_data
        return list(new_data) if isinstance(new_data, Iterator) else np.asarray(new_data)

    def _structure(self) -> Any:
        if self._items is None:
            return self._arrays
        return self._items[-1] if self._items else None

    def _write(self, where: slice | list[int], new_data: Any, num: int) -> None:
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
                self._owned, self._shared = True, False
            else:
                self._write_arrays(where, batch, (num,))
            return
        items = batch if isinstance(batch, list) else tree_unstack(batch)
        if isinstance(where, slice):
            self._items[where] = items
        else:
            for position, item in zip(where, items, strict=True):
                self._items[position] = item

    def _write_arrays(self, where: Any, new_data: Any, lead: tuple[int, ...]) -> None:
        """Write ``new_data`` (leaves ``[*lead, ...]``) at ``where``; widen a column's dtype if needed."""
        fitted = self._fitted(new_data, lead)
        self._own(fitted)

        def write(array: np.ndarray, new: np.ndarray) -> None:
            array[where] = new[()]  # store the object inside a 0-d array, not the array

        tree_map(write, self._arrays, fitted)

    def _has_structure_of(self, new_data: Any, lead: tuple[int, ...]) -> bool:
        try:
            self._fitted(new_data, lead)
        except (ValueError, TypeError):
            return False
        return True

    def _fitted(self, new_data: Any, lead: tuple[int, ...]) -> Any:
        """Convert one item (no ``lead``) or several to arrays ``[*lead, ...]`` of this column's form.

        Raises:
            ValueError: The structure, a shape or a kind differs from the column's.
        """
        arrays = self._arrays
        if isinstance(arrays, np.ndarray) and arrays.dtype.hasobject:
            return _as_objects(new_data, lead)
        if lead and isinstance(new_data, list):
            new_data = tree_stack(new_data, objects=True)
        check_same_structure(arrays, new_data)

        def fit(array: np.ndarray, leaf: Any) -> np.ndarray:
            return _as_objects(leaf, lead) if array.dtype.hasobject else _as_array(leaf)

        fitted = tree_map(fit, arrays, new_data)
        self._check_items(fitted, lead)
        return fitted

    def _check_items(self, new_data: Any, lead: tuple[int, ...]) -> None:
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

    def _own(self, new_data: Any, num_free: int = 0) -> None:
        """Copy the arrays, with a dtype wide enough for ``new_data`` and room for more items."""
        num = self._num
        # Nobody else sees the items after the shared ones.
        keep = self._owned and (num_free > 0 or not self._shared)

        def own(array: np.ndarray, new: np.ndarray) -> np.ndarray:
            dtype = array.dtype
            if new.dtype != dtype and not _fits(new, dtype):
                dtype = np.result_type(dtype, new.dtype)
            if keep and dtype == array.dtype and len(array) >= num + num_free:
                return array
            capacity = num + num_free if num_free == 0 else max(16, 2 * (num + num_free))
            owned = np.empty((capacity, *array.shape[1:]), dtype)
            owned[:num] = array[:num]
            return owned

        self._arrays = tree_map(own, self._arrays, new_data)
        if not keep:
            self._shared = False
        self._owned = True


def _as_column(leaf: Any) -> np.ndarray:
    """Convert given items to ``[num_items, ...]``. Items of dtype object have no further dimensions."""
    array = np.asarray(leaf)
    return object_array(list(array)) if array.dtype.hasobject and array.ndim > 1 else array


def _as_objects(leaf: Any, lead: tuple[int, ...]) -> np.ndarray:
    """Convert one leaf (no ``lead``) or several ``[*lead]`` of any kind to an array of dtype object."""
    return object_array(leaf) if lead else object_array([leaf]).reshape(())


def _stacked(batch: Any) -> Any:
    return tree_stack(batch, objects=True) if isinstance(batch, list) else tree_map(_as_column, batch)


def _as_array(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise ValueError(
            f"expected numbers, strings or arrays of them, got {type(leaf).__name__} {leaf!r:.80}, which is "
            "none to numpy (dtype object)."
        )
    return array


def same_items(left: Any, right: Any) -> bool:
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


def _fits(new: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Return whether values of ``new`` may be written into ``dtype`` without a change of their kind."""
    if new.dtype.kind in "iu" and dtype.kind in "iu":
        info = np.iinfo(dtype)
        return new.size == 0 or bool(info.min <= new.min() and new.max() <= info.max)
    return np.can_cast(new.dtype, dtype, "safe" if dtype.kind in "SU" else "same_kind")
