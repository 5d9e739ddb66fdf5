"""Processes from outside that registered and have not worked yet: so many are remembered, and no more.

Whoever holds a key may say HELLO under ever new names. What a runner has delivered is remembered for long; of one
that has delivered nothing nothing is lost, so the broker forgets it first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Newcomer", "Newcomers"]

# More than a host has runners; a record takes about 1 kB.
_MAX_PER_ORIGIN = 1024
_MAX_IN_ALL = 4096


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A process by what the broker knows it by."""

    role: str
    name: str
    uuid: str
    incarnation: int


class Newcomers:
    """By origin: a key's role and an address."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, Newcomer]] = {}
        self._origins: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def add(
        self, origin: str, newcomer: Newcomer, is_connected: Callable[[Newcomer], bool]
    ) -> Newcomer | None:
        """Remember one.

        Returns:
            Another that is to be forgotten for it: of the origin that has too many, else the most; first who is
            not connected any more, then who came first.
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
        """It is none any more; or never was one."""
        origin = self._origins.pop(uuid, None)
        if origin is not None:
            del self._of[origin][uuid]
            if not self._of[origin]:
                del self._of[origin]
