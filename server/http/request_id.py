"""The name by which a client knows its request: the header X-Request-Id, the body's `request_id`, or a fresh one."""

import re
import secrets

from starlette.requests import Request

from ringserve.server.errors import RequestError

HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[\w.:@/-]{1,128}", re.ASCII)


def request_id(request: Request, field: str | None) -> str:
    """Return a request's name.

    Args:
        request: Its header wins.
        field: The body's `request_id`.

    Raises:
        RequestError: If the name is not made of plain letters.
    """
    header = request.headers.get(HEADER)
    given, name = (header, "X-Request-Id") if header else (field, "request_id")
    if given is None:
        return secrets.token_hex(16)
    if not _REQUEST_ID.fullmatch(given):
        raise RequestError(f"{name} is {given[:140]!r}: 1 to 128 letters, digits or any of _ . : @ / -", param=name)
    return given


def echoed_header(request: Request) -> dict[str, str]:
    """Return the header that an error response names its request by, if the request named itself well."""
    given = request.headers.get(HEADER, "")
    return {HEADER: given} if _REQUEST_ID.fullmatch(given) else {}
