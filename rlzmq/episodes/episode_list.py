"""EpisodeList: list interface of batches whose episodes are created on access."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Self, SupportsIndex, TypeVar, overload

import numpy as np

__all__ = ["EpisodeList"]

E = TypeVar("E")


class EpisodeList(list[E]):
    """Base class of column-based batches: a list whose episodes are created on access.

    Indexing, iteration, ``len``, ``+``, ``==``, ``in``, ``list(batch)``, ``[*batch]``, ``other.extend(batch)``,
    ``sorted``, copies and pickles work on the episodes. Reading keeps the batch on its columns. A change of the list
    itself (`append`, `sort`, ``del batch[0]``, …) turns it into an ordinary list of its episodes. It gets new columns
    when `updated` is called, e.g. before the batch is sent, split or learned from.

    The underlying list is empty until then, or until the batch is the right operand of ``+``. C code that accesses a
    list's memory directly therefore sees no items. In the standard library these are only `operator.concat` and
    `heapq`. Pass ``list(batch)`` to them.
    """

    __slots__ = ("_is_ordinary",)

    meta: dict[str, Any]
    env_index: Any
    _is_ordinary: bool
    _tracked: dict[int, E]

    @classmethod
    @abc.abstractmethod
    def from_episodes(cls, episodes: Iterable[E]) -> Self:
        """Return a batch of episodes' chunks, copied into new columns."""

    @abc.abstractmethod
    def select(self, chunks: Any) -> Self:
        """Return some of the chunks, in the given order, on the same columns."""

    @abc.abstractmethod
    def slice_steps(self, begin: int, end: int) -> Self:
        """Return the env steps ``begin … end-1``, counted over all chunks in order, on the same columns."""

    @abc.abstractmethod
    def new_item(self, position: int) -> E:
        """Return one chunk as a new episode, whose changes this batch ignores."""

    @property
    @abc.abstractmethod
    def num_env_steps(self) -> int:
        """Number of env steps in all chunks, without lookback."""

    @staticmethod
    @abc.abstractmethod
    def _is_changed(episode: Any) -> bool:
        """Return whether an item differs from the batch's columns and tables."""

    @abc.abstractmethod
    def _num_chunks(self) -> int:
        """Return the number of chunks on the columns."""

    @abc.abstractmethod
    def _items(self) -> Iterator[E]:
        """Iterate over all chunks; each is always the same episode."""

    @abc.abstractmethod
    def _fields(self) -> dict[str, Any]:
        """Return all attributes except the created episodes."""

    # -- the episodes ---------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: SupportsIndex) -> E: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: SupportsIndex | slice) -> E | Self:
        if isinstance(index, slice):
            return self.select(np.arange(len(self), dtype=np.int64)[index])
        return list.__getitem__(self, index) if self._is_ordinary else self._item(range(len(self))[index])

    def _item(self, position: int) -> E:
        """Return the chunk at an index from 0; always the same episode for the same index."""
        episode = self._tracked.get(position)
        if episode is None:
            episode = self._tracked[position] = self.new_item(position)
        return episode

    def updated(self) -> Self:
        """Return this batch or, if the list or an item was changed, a new one with the changes.

        Raises:
            ValueError: The items do not fit together; see `from_episodes`.
        """
        if self._is_ordinary:
            batch = self.from_episodes(self)
        else:
            tracked = self._tracked
            if not any(map(self._is_changed, tracked.values())):
                return self
            batch = self.from_episodes(
                tracked[i] if i in tracked else self.new_item(i) for i in range(len(self))
            )
            batch.env_index = self.env_index
        batch.meta = self.meta
        return batch

    def split(self, num_steps: int) -> tuple[Self, Self]:
        """Return the first `num_steps` env steps and the rest, both on the same columns.

        Raises:
            ValueError: There are fewer steps, or `num_steps` is negative.
        """
        batch = self.updated()
        total = batch.num_env_steps
        if num_steps == total:
            return batch[:], batch[len(batch) :]
        return batch.slice_steps(0, num_steps), batch.slice_steps(num_steps, total)

    # -- the list -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of chunks."""
        return list.__len__(self) if self._is_ordinary else self._num_chunks()

    def __iter__(self) -> Iterator[E]:
        return list.__iter__(self) if self._is_ordinary else self._items()

    def __radd__(self, other: Any) -> Any:
        """Fill the underlying list, so that a list on the left of ``+`` or ``+=`` can read it."""
        if not self._is_ordinary:
            list.__setitem__(self, slice(None), list(self))
        return NotImplemented

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        """Return the episodes of both as a list."""
        return [*self, *other]

    def __iadd__(self, other: Iterable[E]) -> Self:  # type: ignore[misc, override]
        self.extend(other)
        return self

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list) and list(self) == list(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        batch = self.updated()
        return _restored, (type(batch), batch._fields())


def _as_lists(values: Iterable[Any]) -> list[Any]:
    """Return the arguments of a list's method in C, which sees no items of a batch that is not an ordinary list."""
    return [list(value) if isinstance(value, EpisodeList) else value for value in values]


def _reading(method: Any) -> Any:
    """Return a method of `list` for batches: it reads a list of their episodes."""

    @functools.wraps(method)
    def read(self: EpisodeList[Any], *args: Any) -> Any:
        return method(list(self), *_as_lists(args))

    return read


def _changing(method: Any) -> Any:
    """Return a method of `list` for batches: it first makes them ordinary lists of their episodes."""

    @functools.wraps(method)
    def change(self: EpisodeList[Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_ordinary:
            episodes = list(self)
            self._is_ordinary = True
            list.__setitem__(self, slice(None), episodes)
        return method(self, *_as_lists(args), **kwargs)

    return change


_READING = ("__reversed__", "__contains__", "index", "count", "copy", "__mul__", "__rmul__")
_COMPARING = ("__lt__", "__le__", "__gt__", "__ge__")
_CHANGING = ("append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort")
for _name in (*_READING, *_COMPARING):
    setattr(EpisodeList, _name, _reading(getattr(list, _name)))
for _name in (*_CHANGING, "__setitem__", "__delitem__", "__imul__"):
    setattr(EpisodeList, _name, _changing(getattr(list, _name)))


def _restored(kind: type[EpisodeList[Any]], fields: dict[str, Any]) -> Any:
    """Return a pickled or copied batch."""
    batch: Any = kind.__new__(kind)
    batch._is_ordinary = False
    batch._tracked = {}
    for name, value in fields.items():
        setattr(batch, name, value)
    return batch
