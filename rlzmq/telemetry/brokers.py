"""Brokers of running runs: their addresses, and rates between two of their status reports."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.net.keys import JoinFile
from rlzmq.telemetry.runs import Run

__all__ = ["Rates", "broker_of_run", "find_broker"]

_SOCKET = "data"
_LOCK = "/owner.lock"


def find_broker(where: str) -> tuple[str, JoinFile | None]:
    """Return (data address, JoinFile or None) of a run.

    Args:
        where: A join file, a run directory, a run's private directory, ``ipc:///path`` of its data socket; "": the
            newest run of this user on this machine.

    Raises:
        ConfigurationError: No run was found.
    """
    if where.startswith("ipc://"):
        return where, None
    if where.startswith("tcp://"):
        raise ConfigurationError(f"{where}: TCP needs keys; give the run's join file instead")
    if where and Path(where).is_file():
        join = JoinFile.read(where)
        return join.addresses["data"], join
    if where and (Path(where) / "run.json").is_file():
        run = Run.open(where)
        address = broker_of_run(run) if run.state == "running" else None
        if address is None:
            why = "it has ended" if run.state == "ended" else "its driver runs elsewhere, or has no broker"
            raise ConfigurationError(f"{where}: no broker of this run is here ({why})")
        return address, None
    directories = [Path(where)] if where else _own_socket_directories()
    for directory in directories:
        if (directory / _SOCKET).is_socket():
            return f"ipc://{(directory / _SOCKET).absolute()}", None
    what = f"no run has its sockets in {where}" if where else "no run of this user is here"
    raise ConfigurationError(f"{what}: give a join file, a run or private directory, or ipc:///path/data")


def broker_of_run(run: Run) -> str | None:
    """Return the address of a running run's broker; None if it is on another machine, of another user, or missing.

    The run's driver holds a lock on the directory of its sockets.
    """
    pid = run.facts.get("pid")
    if not isinstance(pid, int) or run.facts.get("host") != platform.node():
        return None
    try:
        entries = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    for entry in entries:
        try:
            target = os.readlink(entry.path)
        except OSError:  # closed in the meantime
            continue
        if target.endswith(_LOCK) and (path := Path(target).with_name(_SOCKET)).is_socket():
            return f"ipc://{path}"
    return None


def _own_socket_directories() -> list[Path]:
    bases = {
        Path(base) for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp") if base
    }
    found = [path for base in bases for path in base.glob("rlzmq-*") if path.is_dir()]
    own = [path for path in found if path.stat().st_uid == os.getuid()]
    return sorted(own, key=lambda path: path.stat().st_mtime, reverse=True)


class Rates:
    """Env steps per second between two status reports, per runner and in total."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, int]] | None = None

    def update(self, status: Mapping[str, Any], now: float) -> dict[str, float]:
        """Return env steps/s since the last call by runner name; ``"sampled"`` and ``"trained"`` are the totals."""
        counts = {runner["name"]: int(runner["num_env_steps"]) for runner in status["runners"]}
        counts |= {name: int(status["accounting"][name]) for name in ("sampled", "trained")}
        before, self._before = self._before, (now, counts)
        if before is None:
            return {}
        seconds = max(now - before[0], 1e-9)
        return {name: max(0, count - before[1].get(name, 0)) / seconds for name, count in counts.items()}
