"""The trace context that a request came with: its W3C headers, while its handler runs. Knows no OpenTelemetry."""

from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

TraceHeaders = dict[str, list[str]]  # traceparent and tracestate, as they came

_NAMES = (b"traceparent", b"tracestate")
_CURRENT: ContextVar[TraceHeaders | None] = ContextVar("trace_headers", default=None)


def current_trace_headers() -> TraceHeaders | None:
    """Return those of the request whose handler calls this; None where nothing is traced."""
    return _CURRENT.get()


class TraceHeadersLayer:
    """An ASGI layer around the application; there only where requests are traced.

    Tokens pass no layer: a stream writes to its transport. Set for each request, even to nothing: the task of one that
    waited in a pipeline inherits what the one before it had.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with the request's headers at hand."""
        if scope["type"] == "http":
            headers: TraceHeaders = {}
            for name, value in scope["headers"]:
                if name in _NAMES:
                    headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
            _CURRENT.set(headers)
        await self._app(scope, receive, send)
