"""PolicyServer: answers requests for actions with the newest checkpoint of a run.

HTTP ─► Batcher ─► ServedPolicy of the current checkpoint
                        ▲
         CheckpointSource: newer checkpoints, loaded on a thread
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from rlzmq.actors.loop_thread import get_loop_thread
from rlzmq.algorithms.policy import Policy
from rlzmq.core.errors import ClosedError
from rlzmq.deploy.batcher import Batcher, ServeMetrics
from rlzmq.deploy.http_interface import HttpInterface
from rlzmq.deploy.served_policy import CheckpointSource, ServedCheckpoint
from rlzmq.driver.synchronous import Forwarded, Synchronous, blocking

__all__ = ["AsyncPolicyServer", "PolicyServer", "load_policies"]

_log = logging.getLogger("rlzmq.serve")


def load_policies(
    checkpoint: Path,
    *,
    module_id: str | None = None,
    agent_id: object = None,
    **code: Any,
) -> Sequence[Policy]:
    """Return the policies to serve: that of one module or agent, or those of all agents. See `Policy.load`."""
    if module_id is None:
        policies = Policy.load_each(checkpoint, **code)
        if agent_id is None:
            return policies
        found = [policy for policy in policies if policy.acting_module()[2] == agent_id]
        if not found:
            raise KeyError(
                f"no agent {agent_id!r}, or its module depends on the episode: choose one with module_id."
            )
        return found
    return [Policy.load(checkpoint, module_id=module_id, agent_id=agent_id, **code)]


class AsyncPolicyServer:
    """Serves the policies of a checkpoint and reloads newer ones. An async context manager.

    Args:
        path: A checkpoint, or a directory of a run, whose newest checkpoint is served.
        module_id, agent_id: Serve only this module (as this agent); None: the modules of all agents.
        http: HOST:PORT to serve HTTP on (port 0: any free one).
        token: Bearer token of requests; None: a new one.
        allowed_hosts: Additional names of this server to accept in the Host header, e.g. that of a proxy.
        insecure: Whether to allow HTTP on addresses other than loopback, without encryption.
        max_body_bytes: Maximum size of a request.
        max_batch_size: Maximum number of observations in one forward pass.
        batch_wait_timeout_s: How long an idle server waits for further requests before it computes.
        reload_interval_s: How often to look for a newer checkpoint; 0: never.
        code: ``config``, ``trust``, ``module_class`` and settings: see `Policy.load`.

    Attributes:
        http_url: The server's URL, e.g. ``http://127.0.0.1:8000``, once it has started.
        token: The bearer token.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        module_id: str | None = None,
        agent_id: Hashable = None,
        http: str = "127.0.0.1:8000",
        token: str | None = None,
        allowed_hosts: Collection[str] = (),
        insecure: bool = False,
        max_body_bytes: int = 4 << 20,
        max_batch_size: int = 256,
        batch_wait_timeout_s: float = 0.001,
        reload_interval_s: float = 2.0,
        **code: Any,
    ) -> None:
        load = functools.partial(load_policies, module_id=module_id, agent_id=agent_id, **code)
        self._metrics = ServeMetrics()
        self._source = CheckpointSource(path, load, on_skipped=self._metrics.reloads.labels("skipped").inc)
        self._http_address = http
        self.token: str = secrets.token_urlsafe(32) if token is None else token
        self._allowed_hosts = allowed_hosts
        self._insecure = insecure
        self._max_body_bytes = max_body_bytes
        self._max_batch_size = max_batch_size
        self._batch_wait_timeout_s = batch_wait_timeout_s
        self._reload_interval_s = reload_interval_s
        self._served: ServedCheckpoint | None = None
        self._batcher: Batcher | None = None
        self._http: HttpInterface | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reloading = asyncio.Lock()
        self.http_url: str | None = None

    @property
    def checkpoint(self) -> Path:
        """Path of the served checkpoint.

        Raises:
            ClosedError: The server was not started.
        """
        return self._current().path

    async def start(self) -> Self:
        """Load the checkpoint and listen.

        Raises:
            CheckpointError, ConfigurationError: No checkpoint can be served, or the address is taken.
        """
        self._use(await asyncio.to_thread(self._source.newer_than, None))
        self._batcher = Batcher(
            max_batch_size=self._max_batch_size,
            batch_wait_timeout_s=self._batch_wait_timeout_s,
            metrics=self._metrics,
        )
        try:
            self._http = HttpInterface(
                self._batcher,
                self._current,
                self._metrics,
                token=self.token,
                hosts=self._allowed_hosts,
                max_body_bytes=self._max_body_bytes,
            )
            self.http_url = await self._http.start(self._http_address, insecure=self._insecure)
        except BaseException:
            await self.stop()
            raise
        if self._reload_interval_s:
            self._watch = asyncio.create_task(self._reload_regularly(), name="rlzmq-reload")
        return self

    async def reload(self) -> bool:
        """Look for a newer checkpoint now, and retry those that could not be served.

        Returns:
            Whether one was loaded.
        """
        self._source.retry()
        return await self._look()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Refuse new requests, answer those that have arrived, and end. Idempotent.

        Args:
            timeout_s: Seconds after which unanswered requests are abandoned.
        """
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        if self._http is not None:
            await self._http.stop(timeout_s)
        if self._batcher is not None:
            await self._batcher.close(timeout_s)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def _current(self) -> ServedCheckpoint:
        if self._served is None:
            raise ClosedError("the policy server was not started")
        return self._served

    def _use(self, found: ServedCheckpoint | None) -> None:
        if found is not None:
            self._served = found
            self._metrics.serves(found.name)

    async def _look(self) -> bool:
        async with self._reloading:
            try:
                found = await asyncio.to_thread(self._source.newer_than, self._current())
            except OSError as error:  # e.g. an unavailable network filesystem
                _log.warning("cannot look for newer checkpoints: %s", error)
                return False
            self._use(found)
        if found is None:
            return False
        self._metrics.reloads.labels("loaded").inc()
        _log.info("serving the checkpoint %s", found.path)
        return True

    async def _reload_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._reload_interval_s)
            await self._look()


class PolicyServer(Synchronous[AsyncPolicyServer]):
    """`AsyncPolicyServer` for synchronous callers, a context manager: serves from its creation until `stop`.

    Example::

        with PolicyServer("runs/cartpole", http="127.0.0.1:0") as server:
            print(server.http_url, server.token)

    Takes the arguments of `AsyncPolicyServer`.
    """

    checkpoint: Forwarded[Path] = Forwarded[Path](AsyncPolicyServer, "checkpoint")
    http_url: Forwarded[str | None] = Forwarded[str | None](AsyncPolicyServer, "http_url")
    token: Forwarded[str] = Forwarded[str](AsyncPolicyServer, "token")
    reload: Final = blocking(AsyncPolicyServer.reload)
    stop: Final = blocking(AsyncPolicyServer.stop)

    def __init__(self, path: str | Path, **options: Any) -> None:
        self._run: Callable[..., Any] = get_loop_thread().run
        self._async = AsyncPolicyServer(path, **options)
        self._run(self._async.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
