"""Deadlines that clients set: the header X-Request-Timeout, or the body's `timeout_s`. The earlier one counts.

A request that meets its deadline ends as one that was aborted: what is there is its answer, finish reason abort, and
the engine drops it at once. It may still wait for its turn then; its answer is empty. Embeddings come whole or not at
all: 408.
"""

from starlette.requests import Request

from ringserve.server.errors import RequestError, shown

HEADER = "x-request-timeout"
MAX_S = 1e6


def deadline_s(request: Request, field: float | None) -> float | None:
    """Return when a request ends, on time.monotonic()'s clock; None: no deadline.

    Args:
        request: Its header counts; its `state.arrival_ns` is when the time begins.
        field: The body's `timeout_s`.

    Raises:
        RequestError: If either is no time.
    """
    limits = [] if field is None else [_checked(field, "timeout_s")]
    if (header := request.headers.get(HEADER)) is not None:
        limits.append(_checked(header, "X-Request-Timeout"))
    return request.state.arrival_ns / 1e9 + min(limits) if limits else None


def _checked(value: float | str, name: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_S:  # NaN too
        raise RequestError(f"{name} is {shown(value)}: must be seconds, above 0 and at most {MAX_S:g}", param=name)
    return seconds
