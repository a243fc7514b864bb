"""The OpenAI responses endpoints: create, count, retrieve, list input items, cancel, delete.

A response is stored when it has ended, completed, incomplete or failed, unless `store` is false. One whose client left
is not: it was aborted, and nobody was told its end.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from server.errors import NotFoundError, RequestError, shown
from server.input_processor import GenerateRequest, ProcessedRequest
from server.json_response import JsonResponse
from server.outputs import OutputKind
from server.request_body import read_body
from server.response_items import Item, chat_messages, new_id, normalize, turn_starts
from server.response_store import ResponseStore, StoredResponse, stored_response
from server.responses_protocol import ResponseRequest, deleted, item_list
from server.responses_stream import PlainParser, ResponseEvents
from server.sampling_params import SamplingParams
from server.serving import Serving, StreamResponse, collect
from server.sse import Ending

_MAX_LISTED = 100
# What the input processor's errors call a field, and what this endpoint does.
_FIELD_NAMES = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}


async def create(request: Request) -> ASGIApp:
    """POST /v1/responses."""
    serving: Serving = request.app.state.serving
    body = await _read(request)
    params = _sampling_params(body, serving)
    items = _conversation(serving.responses, body)
    serving.llm.check_admission(1)
    response_id = new_id("resp")
    processed = await _process(serving, body, items, response_id, params)
    events = ResponseEvents(
        _base(serving, body, response_id, params),
        PlainParser(),
        num_prompt_tokens=len(processed.prompt_token_ids),
        on_end=functools.partial(_keep, serving.responses, body, response_id, items),
    )
    if body.stream:
        return StreamResponse(serving.llm, [processed], events, None, Ending(b"", events.failure))
    answer = (await collect(serving.llm, [processed], request.receive))[0]
    events.num_cached_tokens = answer.num_cached_tokens
    return _json(events.whole(answer.outputs[0]))


async def count_input_tokens(request: Request) -> ASGIApp:
    """POST /v1/responses/input_tokens: what a request's input would count for, without running it."""
    serving: Serving = request.app.state.serving
    body = await _read(request)
    params = _sampling_params(body, serving)
    items = _conversation(serving.responses, body)
    processed = await _process(serving, body, items, new_id("resp"), params)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(processed.prompt_token_ids)})


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
    if not (limit.isdecimal() and 1 <= int(limit) <= _MAX_LISTED):
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


RESPONSES_ROUTES = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{id}", retrieve, methods=["GET"]),
    Route("/v1/responses/{id}", delete, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
]


async def _read(request: Request) -> ResponseRequest:
    serving: Serving = request.app.state.serving
    body = await read_body(request, ResponseRequest, serving.max_body_bytes)
    serving.check_model(body.model)
    body.check()
    return body


def _sampling_params(body: ResponseRequest, serving: Serving) -> SamplingParams:
    return body.sampling_params(serving.llm.model.sampling_defaults)


def _conversation(store: ResponseStore, body: ResponseRequest) -> list[Item]:
    """Return all items that the response is generated from: the previous responses', then the request's."""
    items = normalize(body.input)
    if body.previous_response_id is None:
        return items
    previous = store.get(body.previous_response_id)
    if previous is None:
        raise _not_found(body.previous_response_id, "previous_response_id")
    return previous.conversation() + items


async def _process(
    serving: Serving, body: ResponseRequest, items: list[Item], response_id: str, params: SamplingParams
) -> ProcessedRequest:
    """Return the engine's request, with the oldest turns left out where they do not fit and `truncation` allows it."""
    kind = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY

    async def process(start: int) -> ProcessedRequest:
        messages = [message.to_template() for message in chat_messages(body.instructions, items[start:])]
        prompt = await serving.llm.input_processor.render_chat(messages)
        return await serving.llm.input_processor.process(
            GenerateRequest(request_id=response_id, prompt=prompt, params=params, kind=kind, add_special_tokens=False)
        )

    with _own_field_names():
        if body.truncation != "auto":
            return await process(0)
        room = serving.llm.model.max_model_len - (body.max_output_tokens or 1)
        starts, low = [0, *turn_starts(items)], 0
        high = len(starts) - 1
        while low < high:  # the first start from which the rest fits
            middle = (low + high) // 2
            if await _fits(process(starts[middle]), room):
                high = middle
            else:
                low = middle + 1
        return await process(starts[low])


async def _fits(processing: Any, room: int) -> bool:
    try:
        processed: ProcessedRequest = await processing
    except RequestError as exc:
        if exc.param != "prompt":
            raise
        return False
    return len(processed.prompt_token_ids) <= room


@contextlib.contextmanager
def _own_field_names() -> Iterator[None]:
    """Have errors name the fields as this endpoint's clients know them."""
    try:
        yield
    except RequestError as exc:
        name = _FIELD_NAMES.get(exc.param or "")
        if name is None:
            raise
        raise RequestError(str(exc).replace(str(exc.param), name, 1), param=name) from exc


def _base(serving: Serving, body: ResponseRequest, response_id: str, params: SamplingParams) -> dict[str, Any]:
    """Return the response object without what the output decides."""
    return {
        "id": response_id, "object": "response", "created_at": int(time.time()), "model": serving.model_names[0],
        "store": _is_kept(serving.responses, body), **body.echo(params),
    }  # fmt: skip


def _is_kept(store: ResponseStore, body: ResponseRequest) -> bool:
    return store.is_enabled and body.store is not False


def _keep(store: ResponseStore, body: ResponseRequest, response_id: str, items: list[Item], response: bytes) -> None:
    if _is_kept(store, body):
        store.put(response_id, stored_response(response, items))


def _stored(request: Request) -> StoredResponse:
    serving: Serving = request.app.state.serving
    response_id: str = request.path_params["id"]
    stored = serving.responses.get(response_id)
    if stored is None:
        raise _not_found(response_id, "response_id")
    return stored


def _not_found(response_id: str, name: str) -> NotFoundError:
    return NotFoundError(
        f"{name} is {shown(response_id)}: there is no such response; it was never stored (store, "
        "--max-stored-responses), has been deleted, or had to make room for newer ones",
        param=name,
    )


def _json(response: bytes) -> Response:
    return Response(response, media_type="application/json")
