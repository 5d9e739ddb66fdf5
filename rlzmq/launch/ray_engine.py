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
from rlzmq.launch.host import host
from rlzmq.launch.hosting import Hosting, memory_bytes

__all__ = ["Ray"]

_NAMESPACE = "rlzmq"
_BEGIN_S = 20.0  # an actor that has begun answers earlier


class _Actor:
    """The host of one process."""

    def __init__(self, role: Role, call: str, name: str, workdir: Path) -> None:
        threading.Thread(target=self._run, args=(role, call, name, workdir), daemon=True).start()

    def _run(self, role: Role, call: str, name: str, workdir: Path) -> None:
        import ray

        is_over = False
        try:
            is_over = host(role, name, ray.util.get_node_ip_address(), workdir)
        finally:
            if not is_over:
                os._exit(1)  # Ray starts it again
        ray.kill(ray.get_actor(call, namespace=_NAMESPACE))


class Ray(Hosting):
    """The cluster of ``--on ray`` (that of this machine) or ``--on ray://HOST:PORT``."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        self._ray: Any = import_optional("ray", "--on ray", "rlzmq[ray]")
        address = "auto" if jobs.on == "ray" else jobs.on
        try:
            self._ray.init(address, namespace=_NAMESPACE, log_to_driver=False, logging_level="error")
        except ConnectionError as error:
            raise ConfigurationError(f"--on {jobs.on}: no Ray cluster: {error}") from error

    def call(self, role: Role, name: str, call: str, options: dict[str, Any]) -> None:
        """Start an actor."""
        given: dict[str, Any] = {"name": call, "lifetime": "detached", "max_restarts": -1}
        given |= {"num_cpus": role.cpus, "num_gpus": role.gpus, "memory": memory_bytes(role) or None}
        self._ray.remote(_Actor).options(**given | options).remote(role, call, name, self.jobs.workdir)

    def calls(self) -> set[str]:
        """Return the names of all actors."""
        return set(self._ray.util.list_named_actors())

    def cancel(self, call: str) -> None:
        """Kill an actor that has no node."""
        with contextlib.suppress(ValueError):  # it has just ended
            actor = self._ray.get_actor(call)
            try:
                self._ray.get(actor.__ray_ready__.remote(), timeout=_BEGIN_S)
            except (self._ray.exceptions.RayError, TimeoutError):
                self._ray.kill(actor)

    def seen_by(self, path: Path) -> dict[str, bool]:
        """Let a task look on each node."""
        look = self._ray.remote(num_cpus=0)(lambda text: os.path.exists(text))
        nodes = [node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]]
        sees = [look.options(resources={f"node:{node}": 0.001}).remote(str(path)) for node in nodes]
        return dict(zip(nodes, self._ray.get(sees), strict=True))
