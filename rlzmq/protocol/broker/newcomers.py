"""Newcomers: a bounded memory of external processes that have registered but not delivered anything yet.

The holder of a key may send HELLO with any number of names. Records of runners that delivered are kept for long. Those
of other runners can be forgotten without loss, so they are removed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Newcomer", "Newcomers"]

# More than the runners of one host. A record takes about 1 kB.
_MAX_PER_ORIGIN = 1024
_MAX_IN_ALL = 4096


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The identity of a registered process."""

    role: str
    name: str
    uuid: str
    incarnation: int


class Newcomers:
    """Newcomers by origin: the role of the key, and the address."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, Newcomer]] = {}
        self._origins: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def add(
        self, origin: str, newcomer: Newcomer, is_connected: Callable[[Newcomer], bool]
    ) -> Newcomer | None:
        """Add a newcomer.

        Returns:
            A newcomer to forget if there are too many: from this origin if it has too many, else from the origin with
            the most; disconnected ones first, then the oldest.
        """
        self.worked(newcomer.uuid)
        known = self._of.setdefault(origin, OrderedDict())
        known[newcomer.uuid] = newcomer
        self._origins[newcomer.uuid] = origin
        if len(known) > _MAX_PER_ORIGIN:
            crowd = known
        elif len(self) > _MAX_IN_ALL:
            crowd = max(self._of.values(), key=len)
        else:
            return None
        others = (other for other in crowd.values() if other is not newcomer)
        first = next(others, None)
        if first is None:
            return None
        leaving = (
            first if not is_connected(first) else next(filter(lambda o: not is_connected(o), others), first)
        )
        self.worked(leaving.uuid)
        return leaving

    def worked(self, uuid: str) -> None:
        """Remove a process that has worked. No effect if it is not a newcomer."""
        origin = self._origins.pop(uuid, None)
        if origin is not None:
            del self._of[origin][uuid]
            if not self._of[origin]:
                del self._of[origin]
