"""Roles on a Dask cluster: a task for each process, which Dask places and repeats without end."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ByteSize, TypeAdapter

from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.core.imports import import_optional
from rlzmq.launch.engine import Jobs, Role
from rlzmq.launch.hosting import OVER, STOP_S, WRONG, Hosting, News, host

__all__ = ["Dask"]

_RETRIES = 1_000_000


def _distributed() -> Any:
    return import_optional("distributed", "--on dask", "rlzmq[dask]")


def _task(role: Role, name: str, head: str, workdir: Path) -> int:
    """Host one process. The news are in two variables of the scheduler: one is the head's, one the launcher's."""
    distributed = _distributed()
    written, orders = (distributed.Variable(f"{head}-{what}") for what in ("written", "orders"))
    news: dict[str, Any] = {}

    def tell(texts: News) -> News:
        if texts and news != {**news, **texts}:
            written.set(dict(texts))
        with contextlib.suppress(OSError, TimeoutError):  # the scheduler is away
            news.update(written.get(timeout=30) | orders.get(timeout=30))
        return news

    address = urlsplit(distributed.get_worker().address).hostname
    code = host(role, name, workdir, str(address), tell)
    if code is None:
        raise PeerLostError(f"{name} ended: Dask starts it again")
    if name == head:
        written.set({OVER: True})
    elif code in WRONG:
        orders.set({**orders.get(), head: STOP_S})
    return code


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

        # A task fails for good when several of its workers have died; these may lose any number.
        def transition(plugin: Any, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
            if str(key).startswith("rlzmq-") and (task := plugin.scheduler.tasks.get(key)):
                task.suspicious = 0

        def begin(plugin: Any, scheduler: Any) -> None:
            plugin.scheduler = scheduler

        members = {"transition": transition, "start": begin, "name": "rlzmq"}
        self._client.register_plugin(type("Restarts", (distributed.SchedulerPlugin,), members)())

    def _variable(self, what: str) -> Any:
        return _distributed().Variable(f"{self._jobs.handles['head']}-{what}", client=self._client)

    def _submit(self, role: Role, name: str, options: dict[str, Any]) -> None:
        asked = role.resources
        sizes = {"CPU": asked.cpus if asked.cpus > 1 else 0, "GPU": asked.gpus, "MEMORY": 0}
        if asked.memory:
            sizes["MEMORY"] = int(TypeAdapter(ByteSize).validate_python(asked.memory))
        given: dict[str, Any] = {"resources": {what: size for what, size in sizes.items() if size}}
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        missing = set(given["resources"]).difference(*(worker["resources"] for worker in workers))
        if workers and missing:
            raise ConfigurationError(
                f"[{role.name}]: no worker offers {', '.join(sorted(missing))}: dask worker --resources 'GPU=1 …'"
            )
        head = self._jobs.handles["head"]
        if name == head:
            for what in ("written", "orders"):
                self._variable(what).set({})
        future = self._client.submit(
            _task,
            role,
            name,
            head,
            self._jobs.workdir,
            key=name,
            retries=_RETRIES,
            pure=False,
            **(given | options),
        )
        _distributed().fire_and_forget(future)
        while name not in self._living():
            time.sleep(0.05)

    def _living(self) -> set[str]:
        return set(self._states())

    def _states(self) -> dict[str, str]:
        return dict(
            self._client.run_on_scheduler(
                lambda dask_scheduler: {
                    key: task.state
                    for key, task in dask_scheduler.tasks.items()
                    if str(key).startswith("rlzmq-")
                }
            )
        )

    def _order(self, name: str, grace_s: float) -> None:
        orders = self._variable("orders")
        orders.set({**orders.get(timeout=30), name: grace_s})
        if self._states().get(name) != "processing":
            self._client.cancel([_distributed().Future(name, self._client)], force=True)

    def _seen_by(self, path: Path) -> dict[str, bool]:
        return dict(self._client.run(os.path.exists, str(path)))
