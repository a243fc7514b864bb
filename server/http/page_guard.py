"""Keeps web pages of other sites from using the server through a browser that can reach it. A pure ASGI layer.

Two ways in. DNS rebinding: a page's own name comes to mean this address, so that for the browser page and server are
one origin; but the header Host still has that name. And simple requests: a browser sends a POST of any page without
asking first, and keeps the response from the page alone; it says whose page with Origin and Sec-Fetch-Site.

Inside the CORS layer, so that pages which that allows can read a refusal. One look a request; a token costs nothing.

Source: the order of the looks at Sec-Fetch-Site and Origin is that of Go's CrossOriginProtection (net/http, Go 1.25).
"""

import contextlib
import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ringserve.server.errors import PermissionDeniedError, shown
from ringserve.server.http.cors import CorsPolicy
from ringserve.server.http.json_response import error_response
from ringserve.server.http.request_id import echoed_header

_ANY = "*"
_HOST = re.compile(r"(?P<name>\[[^\[\]]*\]|[^:\[\]]*)(:[0-9]*)?")
_LOCAL_NAMES = ("localhost", "*.localhost", "host.docker.internal")  # nobody else's, whatever the DNS says
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # they change nothing, and without CORS no page reads their response
_OWN_SITES = ("same-origin", "none")  # none: the user's own doing, such as a bookmark


class PageGuard:
    """Refuses requests for another host's name, and what pages of other origins would change.

    Args:
        app: What it guards.
        allowed_hosts: Names, beside this machine's, that Host may have; `*.NAME` for names below one, `*` for any.
        cors: Pages of its origins may send anything.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str], cors: CorsPolicy) -> None:
        self._app = app
        self._cors = cors
        self._names = frozenset(map(_plain, (*_LOCAL_NAMES, *allowed_hosts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] == "http":
            try:
                self._check(scope["method"], Headers(scope=scope))
            except PermissionDeniedError as error:
                await error_response(error, echoed_header(Request(scope)))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        for host in headers.getlist("host"):
            if not self._is_allowed(host):
                raise PermissionDeniedError(
                    f"the header Host is {shown(host)}: this server answers for IP addresses, localhost and the names "
                    "of --allowed-hosts"
                )
        if method not in _SAFE_METHODS and not self._is_own_page(headers):
            origin = headers.get("origin")
            page = "a page of another site" if origin is None else f"a page of {shown(origin)}"
            raise PermissionDeniedError(f"{page} may not send a {method}: --allowed-origins says whose pages may")

    def _is_allowed(self, host: str) -> bool:
        """Whether the header names this machine. No Host, or an empty one, is no browser's."""
        if _ANY in self._names or not host.strip():
            return True
        match = _HOST.fullmatch(host.strip())
        if match is None:
            return False
        name = _plain(match["name"])
        labels = name.split(".")
        wildcards = (f"*.{'.'.join(labels[i:])}" for i in range(1, len(labels)))
        return name in self._names or _is_address(name) or any(each in self._names for each in wildcards)

    def _is_own_page(self, headers: Headers) -> bool:
        """Whether no page sends this, or one of the server's own origin, or one that CORS allows."""
        origins, sites = headers.getlist("origin"), headers.getlist("sec-fetch-site")
        if self._cors.allows_origin(_ANY) or (origins and all(map(self._cors.allows_origin, origins))):
            return True
        if sites:  # tells apart what Origin cannot: a proxy may change Host, and same-origin requests may say "null"
            return all(site in _OWN_SITES for site in sites)
        own = headers.get("host", "").lower()
        return all(origin.lower().partition("://")[2] == own != "" for origin in origins)


def _plain(name: str) -> str:
    """Return a host's name as all who mean it write it; one dot at its end says that it is whole."""
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    """Whether a host is named by its IP address: no DNS can make that mean another one."""
    with contextlib.suppress(ValueError):
        if name.startswith("["):
            return ipaddress.IPv6Address(name[1:-1]) is not None
        return ipaddress.IPv4Address(name) is not None
    return False
