"""JSON responses, encoded by msgspec."""

from typing import Any

import msgspec
from starlette.responses import Response

from ringserve.server.errors import ServerError
from ringserve.server.http.sink import Headers


class JsonResponse(Response):
    """A JSON body: UTF-8, no NaN, no Infinity."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return msgspec.json.encode(content)


def error_response(error: ServerError, extra_headers: dict[str, str] | None = None) -> JsonResponse:
    """Return the one shape that every error has."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return JsonResponse(error.body(), status_code=error.status, headers=headers | (extra_headers or {}))


def error_headers(error: ServerError) -> Headers:
    """Return the headers of an error response."""
    headers: Headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return headers
