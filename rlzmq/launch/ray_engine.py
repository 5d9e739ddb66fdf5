"""Roles on a Ray cluster: a detached named actor for each process, which Ray places and restarts without end."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import import_optional
from rlzmq.launch.engine import Jobs, Role
from rlzmq.launch.hosting import OVER, Hosting, News, host, memory_bytes

__all__ = ["Ray"]

_NAMESPACE = "rlzmq"
_CALL_S = 20.0


class _Actor:
    """The host of one process. The head's actor has the news for all."""

    def __init__(self, role: Role, name: str, head: str, workdir: Path) -> None:
        import ray

        self._ray, self._name, self._head = ray, name, head
        self._news: dict[str, Any] = {}
        threading.Thread(target=self._run, args=(role, workdir), daemon=True).start()

    def hear(self, news: News) -> News:
        """Take and return news."""
        self._news.update(news)
        return dict(self._news)

    def _tell(self, news: News) -> News:
        if self._name == self._head:
            return self.hear(news)
        try:
            head = self._ray.get_actor(self._head, namespace=_NAMESPACE)
            return self.hear(self._ray.get(head.hear.remote(news), timeout=_CALL_S))
        except (ValueError, self._ray.exceptions.ActorDiedError):  # no such name, or killed
            return {OVER: True}
        except (self._ray.exceptions.RayError, TimeoutError):  # it is being restarted
            return self._news

    def _run(self, role: Role, workdir: Path) -> None:
        address = self._ray.util.get_node_ip_address()
        if not host(role, self._name, self._head, workdir, address, self._tell):
            os._exit(1)  # Ray starts it again
        self._ray.kill(self._ray.get_actor(self._name, namespace=_NAMESPACE))


class Ray(Hosting):
    """The cluster of ``--on ray`` (that of this machine) or ``--on ray://HOST:PORT``."""

    what = "Ray"

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        self._ray: Any = import_optional("ray", "--on ray", "rlzmq[ray]")
        address = "auto" if jobs.on == "ray" else jobs.on
        try:
            self._ray.init(address, namespace=_NAMESPACE, log_to_driver=False, logging_level="error")
        except ConnectionError as error:
            raise ConfigurationError(f"--on {jobs.on}: no Ray cluster: {error}") from error

    def _submit(self, role: Role, name: str, options: dict[str, Any]) -> None:
        asked = role.resources
        given = {"num_cpus": asked.cpus, "num_gpus": asked.gpus, "memory": memory_bytes(role) or None}
        actor = self._ray.remote(_Actor).options(
            name=name, lifetime="detached", max_restarts=-1, **(given | options)
        )
        actor.remote(role, name, self.jobs.handles["head"], self.jobs.workdir)

    def _names(self) -> set[str]:
        return set(self._ray.util.list_named_actors())

    def _order(self, name: str, grace_s: float) -> None:
        with contextlib.suppress(ValueError):  # it has just ended
            actor = self._ray.get_actor(name)
            try:
                self._ray.get(actor.hear.remote({name: grace_s}), timeout=_CALL_S)
            except (self._ray.exceptions.RayError, TimeoutError):  # it has no node
                self._ray.kill(actor)

    def _seen_by(self, path: Path) -> dict[str, bool]:
        look = self._ray.remote(num_cpus=0)(lambda text: os.path.exists(text))
        nodes = [node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]]
        sees = [look.options(resources={f"node:{node}": 0.001}).remote(str(path)) for node in nodes]
        return dict(zip(nodes, self._ray.get(sees), strict=True))
