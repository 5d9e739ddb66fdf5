"""InfiniteLookbackBuffer: one column of an episode with a lookback part in front, and its indexing."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.core.plain import NotPlainError, from_plain, to_plain
from rlzmq.core.tree import object_array, one_hot, space_filler, tree_leaves, tree_map, value_kind
from rlzmq.episodes.column_store import ColumnStore, same_items
from rlzmq.episodes.lookback_index import index_list, resolve_int, resolve_slice

__all__ = ["InfiniteLookbackBuffer"]


class InfiniteLookbackBuffer(ColumnStore):
    """A growing sequence with a lookback part in front, stored as a list or as a tree of arrays.

    Index 0 is the first item after the lookback part, and ``len`` counts from there. Negative indices count from the
    end and may reach into the lookback part. With ``neg_index_as_lookback=True`` they count backwards from the first
    item after it.

    A buffer on arrays may be a view of shared memory (`EpisodeBatch`). Reading never copies. The first write copies
    this buffer's items, so that writes have no effect elsewhere.

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

    __slots__ = ("lookback",)

    # For buffers with opaque items (infos), the filler is the fill value itself.
    _opaque = False

    def __init__(self, data: Any = None, lookback: int = 0, space: gym.Space[Any] | None = None) -> None:
        if isinstance(data, InfiniteLookbackBuffer):
            data._shared = True
            data = data.data
        self.lookback: int = min(operator.index(lookback), self._hold(data))
        if self.lookback < 0:
            raise ValueError(f"expected a lookback of at least 0, got {lookback}.")
        self.space = space

    @classmethod
    def _of_list(
        cls, items: list[Any], lookback: int, space: gym.Space[Any] | None
    ) -> InfiniteLookbackBuffer:
        """Return a buffer that uses the list ``items`` without copying it."""
        self = cls.__new__(cls)
        self._items = items
        self._arrays = None
        self._num = 0
        self._owned = False
        self._shared = False
        self.lookback = lookback
        self.space = space
        return self

    @classmethod
    def _of_view(
        cls, arrays: Any, num: int, lookback: int, space: gym.Space[Any] | None
    ) -> InfiniteLookbackBuffer:
        """Return a buffer that is a view of ``arrays`` (``num`` items each) and copies them before a write."""
        self = cls.__new__(cls)
        self._items = None
        self._arrays = arrays
        self._num = num
        self._owned = False
        self._shared = True
        self.lookback = lookback
        self.space = space
        return self

    def _part(self, begin: int, end: int, lookback: int) -> InfiniteLookbackBuffer:
        """Return the items at absolute positions ``begin…end-1`` as a new buffer that shares the arrays."""
        if self._items is not None:
            return self._of_list(self._items[begin:end], lookback, self.space)
        self._shared = True
        if isinstance(self._arrays, np.ndarray):
            arrays = self._arrays[begin:end]
        else:
            arrays = tree_map(lambda array: array[begin:end], self._arrays)
        return self._of_view(arrays, end - begin, lookback, self.space)

    # -- facts ----------------------------------------------------------------------------------------

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

    def _after_lookback(self) -> Any:
        lookback, num = self.lookback, self._num
        if self._items is not None:
            return self._items[lookback:]
        if isinstance(self._arrays, np.ndarray):
            return self._arrays[lookback:num]
        return tree_map(lambda array: array[lookback:num], self._arrays)

    # -- reading --------------------------------------------------------------------------------------

    def get(
        self,
        indices: int | slice | Sequence[int] | None = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
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
        if items is not None and type(indices) is int and not one_hot_discrete:
            position = indices + (self.lookback if indices >= 0 or neg_index_as_lookback else len(items))
            if 0 <= position < len(items):
                return items[position]
        if one_hot_discrete and self.space is None:
            raise ValueError("one_hot_discrete=True needs the column's space, which is None.")
        if type(indices) is int:
            return self._get_int(indices, neg_index_as_lookback, fill, one_hot_discrete)
        if indices is None:
            if not one_hot_discrete:
                return self._after_lookback()
            indices = slice(None)
        if isinstance(indices, slice):
            return self._get_slice(indices, neg_index_as_lookback, fill, one_hot_discrete)
        listed = index_list(indices)
        if listed is not None:
            return self._get_list(listed, neg_index_as_lookback, fill, one_hot_discrete)
        return self._get_int(_as_index(indices), neg_index_as_lookback, fill, one_hot_discrete)

    def __getitem__(self, indices: int | slice | Sequence[int]) -> Any:
        return self.get(indices)

    def _get_int(self, index: int, neg: bool, fill: Any, hot: bool) -> Any:
        total = self.len_incl_lookback()
        position = resolve_int(index, self.lookback, total, neg)
        if 0 <= position < total:
            item = self._at(position)
            return one_hot(self.space, item) if hot and self.space is not None else item
        if fill is None:
            raise self._no_such_item(index, neg)
        return self._filler(fill, hot)

    def _get_list(self, listed: list[int], neg: bool, fill: Any, hot: bool) -> Any:
        total, lookback = self.len_incl_lookback(), self.lookback
        positions = [resolve_int(index, lookback, total, neg) for index in listed]
        missing = [i for i, position in enumerate(positions) if not 0 <= position < total]
        if missing and fill is None:
            raise self._no_such_item(listed[missing[0]], neg)
        if self._items is not None:
            return [self._get_int(index, neg, fill, hot) for index in listed]
        if not missing:
            chosen = tree_map(lambda array: array[positions], self._arrays)
            return one_hot(self.space, chosen) if hot and self.space is not None else chosen
        existing = np.array([0 <= position < total for position in positions], bool)
        kept = np.array(positions, np.int64)[existing]
        found = tree_map(lambda array: array[kept], self._arrays)
        if hot and self.space is not None:
            found = one_hot(self.space, found)
        return tree_map(lambda part: _spread(part, len(positions), existing, fill), found)

    def _get_slice(self, slice_: slice, neg: bool, fill: Any, hot: bool) -> Any:
        total = self.len_incl_lookback()
        span = resolve_slice(slice_, self.lookback, total, neg, fill=fill is not None)
        space = self.space if hot else None
        if self._items is not None:
            items = self._items[span.existing]
            if space is not None:
                items = [one_hot(space, item) for item in items]
            if span.num_left or span.num_right:
                left = [self._filler(fill, hot) for _ in range(span.num_left)]
                right = [self._filler(fill, hot) for _ in range(span.num_right)]
                items = left + items + right
            return items
        existing = span.existing
        if isinstance(self._arrays, np.ndarray):
            found = self._arrays[existing]
        else:
            found = tree_map(lambda array: array[existing], self._arrays)
        if space is not None:
            found = one_hot(space, found)
        if not span.num_left and not span.num_right:
            return found
        size = span.num_left + span.num_existing + span.num_right
        inner = slice(span.num_left, span.num_left + span.num_existing)
        return tree_map(lambda part: _spread(part, size, inner, fill), found)

    def _filler(self, fill: Any, hot: bool) -> Any:
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

    def _no_such_item(self, index: int, neg: bool) -> IndexError:
        if neg:
            low = -self.lookback
        else:
            low = -self.len_incl_lookback()
        return IndexError(
            f"index {index} is out of range: expected {low}…{len(self) - 1} (length {len(self)}, lookback "
            f"{self.lookback}{', neg_index_as_lookback' if neg else ''}); fill= gives a value for what is "
            "not there."
        )

    # -- writing --------------------------------------------------------------------------------------

    def set(
        self,
        new_data: Any,
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
        if at_indices is None:
            at_indices = slice(None)
        total, lookback = self.len_incl_lookback(), self.lookback
        if isinstance(at_indices, slice):
            span = resolve_slice(at_indices, lookback, total, neg_index_as_lookback)
            self._write(span.existing, new_data, span.num_existing)
            return
        listed = index_list(at_indices)
        if listed is None:
            index = _as_index(at_indices)
            position = resolve_int(index, lookback, total, neg_index_as_lookback)
            if not 0 <= position < total:
                raise self._no_such_item(index, neg_index_as_lookback)
            if self._items is not None:
                self._items[position] = new_data
            else:
                self._write_arrays(position, new_data, ())
            return
        positions = []
        for index in listed:
            position = resolve_int(index, lookback, total, neg_index_as_lookback)
            if not 0 <= position < total:
                raise self._no_such_item(index, neg_index_as_lookback)
            positions.append(position)
        self._write(positions, new_data, len(positions))

    def __setitem__(self, indices: int | slice | Sequence[int], new_data: Any) -> None:
        self.set(new_data, at_indices=indices)

    # -- growing and shrinking ------------------------------------------------------------------------

    def concat(self, other: InfiniteLookbackBuffer) -> None:
        """Append the other buffer's items, without its lookback part."""
        self.extend(other.get())

    def pop(self, index: int = -1) -> Any:
        """Remove one item and return it (``index`` as in `get`).

        Raises:
            IndexError: There is no such item.
        """
        total = self.len_incl_lookback()
        position = resolve_int(_as_index(index), self.lookback, total, False)
        if not 0 <= position < total:
            raise self._no_such_item(index, False)
        item = self._at(position)
        if self._items is not None:
            del self._items[position]
        elif position == total - 1:
            item = copy.deepcopy(item)
            self._truncate(position)
        else:
            self._arrays = tree_map(lambda array: np.delete(array[:total], position, axis=0), self._arrays)
            self._owned, self._shared = True, False
            self._num -= 1
        self.lookback -= position < self.lookback
        return item

    def __add__(self, other: Any) -> InfiniteLookbackBuffer:
        """Return a new buffer with this one's items (including the lookback part) and the other's (without it)."""
        total = copy.copy(self)
        total.extend(other)
        return total

    # -- state ----------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the buffer as plain values, which msgpack can pack. The space is not included.

        Items without a plain form (instances of any class) are included unchanged, under ``"objects"`` instead of
        ``"data"``. Such a state can be copied and pickled, but not packed.
        """
        state = {"finalized": self.finalized, "lookback": self.lookback}
        try:
            return {**state, "data": to_plain(self.data, "data")}
        except NotPlainError:
            return {**state, "objects": tree_map(copy.copy, self.data)}

    @staticmethod
    def from_state(state: dict[str, Any], space: gym.Space[Any] | None = None) -> InfiniteLookbackBuffer:
        """Return the buffer of a state from `get_state`.

        Raises:
            ValueError: The state does not come from `get_state`.
        """
        data = state["objects"] if "objects" in state else from_plain(state["data"])
        if state["finalized"] == isinstance(data, list):
            raise ValueError(
                f"expected {'arrays' if state['finalized'] else 'a list'}, got {type(data).__name__}."
            )
        return InfiniteLookbackBuffer(data, state["lookback"], space)

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "lookback": self.lookback, "space": self.space}

    def __setstate__(self, state: dict[str, Any]) -> None:
        InfiniteLookbackBuffer.__init__(self, **state)

    def __copy__(self) -> InfiniteLookbackBuffer:
        return self._part(0, self.len_incl_lookback(), self.lookback)


def _full(shape: tuple[int, ...], fill: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array filled with one value. String columns are widened to a longer value."""
    if dtype.hasobject:
        return object_array([fill] * math.prod(shape)).reshape(shape)
    return np.full(
        shape, fill, np.result_type(dtype, np.array(str(fill)).dtype) if dtype.kind == "U" else dtype
    )


def _as_index(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(
            f"expected an index that is None, an int, a list of ints or a slice, got {type(index).__name__} "
            f"{index!r}."
        ) from None


def _spread(found: np.ndarray, size: int, where: Any, fill: Any) -> np.ndarray:
    """Return ``found`` at ``where`` in an array of ``size`` items, with ``fill`` everywhere else."""
    spread = _full((size, *found.shape[1:]), fill, found.dtype)
    spread[where] = found
    return spread
