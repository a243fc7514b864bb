"""API keys: who may use the server, and how many requests each may have at once. A pure ASGI layer, one look a request.

Where CORS is on, its layer is around this one: a page can read a 401 too, and what browsers ask first needs no key.
A token costs nothing here: a stream goes past ASGI `send`, straight to its transport.
"""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ringserve.server.errors import AuthenticationError, ConcurrencyLimitError, ServerError, StartupError
from ringserve.server.http.json_response import error_response
from ringserve.server.http.request_id import echoed_header
from ringserve.server.key_number import set_key_number
from ringserve.server.settings.config import ServeConfig

OPEN_PATHS = ("/health", "/ready", "/ping")  # for load balancers and orchestrators, which hold no key
_COMMENT = "#"


def read_keys(config: ServeConfig) -> tuple[str, ...]:
    """Return the configuration's keys, and those of its file: one a line, blank lines and # comments aside.

    Raises:
        StartupError: If the file cannot be read or holds none, if a key could not be sent in a header, or if there is
            a limit or a share for each key, and no key.
    """
    keys = [*config.api_key]
    if config.api_key_file is not None:
        keys += _keys_of_file(config.api_key_file)
    for number, key in enumerate(keys, 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise StartupError(f"API key number {number} is empty, or has a character that is no printable ASCII")
    if config.max_concurrency_per_key is not None and not keys:
        raise StartupError("--max-concurrency-per-key needs keys: give --api-key or --api-key-file")
    if config.fair_by_key and not keys:
        raise StartupError("--fair-by-key needs keys: give --api-key or --api-key-file")
    return tuple(dict.fromkeys(keys))


def _keys_of_file(file: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise StartupError(f"--api-key-file: cannot read {file}: {exc}") from exc
    keys = [line for line in lines if line and not line.startswith(_COMMENT)]
    if not keys:
        raise StartupError(f"--api-key-file: {file} holds no key: write one a line")
    return keys


def guarded(app: ASGIApp, keys: Sequence[str], config: ServeConfig) -> ASGIApp:
    """Return `app` behind the keys; itself if there are none."""
    if not keys:
        return app
    return ApiKeys(app, keys, config.max_concurrency_per_key, is_fair=config.fair_by_key)


class ApiKeys:
    """Lets requests that carry one of the keys through to `app`.

    Args:
        app: What it guards.
        keys: At least one.
        max_concurrency: Requests of one key that are answered at the same time; None: any number.
        is_fair: Whether the engine tells the keys apart.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], max_concurrency: int | None = None, *, is_fair: bool = False
    ) -> None:
        self._is_fair = is_fair
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._max_concurrency = max_concurrency
        self._num_running = [0] * len(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        try:
            key = self._take(scope)
        except ServerError as error:
            headers = {"www-authenticate": "Bearer"} if isinstance(error, AuthenticationError) else {}
            await error_response(error, headers | echoed_header(Request(scope)))(scope, receive, send)
            return
        set_key_number(key + 1 if self._is_fair else 0)
        try:
            await self._app(scope, receive, send)
        finally:  # ended, failed, cancelled, or left by its client
            self._num_running[key] -= 1

    def _take(self, scope: Scope) -> int:
        """Return the number of the request's key, one more of whose requests runs now."""
        key = self._find(Headers(scope=scope).get("authorization", ""))
        if self._max_concurrency is not None and self._num_running[key] >= self._max_concurrency:
            raise ConcurrencyLimitError(
                f"{self._num_running[key]} requests with this API key are being answered: its limit is "
                f"{self._max_concurrency} (--max-concurrency-per-key): try again when one has ended"
            )
        self._num_running[key] += 1
        return key

    def _find(self, authorization: str) -> int:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise AuthenticationError("the request has no API key: send the header Authorization: Bearer KEY")
        digest = _digest(given.strip().encode("latin-1"))
        # every key is compared, and digests of one length: the time tells nothing
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if True not in matches:
            raise AuthenticationError("the request's API key is not one of this server's")
        return matches.index(True)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_open(scope: Scope) -> bool:
    """Whether the route needs no key; the path is compared whole, as the router does."""
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) in OPEN_PATHS
