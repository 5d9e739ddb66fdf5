"""Roles on a Dask cluster: a task for each process, which Dask places and repeats without end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.core.imports import import_optional
from rlzmq.launch.engine import Jobs, Role
from rlzmq.launch.host import host
from rlzmq.launch.hosting import Hosting, memory_bytes

__all__ = ["Dask"]

_RETRIES = 1_000_000
_START_S = 0.05


def _distributed() -> Any:
    return import_optional("distributed", "--on dask", "rlzmq[dask]")


def _states(dask_scheduler: Any) -> dict[str, str]:
    """Return the states of all tasks of rlzmq; let them lose any number of workers."""
    found = {}
    for key, task in dask_scheduler.tasks.items():
        if str(key).startswith("rlzmq-"):
            task.suspicious = 0
            found[str(key)] = str(task.state)
    return found


def _task(role: Role, name: str, workdir: Path) -> None:
    """Host one process."""
    address = urlsplit(_distributed().get_worker().address).hostname
    if not host(role, name, str(address), workdir):
        raise PeerLostError(f"{name} ended: Dask starts it again")


class Dask(Hosting):
    """The cluster of ``--on dask://HOST:PORT``, the scheduler's address."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        distributed, address = _distributed(), jobs.on.replace("dask", "tcp", 1)
        try:
            self._client: Any = distributed.Client(address, timeout=20, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--on {jobs.on}: no Dask scheduler: {error}") from error

    def call(self, role: Role, name: str, call: str, options: dict[str, Any]) -> None:
        """Submit a task."""
        sizes = {"CPU": role.cpus if role.cpus > 1 else 0, "GPU": role.gpus, "MEMORY": memory_bytes(role)}
        given: dict[str, Any] = {"resources": {what: size for what, size in sizes.items() if size}}
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        missing = set(given["resources"]).difference(*(worker["resources"] for worker in workers))
        if workers and missing:
            raise ConfigurationError(
                f"[{role.name}]: no worker offers {', '.join(sorted(missing))}: dask worker --resources 'GPU=1 …'"
            )
        given |= {"key": call, "retries": _RETRIES, "pure": False, **options}
        future = self._client.submit(_task, role, name, self.jobs.workdir, **given)
        _distributed().fire_and_forget(future)
        while call not in self.calls():
            time.sleep(_START_S)

    def calls(self) -> dict[str, str]:
        """Return the states of all tasks."""
        states: dict[str, str] = self._client.run_on_scheduler(_states)
        return states

    def cancel(self, call: str) -> None:
        """Cancel a task that has no worker."""
        if self.calls().get(call) != "processing":
            self._client.cancel([_distributed().Future(call, self._client)], force=True)

    def seen_by(self, path: Path) -> dict[str, bool]:
        """Let all workers look."""
        return dict(self._client.run(os.path.exists, str(path)))
