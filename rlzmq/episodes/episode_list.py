"""EpisodeList: list interface of batches whose episodes are created on access."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import Any, Self, SupportsIndex, TypeVar

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

    _is_ordinary: bool

    @abc.abstractmethod
    def updated(self) -> Self:
        """Return this batch or, if the list or its episodes have changed, a new one on new columns."""

    @abc.abstractmethod
    def _num_chunks(self) -> int:
        """Return the number of chunks on the columns."""

    @abc.abstractmethod
    def _item(self, position: int) -> E:
        """Return the chunk at an index from 0; always the same episode for the same index."""

    @abc.abstractmethod
    def _items(self) -> Iterator[E]:
        """Iterate over all chunks; each is always the same episode."""

    @abc.abstractmethod
    def _fields(self) -> dict[str, Any]:
        """Return all attributes except the created episodes."""

    # -- reading --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of chunks."""
        return list.__len__(self) if self._is_ordinary else self._num_chunks()

    def __iter__(self) -> Iterator[E]:
        return list.__iter__(self) if self._is_ordinary else self._items()

    def __reversed__(self) -> Iterator[E]:
        return reversed(list(self))

    def __contains__(self, episode: object) -> bool:
        return episode in list(self)

    def index(self, episode: E, *bounds: SupportsIndex) -> int:
        """Implement `list`'s method."""
        return list(self).index(episode, *bounds)

    def count(self, episode: E) -> int:
        """Implement `list`'s method."""
        return list(self).count(episode)

    def copy(self) -> list[E]:
        """Return the episodes in an ordinary list."""
        return list(self)

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        """Return the episodes of both as a list."""
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        """Fill the underlying list, so that a list on the left of ``+`` or ``+=`` can read it."""
        if not self._is_ordinary:
            list.__setitem__(self, slice(None), list(self))
        return NotImplemented

    def __mul__(self, number: SupportsIndex) -> list[E]:
        return list(self) * number

    def __rmul__(self, number: SupportsIndex) -> list[E]:
        return list(self) * number

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list) and list(self) == list(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: list[E]) -> bool:
        return list(self) < list(other)

    def __le__(self, other: list[E]) -> bool:
        return list(self) <= list(other)

    def __gt__(self, other: list[E]) -> bool:
        return list(self) > list(other)

    def __ge__(self, other: list[E]) -> bool:
        return list(self) >= list(other)

    __hash__ = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        batch = self.updated()
        return _restored, (type(batch), batch._fields())

    # -- changing -------------------------------------------------------------------------------------

    def _become_ordinary(self) -> None:
        if not self._is_ordinary:
            episodes = list(self)
            self._is_ordinary = True
            list.__setitem__(self, slice(None), episodes)

    def append(self, episode: E) -> None:
        """Implement `list`'s method."""
        self._become_ordinary()
        list.append(self, episode)

    def extend(self, episodes: Iterable[E]) -> None:
        """Implement `list`'s method."""
        self._become_ordinary()
        list.extend(self, list(episodes))

    def insert(self, position: SupportsIndex, episode: E) -> None:
        """Implement `list`'s method."""
        self._become_ordinary()
        list.insert(self, position, episode)

    def pop(self, position: SupportsIndex = -1) -> E:
        """Implement `list`'s method."""
        self._become_ordinary()
        return list.pop(self, position)

    def remove(self, episode: E) -> None:
        """Implement `list`'s method."""
        self._become_ordinary()
        list.remove(self, episode)

    def clear(self) -> None:
        """Implement `list`'s method."""
        self._become_ordinary()
        list.clear(self)

    def reverse(self) -> None:
        """Implement `list`'s method."""
        self._become_ordinary()
        list.reverse(self)

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """Implement `list`'s method."""
        self._become_ordinary()
        list.sort(self, key=key, reverse=reverse)

    def __setitem__(self, where: Any, new: Any) -> None:
        self._become_ordinary()
        list.__setitem__(self, where, new)

    def __delitem__(self, where: SupportsIndex | slice) -> None:
        self._become_ordinary()
        list.__delitem__(self, where)

    def __iadd__(self, other: Iterable[E]) -> Self:  # type: ignore[misc, override]
        self.extend(other)
        return self

    def __imul__(self, number: SupportsIndex) -> Self:
        self._become_ordinary()
        list.__imul__(self, number)
        return self


def _restored(kind: type[EpisodeList[Any]], fields: dict[str, Any]) -> Any:
    """Return a pickled or copied batch."""
    batch: Any = kind.__new__(kind)
    batch._is_ordinary = False
    batch._tracked = {}
    for name, value in fields.items():
        setattr(batch, name, value)
    return batch
