"""One entry of the route table: what Starlette's route and the path in /openapi.json are both made from."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A path, who answers it, and the types of what goes in and out."""

    path: str  # as Starlette writes it
    handler: Handler
    summary: str
    methods: tuple[str, ...] = ("POST",)
    query: Any = None  # msgspec.Struct of its query parameters; None: it takes none
    body: Any = None  # type of the request's JSON; None: it has no body
    answer: Any = None  # type of the response's JSON; None: there is none
    event: Any = None  # type of each event's JSON where the request asks for a stream; None: it cannot
    media_type: str = "application/json"  # of an answer

    def route(self) -> Route:
        """Return Starlette's route."""
        return Route(self.path, self.handler, methods=list(self.methods))
