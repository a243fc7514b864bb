"""The Starlette application: routes, one error shape, the engine client's life.

No BaseHTTPMiddleware, ever: it hides disconnects.
"""

import contextlib
import gc
import http
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ringserve.server.api import control_routes, embeddings, model_routes, openai_routes, tokenize_routes
from ringserve.server.api.metrics_export import MetricsCollector, metrics
from ringserve.server.api.openapi import make_document
from ringserve.server.api.responses import routes as responses_routes
from ringserve.server.api.serving import Serving
from ringserve.server.errors import MethodNotAllowedError, NotFoundError, RequestError, ServerError, ShuttingDownError
from ringserve.server.http.endpoint import Endpoint
from ringserve.server.http.json_response import JsonResponse, error_response
from ringserve.server.http.request_id import echoed_header
from ringserve.server.rehearsal import rehearsals
from ringserve.server.telemetry.process_clock import ProcessClock

logger = logging.getLogger(__name__)

# New objects, and younger collections, before the next one of each age. Neither tokens nor requests make cyclic garbage
# (tests/server/generation/test_garbage.py). Small steps: a collection in a burst of requests costs each of them more
# CPU so, and holds the loop for far less at once.
_GC_THRESHOLDS = (5_000, 4, 50)
# How long a thread that renders or tokenizes keeps the GIL from the loop, which has to get it several times for each
# request: with four bodies of 15 MB the longest gap of /health is 50 ms, at Python's own 5 ms it is 130.
_SWITCH_INTERVAL_S = 0.001


class LoadResponse(msgspec.Struct):
    """What /load answers."""

    server_load: int  # sequences that the server has not ended
    num_requests_running: int
    num_requests_waiting: int


class VersionResponse(msgspec.Struct):
    """What /version answers."""

    version: str


def build_app(serving: Serving, *, has_dev_routes: bool = False) -> Starlette:
    """Return the application. Its life span starts the reader task, and ends the engine."""
    endpoints = (*ENDPOINTS, *control_routes.ENDPOINTS) if has_dev_routes else ENDPOINTS

    process_clock = ProcessClock()

    @contextlib.asynccontextmanager
    async def life_span(_: Starlette) -> AsyncIterator[None]:
        serving.llm.start()
        async with rehearsals(serving.llm):
            gc.collect()
            gc.freeze()  # what is there now stays: later collections need not look at it
            gc.set_threshold(*_GC_THRESHOLDS)
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            process_clock.start()
            yield
            process_clock.stop()
        await serving.llm.shutdown()

    app = Starlette(
        routes=[endpoint.route() for endpoint in endpoints],
        exception_handlers={
            ServerError: _server_error,
            HTTPException: _http_exception,
            Exception: _unexpected,
        },
        lifespan=life_span,
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    app.state.endpoints = endpoints
    app.state.metrics_collector = MetricsCollector(serving.llm, process_clock, serving.model_names[0])
    return app


async def health(request: Request) -> ASGIApp:
    """GET /health: 200 while the engine is well, 503 once it is dead or stuck."""
    await request.app.state.serving.llm.check_health()
    return Response()


async def ready(request: Request) -> ASGIApp:
    """GET /ready: 200 while new requests are taken; while the model loads nothing listens."""
    llm = request.app.state.serving.llm
    await llm.check_health()
    if llm.is_draining:
        raise ShuttingDownError("the server is shutting down")
    return Response()


async def load(request: Request) -> ASGIApp:
    """GET /load: requests that the server has not ended, and the engine's figures of the newest step."""
    llm = request.app.state.serving.llm
    return JsonResponse(LoadResponse(llm.num_live, llm.load.num_running, llm.load.num_waiting))


async def version(request: Request) -> ASGIApp:
    """GET /version."""
    return JsonResponse(VersionResponse(request.app.state.serving.version))


async def openapi(request: Request) -> ASGIApp:
    """GET /openapi.json."""
    return JsonResponse(make_document(request.app.state.endpoints, request.app.state.serving.version))


ENDPOINTS = (
    *openai_routes.ENDPOINTS,
    *responses_routes.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *tokenize_routes.ENDPOINTS,
    *model_routes.ENDPOINTS,
    Endpoint(path="/health", handler=health, summary="Say whether the engine is well", methods=("GET",)),
    Endpoint(path="/ready", handler=ready, summary="Say whether new requests are taken", methods=("GET",)),
    Endpoint(path="/ping", handler=health, summary="Do as /health", methods=("GET", "POST")),
    Endpoint(path="/load", handler=load, summary="Count live requests", methods=("GET",), answer=LoadResponse),
    Endpoint(path="/version", handler=version, summary="Name the version", methods=("GET",), answer=VersionResponse),
    Endpoint(
        path="/metrics", handler=metrics, summary="Count for Prometheus", methods=("GET",), media_type="text/plain"
    ),
    Endpoint(
        path="/openapi.json", handler=openapi, summary="Describe all of this", methods=("GET",), answer=dict[str, Any]
    ),
)


async def _server_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServerError)
    return error_response(error, echoed_header(request))


async def _http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    where = f"{request.method} {request.url.path}"
    error: ServerError
    if exc.status_code == http.HTTPStatus.NOT_FOUND:
        error = NotFoundError(f"there is no route {where}")
    elif exc.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
        error = MethodNotAllowedError(
            f"{where} is not allowed: use {(exc.headers or {}).get('Allow', 'another method')}"
        )
    else:
        error = RequestError(exc.detail)
        error.status = exc.status_code
    return error_response(error, dict(exc.headers or {}) | echoed_header(request))


async def _unexpected(request: Request, exc: Exception) -> Response:
    logger.error("a request failed unexpectedly", exc_info=exc)
    return error_response(ServerError("the server failed; its log has the details"), echoed_header(request))
