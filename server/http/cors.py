"""CORS: lets pages of other origins use the server, when `--allowed-origins` says so. A pure ASGI layer around it all.

Outermost, so that errors carry the headers too. It decides once a request. Streams write their own head, past ASGI
`send`: their sink (http_protocol.py) is given the headers when the request begins, so a token costs nothing more.
"""

import functools
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ringserve.server.errors import RequestError, shown
from ringserve.server.http.json_response import error_response
from ringserve.server.http.sink import EXTENSION
from ringserve.server.http.sink import Headers as RawHeaders
from ringserve.server.settings.config import ServeConfig

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_ANY = "*"
_MAX_AGE_S = b"600"  # how long a browser may remember a preflight's answer
_VARY = (b"vary", b"Origin")
_EXPOSED = (b"access-control-expose-headers", b"Retry-After, X-Request-Id")  # what the SDKs read


@dataclass(frozen=True, kw_only=True, slots=True)
class CorsPolicy:
    """Who may do what; "*" in `origins`, `methods` or `headers`, or no method or header at all, is any."""

    origins: frozenset[str]
    methods: frozenset[str] = frozenset()
    headers: frozenset[str] = frozenset()
    allow_credentials: bool = False

    @classmethod
    def of(cls, config: ServeConfig) -> "CorsPolicy":
        """Return what the command line asks for."""
        return cls(
            origins=frozenset(config.allowed_origins),
            methods=frozenset(method.upper() for method in config.allowed_methods),
            headers=frozenset(header.lower() for header in config.allowed_headers),
            allow_credentials=config.allow_credentials,
        )

    @property
    def is_public(self) -> bool:
        """Whether the answer is the same for every origin; never with credentials, which the configuration refuses."""
        return _ANY in self.origins

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of that origin may read responses."""
        return _ANY in self.origins or origin in self.origins

    def allows_method(self, method: str) -> bool:
        """Whether they may use the method."""
        return not self.methods or _ANY in self.methods or method in self.methods

    def refused_headers(self, names: list[str]) -> list[str]:
        """Return those of the request headers that they may not send."""
        return [] if not self.headers or _ANY in self.headers else [name for name in names if name not in self.headers]

    def response_headers(self, origin: str | None) -> RawHeaders:
        """Return what a response to a request of `origin` carries; `vary` also for those that get nothing else."""
        vary = [] if self.is_public else [_VARY]
        if origin is None or not self.allows_origin(origin):
            return vary
        shown_origin = _ANY if self.is_public else origin
        credentials = [(b"access-control-allow-credentials", b"true")] if self.allow_credentials else []
        return [(b"access-control-allow-origin", shown_origin.encode("latin-1")), *credentials, _EXPOSED, *vary]


class Cors:
    """Answers preflight requests, and adds the policy's headers to every other response of `app`."""

    def __init__(self, app: ASGIApp, policy: CorsPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(origin, headers)(scope, receive, send)
            return
        added = self._policy.response_headers(origin)
        await self._app(_with_sink(scope, added), receive, _with_send(send, added))

    def _preflight(self, origin: str, headers: Headers) -> Response:
        policy = self._policy
        method = headers["access-control-request-method"]
        wanted = [name.strip().lower() for name in headers.get("access-control-request-headers", "").split(",")]
        wanted = [name for name in wanted if name]
        refused = policy.refused_headers(wanted)
        if not policy.allows_origin(origin):
            return _refusal(f"origin {shown(origin)} is not one of --allowed-origins", {"vary": "Origin"})
        if not policy.allows_method(method):
            return _refusal(f"method {shown(method)} is not one of --allowed-methods", {"vary": "Origin"})
        if refused:
            return _refusal(f"headers {shown(refused)} are not among --allowed-headers", {"vary": "Origin"})
        methods = _METHODS if policy.allows_method(_ANY) else sorted(policy.methods)
        response = Response(status_code=204)
        response.raw_headers = [
            *policy.response_headers(origin),
            (b"access-control-allow-methods", ", ".join(methods).encode("latin-1")),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        if wanted:
            response.raw_headers.append((b"access-control-allow-headers", ", ".join(wanted).encode("latin-1")))
        return response


def _refusal(message: str, headers: dict[str, str]) -> Response:
    return error_response(RequestError(message), headers)


def _with_sink(scope: Scope, added: RawHeaders) -> Scope:
    """Return the scope with a sink that opens with the headers too."""
    extensions = scope.get("extensions", {})
    if not added or EXTENSION not in extensions:
        return scope
    return {**scope, "extensions": {**extensions, EXTENSION: functools.partial(extensions[EXTENSION], added)}}


def _with_send(send: Send, added: RawHeaders) -> Send:
    """Return a `send` for responses that go through ASGI."""
    if not added:
        return send

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return send_with_headers
