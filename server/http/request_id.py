"""The name by which a client knows its request: the header X-Request-Id, the body's `request_id`, or a fresh one.

A header is often a gateway's, and the client cannot change it: one that would not do as a name is logged and replaced.
"""

import logging
import re
import secrets

from starlette.requests import Request

from ringserve.server.errors import RequestError, shown

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[\w.:@/-]{1,128}", re.ASCII)


def request_id(request: Request, field: str | None) -> str:
    """Return a request's name.

    Args:
        request: Its header wins.
        field: The body's `request_id`.

    Raises:
        RequestError: If the body's is not made of plain letters.
    """
    header = request.headers.get(HEADER, "")
    if _REQUEST_ID.fullmatch(header):
        return header
    if field is not None and not _REQUEST_ID.fullmatch(field):
        raise RequestError(
            f"request_id is {shown(field)}: 1 to 128 letters, digits or any of _ . : @ / -", param="request_id"
        )
    name = field or secrets.token_hex(16)
    if header:
        logger.info("request %s: its X-Request-Id %s has other characters, or too many", name, shown(header))
    return name


def echoed_header(request: Request) -> dict[str, str]:
    """Return the header that an error response names its request by, if the request named itself well."""
    given = request.headers.get(HEADER, "")
    return {HEADER: given} if _REQUEST_ID.fullmatch(given) else {}
