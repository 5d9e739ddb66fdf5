"""Roles as calls of a function, for engines whose tasks these are (Ray, Dask): each call is the host of one process.

The engine places a call, and repeats it when it fails or loses its node.
"""

from __future__ import annotations

import secrets
import time
import tomllib
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories
from rlzmq.launch.engine import Engine, Role
from rlzmq.launch.host import end, forget

__all__ = ["Hosting", "memory_bytes"]

_POLL_S = 1.0


def memory_bytes(role: Role) -> int:
    """Return the memory of each process; 0: it is not said."""
    return int(TypeAdapter(ByteSize).validate_python(role.resources.memory or 0))


class Hosting(Engine):
    """What such engines have in common. Handles are what the names of the calls begin with."""

    what: str

    @abstractmethod
    def _submit(self, role: Role, call: str, name: str, options: dict[str, Any]) -> None:
        """Hand a call of `host` to the engine, which repeats it without end when it fails or is lost."""

    @abstractmethod
    def _calls(self) -> Collection[str]:
        """Return the names of all calls that wait or run."""

    @abstractmethod
    def _cancel(self, call: str, *, is_late: bool) -> None:
        """Take a call back if it has not begun; if it is late, end it."""

    @abstractmethod
    def _seen_by(self, path: Path) -> Mapping[str, bool]:
        """Return for each node whether this file is there."""

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Submit the calls of a role."""
        asked, handles, jobs = role.resources, self.jobs.handles, role.key.parent
        if unknown := [key for key in ("time", "image", "hosts") if getattr(asked, key)]:
            raise ConfigurationError(f"[{role.name}] {unknown[0]}: {self.what} has no such thing. Remove it.")
        try:
            options = tomllib.loads("\n".join(asked.options))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"[{role.name}] options: expected 'name = value': {error}") from error
        if role.name == "head":
            handles["head"] = f"rlzmq-{self.jobs.name}-{secrets.token_hex(3)}-head"
            make_directories(jobs, mode=0o700)
            forget(jobs)
            (jobs / handles["head"]).touch()
            if unseen := [node for node, sees in self._seen_by(jobs / handles["head"]).items() if not sees]:
                raise ConfigurationError(
                    f"{jobs} is another directory on {', '.join(unseen)}, or none: name a --run-dir that this machine "
                    "and all nodes share."
                )
        handles[role.name] = f"{handles['head'].removesuffix('head')}{role.name}"
        for name in self._names(role, places or range(asked.count)):
            (jobs / f"{name}.end").unlink(missing_ok=True)
            self._submit(role, self._call(name), name, options)
        return handles[role.name]

    def living(self, role: Role) -> list[int]:
        """Return the places of the calls."""
        first = self.jobs.handles[role.name]
        return [int(call.removeprefix(first)[1:] or 0) for call in self._calls() if call.startswith(first)]

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """Ask hosts to end their processes."""
        deadline = time.monotonic() + grace_s
        names = self._names(role, places)
        for name in names:
            end(role.key.parent, name, grace_s)
        calls = {self._call(name) for name in names}
        while left := calls.intersection(self._calls()):
            for call in left:
                self._cancel(call, is_late=time.monotonic() > deadline)
            time.sleep(_POLL_S)

    def _names(self, role: Role, places: Collection[int]) -> list[str]:
        """Return the names of hosts."""
        return ["head" if role.name == "head" else f"{role.name}-{place}" for place in places]

    def _call(self, name: str) -> str:
        return f"{self.jobs.handles['head'].removesuffix('head')}{name}"
