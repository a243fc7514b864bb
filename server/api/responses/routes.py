"""The OpenAI responses endpoints: create, count, retrieve, list input items, cancel, delete.

A response is stored when it has ended, completed, incomplete or failed, unless `store` is false. One whose client left
is not: it was aborted, and nobody was told its end.
"""

import functools

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ringserve.server.api.render.logprob_format import ChatLogprobs
from ringserve.server.api.render.sse import Ending
from ringserve.server.api.response_store import StoredResponse, output_ids
from ringserve.server.api.responses import types
from ringserve.server.api.responses.plan import Plan, Prepared, make_plan, not_found, prepare
from ringserve.server.api.responses.protocol import ResponseRequest, deleted, item_list
from ringserve.server.api.responses.stream import PlainParser, ResponseEvents
from ringserve.server.api.serving import Serving, StreamResponse, collect, while_connected
from ringserve.server.errors import RequestError, shown
from ringserve.server.http.deadline import deadline_s
from ringserve.server.http.endpoint import Endpoint
from ringserve.server.http.json_response import JsonResponse
from ringserve.server.http.request_id import HEADER, request_id

_MAX_LISTED = 100


async def create(request: Request) -> ASGIApp:
    """POST /v1/responses."""
    serving: Serving = request.app.state.serving
    body = await _read(request)
    name = request_id(request, body.request_id)
    serving.llm.check_admission(1)
    ends_s = deadline_s(request, body.timeout_s)
    planning = make_plan(serving, body, arrival_ns=request.state.arrival_ns, deadline_s=ends_s)
    plan = await while_connected(request.receive, planning)
    prepared = await while_connected(request.receive, prepare(plan))
    events = _events(plan, prepared)
    if body.stream:
        ending = Ending(b"", events.failure)
        requests = [prepared.request]
        return StreamResponse(serving.llm, requests, events.reading, None, request_id=name, ending=ending)
    outputs = await collect(serving.llm, [prepared.request], request.receive)
    return _json(events.reading(outputs).whole(outputs[0].outputs[0]), {HEADER: name})


async def count_input_tokens(request: Request) -> ASGIApp:
    """POST /v1/responses/input_tokens: what a request's input would count for, without running it."""
    body = await _read(request)
    name = request_id(request, body.request_id)
    deadline_s(request, body.timeout_s)  # for its check: there is nothing to wait for
    prepared = await prepare(await make_plan(request.app.state.serving, body, arrival_ns=request.state.arrival_ns))
    count = len(prepared.request.prompt_token_ids)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count}, headers={HEADER: name})


async def retrieve(request: Request) -> ASGIApp:
    """GET /v1/responses/ID."""
    stored = _stored(request)
    if request.query_params.get("stream", "false") != "false":
        raise RequestError("stream is set: a response that has ended is not streamed again", param="stream")
    return _json(stored.response)


async def input_items(request: Request) -> ASGIApp:
    """GET /v1/responses/ID/input_items: those of the responses before it included, the newest first."""
    items = _stored(request).items()
    query = request.query_params
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LISTED):
        raise RequestError(f"limit is {shown(limit)}: must be from 1 to {_MAX_LISTED}", param="limit")
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {shown(order)}: must be asc or desc", param="order")
    return JsonResponse(item_list(items, limit=int(limit), after=query.get("after"), is_ascending=order == "asc"))


async def cancel(request: Request) -> ASGIApp:
    """POST /v1/responses/ID/cancel: refused, as OpenAI does for a response that does not run in the background."""
    _stored(request)
    raise RequestError("this response has ended, and none runs in the background: close a stream's connection instead")


async def delete(request: Request) -> ASGIApp:
    """DELETE /v1/responses/ID."""
    serving: Serving = request.app.state.serving
    _stored(request)
    response_id: str = request.path_params["id"]
    serving.responses.delete(response_id)
    return JsonResponse(deleted(response_id))


ENDPOINTS = (
    Endpoint(
        path="/v1/responses",
        handler=create,
        summary="Make a response",
        body=ResponseRequest,
        answer=types.Response,
        event=types.ResponseEvent,
    ),
    Endpoint(
        path="/v1/responses/input_tokens",
        handler=count_input_tokens,
        summary="Count what a response's input has",
        body=ResponseRequest,
        answer=types.InputTokens,
    ),
    Endpoint(
        path="/v1/responses/{id}",
        handler=retrieve,
        summary="Return a response",
        methods=("GET",),
        answer=types.Response,
    ),
    Endpoint(
        path="/v1/responses/{id}",
        handler=delete,
        summary="Delete a response",
        methods=("DELETE",),
        answer=types.DeletedResponse,
    ),
    Endpoint(path="/v1/responses/{id}/cancel", handler=cancel, summary="Refuse: none runs in the background"),
    Endpoint(
        path="/v1/responses/{id}/input_items",
        handler=input_items,
        summary="List what a response was made from",
        methods=("GET",),
        answer=types.ItemList,
    ),
)


async def _read(request: Request) -> ResponseRequest:
    serving: Serving = request.app.state.serving
    body = await serving.bodies.read(request, ResponseRequest)
    serving.check_model(body.model)
    body.check()
    return body


def _events(plan: Plan, prepared: Prepared) -> ResponseEvents:
    serving, body = plan.serving, plan.body
    tokenizer = serving.llm.model.tokenizer
    identity = serving.identity(plan.response_id, body.model)
    base = {
        "id": identity.response_id, "object": "response", "created_at": identity.created, "model": identity.model,
        "store": plan.stored_items is not None, **body.repeated(plan.params),
    }  # fmt: skip
    return ResponseEvents(
        base,
        PlainParser() if prepared.parsing is None else prepared.parsing.parser(),
        num_prompt_tokens=len(prepared.request.prompt_token_ids),
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        on_end=functools.partial(_keep, plan),
        logprobs=ChatLogprobs(tokenizer.names) if body.wants_logprobs else None,
    )


def _keep(plan: Plan, response: bytes) -> None:
    if plan.stored_items is not None:
        item_ids = (*output_ids(response), *plan.item_ids)
        plan.serving.responses.put(plan.response_id, StoredResponse(response, plan.stored_items, item_ids))


def _stored(request: Request) -> StoredResponse:
    serving: Serving = request.app.state.serving
    response_id: str = request.path_params["id"]
    stored = serving.responses.get(response_id)
    if stored is None:
        raise not_found(response_id, "response_id")
    return stored


def _json(response: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(response, media_type="application/json", headers=headers)
