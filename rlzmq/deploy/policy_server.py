"""PolicyServer: answers requests for actions with the newest checkpoint of a run.

HTTP ─► Batcher ─► ServedPolicy of the current checkpoint
                        ▲
         CheckpointSource: newer checkpoints, loaded on a thread

The HTTP interface:

| path | method | what |
|---|---|---|
| /v1/act | POST | actions for one observation or many |
| /v1/policies | GET | the served policies: modules, agents, spaces, inputs and outputs |
| /healthz | GET | 200 while the server answers requests, 503 while it ends; needs no token |
| /metrics | GET | metrics for Prometheus |
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from rlzmq.actors.loop_thread import get_loop_thread
from rlzmq.algorithms.policy import Policy
from rlzmq.core.errors import ClosedError, ConfigurationError
from rlzmq.core.imports import LazyModule, import_optional
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import tree_map
from rlzmq.deploy.batcher import Batcher, OverloadedError, ServeMetrics
from rlzmq.deploy.export import describe
from rlzmq.deploy.served_policy import (
    Arrays,
    CheckpointSource,
    RequestError,
    ServedCheckpoint,
    ServedPolicy,
    rewards_from_json,
    rows_from_json,
    values_from_json,
)
from rlzmq.driver.synchronous import Forwarded, Synchronous, blocking

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from rlzmq.net import http_server
else:  # it imports uvicorn, which only those need who serve
    http_server = LazyModule("rlzmq.net.http_server")

__all__ = ["AsyncPolicyServer", "PolicyServer", "load_policies"]

_KEYS = (
    "obs",
    "observations",
    "state_in",
    "reward",
    "rewards",
    "explore",
    "module",
    "agent",
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Parsing a larger body takes longer than the event loop may be blocked.
_PARSED_AT_ONCE_BYTES = 64 * 1024


def _parsed(body: bytes) -> dict[str, Any]:
    def refuse(text: str) -> float:
        raise RequestError(f"expected finite numbers, got {text}")

    collects = gc.isenabled()
    gc.disable()  # looking at a million new lists again and again takes most of the time, under the GIL
    try:
        call = json.loads(body, parse_constant=refuse)
    except RecursionError:
        raise RequestError("the JSON is nested too deep") from None
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(call, dict):
        raise RequestError(f"expected a JSON object with the key obs or observations, got {body[:40]!r}")
    for key, value in call.items():
        if key not in _KEYS:
            raise RequestError(f"unknown key {key[:100]!r}.{did_you_mean(key[:100], _KEYS)}")
        if key in ("module", "agent") and isinstance(value, int) and not isinstance(value, bool):
            call[key] = str(value)
        elif key in ("module", "agent") and not isinstance(value, str):
            raise RequestError(f"{key}: expected an id, a text")
        if key == "explore" and not isinstance(value, bool):
            raise RequestError("explore: expected true or false")
    if ("obs" in call) == ("observations" in call):
        raise RequestError("expected either obs, one observation, or observations, a list of them")
    for key, needs in (("reward", "obs"), ("rewards", "observations")):
        if key in call and needs not in call:
            raise RequestError(f"{key} goes with {needs}")
    return call


def _inputs(policy: ServedPolicy, call: Mapping[str, Any]) -> tuple[bool, Arrays]:
    """Return whether the request has a single observation, and the checked arrays."""
    is_one = "obs" in call
    where = "obs" if is_one else "observations"
    observations = [call["obs"]] if is_one else call["observations"]
    if not isinstance(observations, list) or not observations:
        raise RequestError("observations: expected a list of at least one observation")
    leaves = rows_from_json(policy.observation_space, observations, where)
    given = call.get("reward" if is_one else "rewards")
    rewards = None if given is None else rewards_from_json([given] if is_one else given, len(observations))
    state = call.get("state_in")
    if state is not None:
        if is_one and isinstance(state, dict):
            state = {name: [value] for name, value in state.items()}
        state = values_from_json(policy.states, state, len(observations), "state_in")
    return is_one, policy.inputs_of(leaves, rewards, state)


def _answer(policy: ServedPolicy, outputs: Arrays, is_one: bool) -> dict[str, Any]:
    actions, state, _ = policy.named_outputs(outputs)
    if is_one:
        actions, state = tree_map(lambda leaf: leaf[0], (actions, state))
    answer: dict[str, Any] = {"action" if is_one else "actions": _plain(actions)}
    if state:
        answer["state_out"] = _plain(state)
    return {**answer, "module": policy.module_id}


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(part) for key, part in tree.items()}
    return [_plain(part) for part in tree] if isinstance(tree, tuple) else tree.tolist()


def _listen(address: str, insecure: bool) -> socket.socket:
    host, (_, colon, port) = http_server.host_name(address), address.rpartition(":")
    if not host or not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"malformed address {address!r}: expected HOST:PORT, port 0 to 65535")
    if host not in _LOOPBACK and not host.startswith("127.") and not insecure:
        raise ConfigurationError(
            f"refusing to serve HTTP on {address}: anyone who can read the traffic learns the token. Use a proxy with "
            "TLS on this machine, or set insecure=True (--insecure) on a network that you trust."
        )
    try:
        return socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from error


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
        self._thread = ThreadPoolExecutor(1, "rlzmq-large-requests")
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._is_ending = False
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
            CheckpointError, ConfigurationError: No checkpoint can be served, or the address is malformed, taken or not
                loopback.
            MissingPackageError: starlette or uvicorn is not installed.
        """
        self._use(await asyncio.to_thread(self._source.newer_than, None))
        self._batcher = Batcher(
            max_batch_size=self._max_batch_size,
            batch_wait_timeout_s=self._batch_wait_timeout_s,
            metrics=self._metrics,
        )
        try:
            self.http_url = await self._listen()
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
        self._is_ending = True
        if self._serving is not None:
            self._server.should_exit = True
            _, pending = await asyncio.wait((self._serving,), timeout=timeout_s)
            if pending:
                self._server.force_exit = True
                await asyncio.wait((self._serving,), timeout=timeout_s)
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._serving = None
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

    async def _listen(self) -> str:
        """Start the HTTP server; return its URL."""
        for package in ("starlette.applications", "uvicorn"):
            import_optional(package, "Serving over HTTP", "rlzmq[serve]")
        import uvicorn

        listening = _listen(self._http_address, self._insecure)
        host = http_server.host_name(self._http_address)
        gate = http_server.RequestFilter(
            self._application(),
            token=self.token,
            hosts={host, *(_LOOPBACK if host in _LOOPBACK else ()), *self._allowed_hosts},
            open_paths=("/healthz",),
            max_body_bytes=self._max_body_bytes,
        )
        started = asyncio.Event()

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                started.set()

            @contextlib.contextmanager
            def capture_signals(self) -> Any:  # the process handles its own signals
                yield

        self._server = Server(http_server.server_config(gate, lifespan="off", log_config=None))
        self._serving = asyncio.create_task(self._server.serve([listening]), name="rlzmq-http")
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait((self._serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        port = listening.getsockname()[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _application(self) -> Any:
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def act(request: Request) -> Response:
            arrived = time.perf_counter()
            code, answer = await self._act(await request.body())
            self._metrics.answered(code, time.perf_counter() - arrived)
            headers = {"retry-after": "1"} if code == 503 else None
            return Response(answer, code, headers, media_type="application/json")

        async def policies(request: Request) -> Response:
            served = self._current()
            return JSONResponse(
                {
                    "checkpoint": served.name,
                    "policies": [describe(policy) for policy in served.policies],
                }
            )

        async def health(request: Request) -> Response:
            status, code = ("ending", 503) if self._is_ending else ("ok", 200)
            return JSONResponse({"status": status}, code)

        async def metrics(request: Request) -> Response:
            return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

        return Starlette(
            routes=[
                Route("/v1/act", act, methods=["POST"]),
                Route("/v1/policies", policies),
                Route("/healthz", health),
                Route("/metrics", metrics),
            ]
        )

    async def _act(self, body: bytes) -> tuple[int, bytes]:
        """Return the HTTP code and the body of the answer."""
        served, batcher = self._current(), self._batcher
        assert batcher is not None

        def parse() -> tuple[ServedPolicy, bool, Arrays, bool]:
            call = _parsed(body)
            policy = served.choose(call.get("module", ""), call.get("agent", ""))
            return policy, *_inputs(policy, call), call.get("explore", False)

        def write(policy: ServedPolicy, outputs: Arrays, is_one: bool) -> bytes:
            answer = {**_answer(policy, outputs, is_one), "checkpoint": served.name}
            return json.dumps(answer, allow_nan=False).encode()

        try:
            if len(body) <= _PARSED_AT_ONCE_BYTES:
                policy, is_one, inputs, explore = parse()
                return 200, write(policy, await batcher.submit(policy, inputs, explore=explore), is_one)
            loop = asyncio.get_running_loop()
            policy, is_one, inputs, explore = await loop.run_in_executor(self._thread, parse)
            outputs = await batcher.submit(policy, inputs, explore=explore)
            return 200, await loop.run_in_executor(self._thread, write, policy, outputs, is_one)
        except RequestError as error:
            code, text = 400, str(error)
        except KeyError as error:
            code, text = 404, str(error.args[0])
        except OverloadedError as error:
            code, text = 503, str(error)
        except Exception as error:
            _log.warning("a request over HTTP failed: %s: %s", type(error).__name__, error)
            code, text = 500, f"the policy raised {type(error).__name__}; the server's log says more"
        return code, json.dumps({"error": text}).encode()

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
