"""The OpenAI endpoints: /v1/chat/completions, /v1/completions, /v1/models."""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from server.chunks import ChatChunks, ChunkFormat, CompletionChunks, StreamIdentity
from server.errors import RequestError
from server.input_processor import GenerateRequest, ProcessedRequest
from server.json_response import JsonResponse
from server.openai_protocol import DEFAULT_COMPLETION_TOKENS, ChatCompletionRequest, CompletionRequest
from server.outputs import CompletionOutput, OutputKind, RequestOutput
from server.request_body import read_body
from server.sampling_params import SamplingParams
from server.serving import Serving, StreamResponse, collect

_REQUEST_ID = re.compile(r"[\w.:@/-]{1,128}")


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """What differs between the two generating endpoints' answers."""

    id_prefix: str
    object: str
    chunks: Callable[[StreamIdentity], ChunkFormat]
    choice: Callable[[CompletionOutput], dict[str, Any]]


async def chat_completions(request: Request) -> ASGIApp:
    """POST /v1/chat/completions."""
    serving: Serving = request.app.state.serving
    body = await read_body(request, ChatCompletionRequest, serving.max_body_bytes)
    serving.check_model(body.model)
    body.check()
    params = body.sampling_params(body.token_limit(), serving.llm.model.sampling_defaults)
    params = replace(params, grammar=await serving.llm.input_processor.grammars.find(body))
    messages = body.template_messages()
    serving.llm.check_admission(params.n)
    prompt = await serving.llm.input_processor.render_chat(messages)
    return await _answer(request, body, _CHAT, params, [prompt], add_special_tokens=False)


async def completions(request: Request) -> ASGIApp:
    """POST /v1/completions."""
    serving: Serving = request.app.state.serving
    body = await read_body(request, CompletionRequest, serving.max_body_bytes)
    serving.check_model(body.model)
    body.check()
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(max_tokens, serving.llm.model.sampling_defaults)
    params = replace(params, grammar=await serving.llm.input_processor.grammars.find(body))
    prompts = body.prompts()
    serving.llm.check_admission(params.n * len(prompts))
    add_special_tokens = body.add_special_tokens is not False
    return await _answer(request, body, _COMPLETION, params, prompts, add_special_tokens=add_special_tokens)


async def models(request: Request) -> ASGIApp:
    """GET /v1/models."""
    serving: Serving = request.app.state.serving
    return JsonResponse({"object": "list", "data": [_card(serving, name) for name in serving.model_names]})


async def model(request: Request) -> ASGIApp:
    """GET /v1/models/NAME."""
    serving: Serving = request.app.state.serving
    name = request.path_params["name"]
    serving.check_model(name)
    return JsonResponse(_card(serving, name))


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name:path}", model, methods=["GET"]),
]


async def _answer(
    request: Request,
    body: ChatCompletionRequest | CompletionRequest,
    endpoint: _Endpoint,
    params: SamplingParams,
    prompts: list[str | list[int]],
    *,
    add_special_tokens: bool,
) -> ASGIApp:
    """Generate for each prompt; return the response that streams the choices, or that holds them all."""
    serving: Serving = request.app.state.serving
    response_id = f"{endpoint.id_prefix}-{_request_id(request, body.request_id)}"
    processed = await serving.llm.input_processor.process_all(
        [
            GenerateRequest(
                request_id=response_id,
                prompt=prompt,
                params=params,
                kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
                add_special_tokens=add_special_tokens,
                first_index=i * params.n,
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    identity = serving.identity(response_id)
    if body.stream:
        return StreamResponse(serving.llm, processed, endpoint.chunks(identity), body.stream_options)
    outputs = await collect(serving.llm, processed, request.receive)
    return JsonResponse(_response(identity, endpoint, processed, outputs))


def _request_id(request: Request, field: str | None) -> str:
    given = request.headers.get("x-request-id") or field
    if given is None:
        return secrets.token_hex(16)
    if not _REQUEST_ID.fullmatch(given):
        raise RequestError(
            f"request_id is {given[:140]!r}: 1 to 128 letters, digits or any of _ . : @ / -", param="request_id"
        )
    return given


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": serving.created, "owned_by": "ringserve",
        "root": serving.model_names[0], "parent": None, "max_model_len": serving.llm.model.max_model_len,
    }  # fmt: skip


def _response(
    identity: StreamIdentity, endpoint: _Endpoint, requests: list[ProcessedRequest], outputs: list[RequestOutput]
) -> dict[str, Any]:
    choices = [endpoint.choice(output) for request_output in outputs for output in request_output.outputs]
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    completion_tokens = sum(len(output.token_ids) for request_output in outputs for output in request_output.outputs)
    usage = {
        "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens, "prompt_tokens_details": None,
    }  # fmt: skip
    return {
        "id": identity.response_id, "object": endpoint.object, "created": identity.created, "model": identity.model,
        "choices": choices, "service_tier": None, "system_fingerprint": identity.fingerprint, "usage": usage,
    }  # fmt: skip


def _chat_choice(output: CompletionOutput) -> dict[str, Any]:
    message = {
        "role": "assistant", "content": output.text, "refusal": None, "annotations": None, "audio": None,
        "function_call": None,
    }  # fmt: skip
    return {
        "index": output.index, "message": message, "logprobs": None, "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason, "token_ids": None,
    }  # fmt: skip


def _completion_choice(output: CompletionOutput) -> dict[str, Any]:
    return {
        "index": output.index, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason, "token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None,
    }  # fmt: skip


_CHAT = _Endpoint("chatcmpl", "chat.completion", ChatChunks, _chat_choice)
_COMPLETION = _Endpoint("cmpl", "text_completion", CompletionChunks, _completion_choice)
