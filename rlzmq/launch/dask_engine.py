"""Roles on a Dask cluster: a task for each process, which Dask places and repeats without end."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.core.imports import import_optional
from rlzmq.launch.engine import Jobs, Role
from rlzmq.launch.hosting import Hosting, News, host, memory_bytes

__all__ = ["Dask"]

_RETRIES = 1_000_000
_START_S = 0.05


def _distributed() -> Any:
    return import_optional("distributed", "--on dask", "rlzmq[dask]")


def _on_scheduler(client: Any, run: str, news: News) -> tuple[News, dict[str, str]]:
    """Take news of a run to the scheduler; return all news, and the states of the tasks of all runs."""

    def look(dask_scheduler: Any) -> Any:  # travels as code: the scheduler may not have rlzmq
        tasks = {key: task for key, task in dask_scheduler.tasks.items() if str(key).startswith("rlzmq-")}
        for task in tasks.values():
            task.suspicious = 0  # it may lose any number of workers
        board = dask_scheduler.__dict__.setdefault("rlzmq", {}).setdefault(run, {})
        board.update(news)
        return dict(board), {key: task.state for key, task in tasks.items()}

    found: tuple[News, dict[str, str]] = client.run_on_scheduler(look)
    return found


def _task(role: Role, name: str, head: str, workdir: Path) -> None:
    """Host one process."""
    distributed = _distributed()
    client, address = distributed.get_client(), urlsplit(distributed.get_worker().address).hostname
    known: dict[str, Any] = {}

    def tell(news: News) -> News:
        with contextlib.suppress(OSError, TimeoutError):  # the scheduler is away
            known.update(_on_scheduler(client, head, dict(news))[0])
        return known

    if not host(role, name, head, workdir, str(address), tell):
        raise PeerLostError(f"{name} ended: Dask starts it again")


class Dask(Hosting):
    """The cluster of ``--on dask://HOST:PORT``, the scheduler's address."""

    what = "Dask"

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        distributed, address = _distributed(), jobs.on.replace("dask", "tcp", 1)
        try:
            self._client: Any = distributed.Client(address, timeout=20, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--on {jobs.on}: no Dask scheduler: {error}") from error

    def _submit(self, role: Role, name: str, options: dict[str, Any]) -> None:
        asked = role.resources
        sizes = {"CPU": asked.cpus if asked.cpus > 1 else 0, "GPU": asked.gpus, "MEMORY": memory_bytes(role)}
        given: dict[str, Any] = {"resources": {what: size for what, size in sizes.items() if size}}
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        missing = set(given["resources"]).difference(*(worker["resources"] for worker in workers))
        if workers and missing:
            raise ConfigurationError(
                f"[{role.name}]: no worker offers {', '.join(sorted(missing))}: dask worker --resources 'GPU=1 …'"
            )
        arguments = (role, name, self.jobs.handles["head"], self.jobs.workdir)
        future = self._client.submit(
            _task, *arguments, key=name, retries=_RETRIES, pure=False, **given | options
        )
        _distributed().fire_and_forget(future)
        while name not in self._names():
            time.sleep(_START_S)

    def _names(self) -> dict[str, str]:
        return self._tell({})

    def _tell(self, news: News) -> dict[str, str]:
        """Return the states of the tasks."""
        return _on_scheduler(self._client, self.jobs.handles["head"], news)[1]

    def _order(self, name: str, grace_s: float) -> None:
        if self._tell({name: grace_s}).get(name) != "processing":
            self._client.cancel([_distributed().Future(name, self._client)], force=True)

    def _seen_by(self, path: Path) -> dict[str, bool]:
        return dict(self._client.run(os.path.exists, str(path)))
