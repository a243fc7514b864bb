"""The control plane over HTTP, for developers: only with --enable-dev-routes. vLLM's paths, parameters and answers."""

import asyncio
import typing
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from ringserve.server.api.serving import Serving
from ringserve.server.errors import EngineCallError, NotFoundError, RequestError, ServerError, shown
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.http.body_errors import wrong_item
from ringserve.server.http.endpoint import Endpoint
from ringserve.server.http.json_response import JsonResponse

T = TypeVar("T", bound=msgspec.Struct)
PauseMode = Literal["abort", "wait", "keep"]


class InvalidUserInputError(RequestError):
    """An adapter's name cannot be had."""

    type = "InvalidUserInput"


class PauseQuery(msgspec.Struct, kw_only=True):
    """Of /pause."""

    mode: PauseMode = "abort"
    clear_cache: bool = True


class SleepQuery(msgspec.Struct, kw_only=True):
    """Of /sleep."""

    level: int = 1
    mode: PauseMode = "abort"


class WakeUpQuery(msgspec.Struct, kw_only=True):
    """Of /wake_up."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class ResetPrefixCacheQuery(msgspec.Struct, kw_only=True):
    """Of /reset_prefix_cache; there is no external cache to reset."""

    reset_running_requests: bool = False
    reset_external: bool = False


class StatusResponse(msgspec.Struct):
    """What /pause and /resume answer."""

    status: str


class SleepResponse(msgspec.Struct):
    """What /sleep answers."""

    status: str
    level: int


class WakeUpResponse(msgspec.Struct):
    """What /wake_up answers; `status` is "sleeping" while other parts sleep."""

    status: str
    tags: list[str] | None


class IsPausedResponse(msgspec.Struct):
    """What /is_paused answers."""

    is_paused: bool


class IsSleepingResponse(msgspec.Struct):
    """What /is_sleeping answers."""

    is_sleeping: bool


class SuccessResponse(msgspec.Struct):
    """What /reset_prefix_cache answers."""

    success: bool


class AbortRequestsRequest(msgspec.Struct, kw_only=True):
    """POST /abort_requests: ids as responses or X-Request-Id name them; none for all."""

    request_ids: list[str] | None = None


class AbortRequestsResponse(msgspec.Struct):
    """What /abort_requests answers."""

    status: str
    aborted: int


class CollectiveRpcRequest(msgspec.Struct, kw_only=True):
    """POST /collective_rpc: a method of the engine's fixed table."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None  # seconds


class CollectiveRpcResponse(msgspec.Struct):
    """What /collective_rpc answers: a result for each engine, of which there is one."""

    results: list[Any]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # not looked at


async def pause(request: Request) -> ASGIApp:
    """POST /pause."""
    query = _read_query(request, PauseQuery)
    await _llm(request).pause_generation(mode=query.mode, clear_cache=query.clear_cache)
    return JsonResponse(StatusResponse("paused"))


async def resume(request: Request) -> ASGIApp:
    """POST /resume."""
    await _llm(request).resume_generation()
    return JsonResponse(StatusResponse("resumed"))


async def is_paused(request: Request) -> ASGIApp:
    """GET /is_paused."""
    return JsonResponse(IsPausedResponse(await _llm(request).is_paused()))


async def sleep(request: Request) -> ASGIApp:
    """POST /sleep."""
    query = _read_query(request, SleepQuery)
    await _llm(request).sleep(query.level, mode=query.mode)
    return JsonResponse(SleepResponse("sleeping", query.level))


async def wake_up(request: Request) -> ASGIApp:
    """POST /wake_up."""
    tags: list[Any] | None = _read_query(request, WakeUpQuery).tags
    is_awake = await _llm(request).wake_up(tags)
    return JsonResponse(WakeUpResponse("awake" if is_awake else "sleeping", tags))


async def is_sleeping(request: Request) -> ASGIApp:
    """GET /is_sleeping."""
    return JsonResponse(IsSleepingResponse(await _llm(request).is_sleeping()))


async def reset_prefix_cache(request: Request) -> ASGIApp:
    """POST /reset_prefix_cache."""
    query = _read_query(request, ResetPrefixCacheQuery)
    success = await _llm(request).reset_prefix_cache(reset_running_requests=query.reset_running_requests)
    return JsonResponse(SuccessResponse(success))


async def abort_requests(request: Request) -> ASGIApp:
    """POST /abort_requests; without a body, all."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    body = AbortRequestsRequest()
    if has_body:
        body = await _serving(request).bodies.read(request, AbortRequestsRequest)
    return JsonResponse(AbortRequestsResponse("aborted", _llm(request).abort_requests(body.request_ids or None)))


async def collective_rpc(request: Request) -> ASGIApp:
    """POST /collective_rpc."""
    body = await _serving(request).bodies.read(request, CollectiveRpcRequest)
    try:
        async with asyncio.timeout(body.timeout):
            result = await _llm(request).call(body.method, *body.args, **body.kwargs)
    except TimeoutError as exc:
        raise EngineCallError(f"{body.method} was not done within the timeout of {body.timeout} s") from exc
    return JsonResponse(CollectiveRpcResponse([result]))


async def load_lora_adapter(request: Request) -> ASGIApp:
    """POST /v1/load_lora_adapter."""
    serving = _serving(request)
    body = await serving.bodies.read(request, LoadAdapterRequest)
    name = body.lora_name
    if not name or not body.lora_path:
        raise InvalidUserInputError("lora_name and lora_path must both be set", param="lora_name")
    if body.is_3d_lora_weight:
        raise RequestError("is_3d_lora_weight is true: only adapters of linear layers are supported")
    if name in serving.model_names or (name in serving.adapters and not body.load_inplace):
        raise InvalidUserInputError(f"lora_name is {shown(name)}: that is loaded already", param="lora_name")
    await serving.llm.load_lora_adapter(name, body.lora_path, load_inplace=body.load_inplace)
    if name not in serving.adapters:
        serving.adapters.append(name)
    return PlainTextResponse(f"Success: LoRA adapter {name!r} is loaded")


async def unload_lora_adapter(request: Request) -> ASGIApp:
    """POST /v1/unload_lora_adapter."""
    serving = _serving(request)
    name = (await serving.bodies.read(request, UnloadAdapterRequest)).lora_name
    if name not in serving.adapters:
        raise NotFoundError(f"lora_name is {shown(name)}: there is no such adapter", param="lora_name")
    serving.adapters.remove(name)  # at once, so that no request names it from here on
    try:
        await serving.llm.unload_lora_adapter(name)
    except ServerError as exc:
        if not isinstance(exc, NotFoundError):
            serving.adapters.append(name)
        raise
    return PlainTextResponse(f"Success: LoRA adapter {name!r} is unloaded")


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


def _llm(request: Request) -> AsyncLLM:
    return _serving(request).llm


def _read_query(request: Request, kind: type[T]) -> T:
    """Return the query parameters as a `kind`; unknown ones are ignored, of one given twice the last counts."""
    given = {}
    for field in msgspec.structs.fields(kind):
        values = request.query_params.getlist(field.name)
        is_list = any(typing.get_origin(each) is list for each in (field.type, *typing.get_args(field.type)))
        if values:
            given[field.name] = values if is_list else values[-1]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise wrong_item(given, "", kind, str(exc)) from exc


ENDPOINTS = (
    Endpoint(path="/pause", handler=pause, summary="Make no further tokens", query=PauseQuery, answer=StatusResponse),
    Endpoint(path="/resume", handler=resume, summary="Go on after /pause", answer=StatusResponse),
    Endpoint(
        path="/is_paused",
        handler=is_paused,
        summary="Say whether generation is paused",
        methods=("GET",),
        answer=IsPausedResponse,
    ),
    Endpoint(path="/sleep", handler=sleep, summary="Pause and free memory", query=SleepQuery, answer=SleepResponse),
    Endpoint(path="/wake_up", handler=wake_up, summary="Restore what sleeps", query=WakeUpQuery, answer=WakeUpResponse),
    Endpoint(
        path="/is_sleeping",
        handler=is_sleeping,
        summary="Say whether anything sleeps",
        methods=("GET",),
        answer=IsSleepingResponse,
    ),
    Endpoint(
        path="/reset_prefix_cache",
        handler=reset_prefix_cache,
        summary="Forget what the prefix cache holds",
        query=ResetPrefixCacheQuery,
        answer=SuccessResponse,
    ),
    Endpoint(
        path="/abort_requests",
        handler=abort_requests,
        summary="End requests",
        body=AbortRequestsRequest,
        answer=AbortRequestsResponse,
    ),
    Endpoint(
        path="/collective_rpc",
        handler=collective_rpc,
        summary="Call a method of the engine's table",
        body=CollectiveRpcRequest,
        answer=CollectiveRpcResponse,
    ),
    Endpoint(
        path="/v1/load_lora_adapter",
        handler=load_lora_adapter,
        summary="Serve a further LoRA adapter",
        body=LoadAdapterRequest,
        answer=str,
        media_type="text/plain",
    ),
    Endpoint(
        path="/v1/unload_lora_adapter",
        handler=unload_lora_adapter,
        summary="Stop serving a LoRA adapter",
        body=UnloadAdapterRequest,
        answer=str,
        media_type="text/plain",
    ),
)
