"""Gate: checks every request to the dashboard: its host, its method, and its authentication."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers, QueryParams
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Gate"]

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


class Gate:
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
