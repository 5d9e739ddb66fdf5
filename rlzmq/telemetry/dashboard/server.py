"""The dashboard's server: the page, its data as JSON, and a stream of changes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
import uvicorn
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlzmq.core.errors import ConfigurationError
from rlzmq.net.http_server import server_config
from rlzmq.telemetry.dashboard.panels import Columns, ExportedRuns, curves_for_width, panels_of
from rlzmq.telemetry.dashboard.watched import Watched, WatchedRun
from rlzmq.telemetry.runs import X_AXES, finite

__all__ = ["Dashboard"]


_ENTER = "/enter"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
# This page of our own starts the next request, which makes the browser send the strict cookie even after a click on an
# external link.
_ENTERED = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>rlzmq</title><link rel="icon" href="/icon.svg">'
    '<meta http-equiv="refresh" content="0;url=/"><p><a href="/">To the dashboard</a></p></html>'
)
_NO_ENTRY = (
    "This page needs the link that was printed where the dashboard was started (rlzmq dashboard, or --dashboard).\n"
    "A link works once; opening a used one prints a new one there.\n"
)


class BrowserFilter:
    """Passes on authenticated requests only. A one-time link sets a session cookie; programs use a bearer token.

    Only GET and HEAD are allowed, only under this host's names, and not from pages of other sites.

    Args:
        app: The app that receives the passed requests.
        hosts: Names and addresses of this server to accept in the Host header.
        cookie: Name of the cookie; all ports of a host share their cookies.
        token: Bearer token for programs, e.g. Prometheus; None: no token is accepted.
        announce: Called with the path of a new link when a used one was opened.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Sequence[str],
        cookie: str,
        token: str | None = None,
        announce: Callable[[str], None] = lambda path: None,
    ) -> None:
        self._app = app
        self._host_check = TrustedHostMiddleware(self._checked_host, list(hosts), www_redirect=False)
        self._cookie = cookie
        self._token = token
        self._announce = announce
        self._link = secrets.token_urlsafe(24)
        self._used: list[str] = []
        self._sessions: list[str] = []

    @property
    def path(self) -> str:
        """The path of the link, which works once."""
        return f"{_ENTER}?token={self._link}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._host_check(scope, receive, send_with_headers)

    async def _checked_host(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a refused request; None if the request is allowed."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET.\n", 405, {"allow": "GET, HEAD"})
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            navigates = headers.get("sec-fetch-mode") == "navigate"
            if not navigates or headers.get("sec-fetch-dest") != "document":
                return PlainTextResponse("Not for pages of other sites.\n", 403)
        if scope["path"] == _ENTER and scope["method"] == "GET":
            return self._enter(QueryParams(scope["query_string"]).get("token", ""))
        if self._is_known(headers):
            return None
        return PlainTextResponse(_NO_ENTRY, 401, {"www-authenticate": "Bearer"})

    def _is_known(self, headers: Mapping[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if self._token is not None and scheme.lower() == "bearer" and _same(given.strip(), self._token):
            return True
        session = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        return any(_same(session, known) for known in self._sessions)

    def _enter(self, token: str) -> Response:
        if any(_same(token, used) for used in self._used):
            self._announce(self.path)
            return PlainTextResponse(_NO_ENTRY, 401)
        if not _same(token, self._link):
            return PlainTextResponse(_NO_ENTRY, 401)
        self._used = [*self._used[-9:], self._link]
        self._link = secrets.token_urlsafe(24)
        session = secrets.token_urlsafe(32)
        self._sessions = [*self._sessions[-99:], session]
        response = HTMLResponse(_ENTERED)
        response.set_cookie(self._cookie, session, httponly=True, samesite="strict")
        return response


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


_TICK_S = 1.0
_KEEP_ALIVE_S = 15.0
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_MAX_WIDTH, _MAX_CURVES = 4000, 50
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGE = "index.html"
_STATIC = resources.files("rlzmq.telemetry.dashboard") / "static"
_FILES = {
    path.name: path
    for folder in (_STATIC, _STATIC / "uplot")
    for path in folder.iterdir()
    if path.name.endswith(tuple(_TYPES))
}


class Dashboard:
    """A web server that shows runs to those who know its link.

    Args:
        watched: The runs.
        host: Address to listen on.
        port: Port; 0: any free one.
        hosts: Additional names of this server to accept in the Host header.
        token: Bearer token for programs; None: no token is accepted.

    Raises:
        ConfigurationError: The address cannot be used.
    """

    def __init__(
        self,
        watched: Watched,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        hosts: Sequence[str] = (),
        token: str | None = None,
    ) -> None:
        self._watched = watched
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        self._port = self._socket.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        self._base = f"http://{name}:{self._port}"
        self._clients: dict[asyncio.Event, str] = {}
        self._failure: BaseException | None = None
        routes = [
            Route("/api/runs", self._get_runs),
            Route("/api/curves", self._get_curves),
            Route("/api/stream", self._get_stream),
            Route("/metrics", self._get_metrics),
            Route("/", _get_file),
            Route("/{path}", _get_file),
        ]
        self._gate = BrowserFilter(
            Starlette(routes=routes, lifespan=self._lifespan),
            hosts=[*_LOOPBACK, name, *hosts],
            cookie=f"rlzmq_dashboard_{self._port}",
            token=token,
            announce=self._announce,
        )
        # Streams see the end at their next tick.
        settings = server_config(self._gate, log_level="warning", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(settings)

    @property
    def link(self) -> str:
        """The link for a browser, which works once."""
        return self._base + self._gate.path

    def serve(self) -> None:
        """Print the link, and a new one whenever a used one was opened; serve until `stop` or a signal.

        Raises:
            Exception: Reading the runs failed.
        """
        self._announce(self._gate.path)
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])
        if self._failure is not None:
            raise self._failure

    def _announce(self, path: str) -> None:
        print(f"dashboard   {self._base}{path}", flush=True)

    def stop(self) -> None:
        """Make `serve` return. May be called from any thread."""
        self._server.should_exit = True

    # -- what changes -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch(), name="dashboard")
        task.add_done_callback(self._watch_ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._watched.close()

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._failure = task.exception()
            self.stop()

    async def _watch(self) -> None:
        """Read new data once a second, and poll the brokers while somebody watches."""
        while True:
            await asyncio.to_thread(self._watched.look)
            has_more = await self._watched.read()
            looked_at = set(self._clients.values())
            for run in self._watched.runs:
                if run.live is not None and run.run_id in looked_at and run.may_be_asked:
                    await run.live.poll()
            for changed in self._clients:
                changed.set()
            await asyncio.sleep(_TICK_S / 20 if has_more else _TICK_S)

    async def _get_stream(self, request: Request) -> Response:
        run_id = request.query_params.get("run", "")
        return StreamingResponse(self._panels(run_id), media_type="text/event-stream")

    async def _panels(self, run_id: str) -> AsyncIterator[str]:
        """Yield the panels whose content has changed, as events named after the panel."""
        changed = asyncio.Event()
        self._clients[changed] = run_id
        sent: dict[str, str] = {}
        changed.set()
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        try:
            while not self._server.should_exit:
                await changed.wait()  # `_watch` sets it in each tick
                changed.clear()
                now = clock()
                for name, content in self._content(run_id).items():
                    text = _json(content)
                    if sent.get(name) != text:
                        sent[name], sent_at = text, now
                        yield f"event: {name}\ndata: {text}\n\n"
                if now - sent_at >= _KEEP_ALIVE_S:  # else proxies close the connection
                    sent_at = now
                    yield ": still here\n\n"
                await asyncio.sleep(now + _TICK_S / 2 - clock())
        finally:
            del self._clients[changed]

    def _content(self, run_id: str) -> dict[str, Any]:
        """Return the content of the panels, by name."""
        runs = self._watched.runs
        content: dict[str, Any] = {
            "runs": self._watched.rows(),
            "trials": [search.table() for search in self._watched.searches],
            "curves": {run.run_id: run.tail.num_read for run in runs},
        }
        chosen = self._watched.get(run_id)
        return content if chosen is None else {**content, **panels_of(chosen)}

    # -- answers ------------------------------------------------------------------------------------------------

    async def _get_runs(self, request: Request) -> Response:
        return _answer(self._watched.rows())

    async def _get_metrics(self, request: Request) -> Response:
        for run in self._watched.runs:
            if run.live is not None and run.may_be_asked:
                await run.live.poll()
        return Response(
            generate_latest(ExportedRuns(self._watched.runs)), media_type=CONTENT_TYPE_PLAIN_0_0_4
        )

    async def _get_curves(self, request: Request) -> Response:
        asked = request.query_params
        try:
            width = min(max(int(asked.get("width", "800")), 10), _MAX_WIDTH)
            begin, end = (float(asked[name]) if name in asked else None for name in ("begin", "end"))
            x, y = X_AXES[asked.get("x", "steps")] and asked.get("x", "steps"), asked.get("y", "mean")
            if y not in ("mean", "rate"):
                raise ValueError(y)
        except (ValueError, KeyError):
            return JSONResponse({"error": "expected x, y, width, begin, end"}, 400)
        ids = asked.get("runs", "").split(",")[:_MAX_CURVES]
        runs = [run for run_id in ids if (run := self._watched.get(run_id)) is not None]
        return await asyncio.to_thread(_curves_answer, runs, x, y, width, begin, end)


def _curves_answer(
    runs: Sequence[WatchedRun], x: str, y: str, width: int, begin: float | None, end: float | None
) -> Response:
    points, curves = curves_for_width([_columns_of(run, x, y) for run in runs], width, begin, end)
    return _answer(
        {
            "x": _rounded(points, 12),
            "runs": [run.run_id for run in runs],
            "curves": [{name: _rounded(values, 6) for name, values in curve.items()} for curve in curves],
        }
    )


def _columns_of(run: WatchedRun, x: str, y: str) -> Columns:
    columns = run.tail.columns()
    if x == "steps" and len(columns["steps"]) and not columns["steps"][-1]:
        x = "trained"
    if y == "mean":
        return {"x": columns[x], "mean": columns["mean"], "low": columns["low"], "high": columns["high"]}
    return {"x": columns[x], "mean": columns[y], "low": columns[y], "high": columns[y]}


def _rounded(values: np.ndarray[Any, np.dtype[np.float64]], digits: int) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


async def _get_file(request: Request) -> Response:
    name = request.path_params.get("path", "") or _PAGE
    file = _FILES.get(name)
    if file is None:
        return Response("Not found.\n", 404, media_type="text/plain")
    return Response(file.read_bytes(), media_type=_TYPES[name[name.rindex(".") :]])


def _answer(content: object) -> Response:
    return Response(_json(content), media_type="application/json")


def _json(content: object) -> str:
    return json.dumps(finite(content), separators=(",", ":"))
