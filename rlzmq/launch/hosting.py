"""Roles as calls of a function, for engines whose tasks these are (Ray, Dask): each call is the host of one process.

The engine places a call, and repeats it when it fails or loses its node.
"""

from __future__ import annotations

import secrets
import tomllib
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter

from rlzmq.core.errors import ConfigurationError
from rlzmq.launch.engine import Role
from rlzmq.launch.host import Hosted

__all__ = ["Hosting", "memory_bytes"]


def memory_bytes(role: Role) -> int:
    """Return the memory of each process; 0: it is not said."""
    return int(TypeAdapter(ByteSize).validate_python(role.memory or 0))


class Hosting(Hosted):
    """What such engines have in common. Handles are what the names of the calls begin with."""

    @abstractmethod
    def call(self, role: Role, name: str, call: str, options: dict[str, Any]) -> None:
        """Hand a call of `host` to the engine, which repeats it without end when it fails or is lost."""

    @abstractmethod
    def calls(self) -> Collection[str]:
        """Return the names of all calls that wait or run."""

    @abstractmethod
    def cancel(self, call: str) -> None:
        """Take a call back if it has not begun."""

    @abstractmethod
    def seen_by(self, path: Path) -> Mapping[str, bool]:
        """Return for each node whether this file is there."""

    @property
    def _prefix(self) -> str:
        return self.jobs.handles["head"].removesuffix("head")

    def submit(self, role: Role, places: Sequence[int]) -> str:
        """Submit the calls of a role."""
        if unknown := [key for key in ("time", "image", "hosts") if getattr(role, key)]:
            raise ConfigurationError(
                f"[{role.name}] {unknown[0]}: --on {self.jobs.on} has no such thing. Remove it."
            )
        try:
            options = tomllib.loads("\n".join(role.options))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"[{role.name}] options: expected 'name = value': {error}") from error
        if role.name == "head":
            self.jobs.handles["head"] = head = f"rlzmq-{self.jobs.name}-{secrets.token_hex(3)}-head"
            mark = role.key.with_name(head)
            mark.touch()
            if unseen := [node for node, sees in self.seen_by(mark).items() if not sees]:
                raise ConfigurationError(
                    f"{mark.parent} is another directory on {', '.join(unseen)}, or none: name a --run-dir that this "
                    "machine and all nodes share."
                )
        for name in (self.name(role, place) for place in places):
            self.call(role, name, self._prefix + name, options)
        return self._prefix + role.name

    def living(self, role: Role) -> set[int]:
        """Return the places of the calls."""
        return self.places(role, (call.removeprefix(self._prefix) for call in self.calls()))

    def withdraw(self, role: Role, places: Collection[int]) -> None:
        """Take back calls that have not begun."""
        for call in {self._prefix + self.name(role, place) for place in places}.intersection(self.calls()):
            self.cancel(call)
