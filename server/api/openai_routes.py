"""The OpenAI endpoints: read and validate a request, then stream or collect it (serving.py)."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ringserve.server.api.chat_request import ChatCompletionRequest
from ringserve.server.api.completion_request import CompletionRequest
from ringserve.server.api.render.answer_types import ChatCompletion, ChatCompletionChunk, Completion
from ringserve.server.api.render.choices import Answer, chat_answer, completion_answer
from ringserve.server.api.render.chunks import (
    ChatChunks,
    ChunkFormat,
    CompletionChunks,
    LogprobFormat,
    Shown,
    StreamIdentity,
)
from ringserve.server.api.render.echo import Echo, EchoChunks, PromptSource
from ringserve.server.api.render.logprob_format import ChatLogprobs, CompletionLogprobs
from ringserve.server.api.render.parsed_chunks import ParsedChunks, parsed_choice
from ringserve.server.api.serving import Serving, StreamResponse, collect, while_connected
from ringserve.server.chat.parser import ChatParsing
from ringserve.server.chat.tool_grammar import answer_grammar
from ringserve.server.generation.input_processor import GenerateRequest, ProcessedRequest, Truncation
from ringserve.server.generation.outputs import OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.grammar.structured_output import has_structure
from ringserve.server.http.deadline import deadline_s
from ringserve.server.http.endpoint import Endpoint
from ringserve.server.http.json_response import JsonResponse
from ringserve.server.http.request_id import HEADER, request_id
from ringserve.server.text.token_names import TokenNames
from ringserve.server.workers import run_near


@dataclass(frozen=True, kw_only=True, slots=True)
class _Endpoint:
    """What differs between the two generating endpoints."""

    id_prefix: str
    chunks: Callable[[StreamIdentity, Shown], ChunkFormat]
    logprobs: Callable[[TokenNames], LogprobFormat]
    answer: Callable[[Answer], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompts:
    """A request's prompts, and what is special about them."""

    prompts: list[str | list[int]]
    name: str  # the field that they stand in
    add_special_tokens: bool
    echoed: list[str] | None  # what `echo` shows of each; None: no echo


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    """When a request was read, time.monotonic_ns(), and when it must end, time.monotonic(); None: at any time."""

    arrival_ns: int
    deadline_s: float | None


async def chat_completions(request: Request) -> ASGIApp:
    """POST /v1/chat/completions."""
    serving: Serving = request.app.state.serving
    body = await serving.bodies.read(request, ChatCompletionRequest)
    serving.check_model(body.model)
    body.check()
    defaults = serving.llm.model.sampling_defaults
    params = body.sampling_params(body.token_limit(), defaults, logprobs=body.num_logprobs())
    use = body.tool_use()
    prompt = await serving.chat.prompt_of(body, use)
    serving.llm.check_admission(params.n)
    text = await serving.llm.input_processor.render_chat(prompt)
    echoed = [body.echoed_text(prompt)] if body.echo else None
    prompts = _Prompts(prompts=[text], name="messages", add_special_tokens=bool(body.add_special_tokens), echoed=echoed)
    parsing = serving.chat.parsing(use, text, include_reasoning=body.include_reasoning is not False)
    if parsing is None:
        return await _answer(request, body, _CHAT, params, prompts)
    form = await while_connected(request.receive, serving.llm.input_processor.grammars.find(body))
    special_token_id = serving.llm.model.tokenizer.special_token_id
    grammar = await asyncio.to_thread(answer_grammar, use, parsing, form, special_token_id)
    params = replace(params, shown_special_tokens=parsing.markers, grammar=grammar)
    return await _answer(request, body, _parsed_chat(parsing), params, prompts)


async def completions(request: Request) -> ASGIApp:
    """POST /v1/completions."""
    serving: Serving = request.app.state.serving
    body = await serving.bodies.read(request, CompletionRequest)
    serving.check_model(body.model)
    body.check()
    params = body.sampling_params(body.token_limit(), serving.llm.model.sampling_defaults, logprobs=body.logprobs)
    given = body.prompts()
    serving.llm.check_admission(params.n * len(given))
    echoed = None
    if body.echo:
        params = _with_prompt_logprobs(params)
        echoed = await asyncio.to_thread(_texts, serving, given, params.skip_special_tokens)
    prompts = _Prompts(
        prompts=given, name="prompt", add_special_tokens=body.add_special_tokens is not False, echoed=echoed
    )
    return await _answer(request, body, _COMPLETION, params, prompts)


async def _answer(
    request: Request,
    body: ChatCompletionRequest | CompletionRequest,
    endpoint: _Endpoint,
    params: SamplingParams,
    prompts: _Prompts,
) -> ASGIApp:
    """Generate for each prompt; return the response that streams the choices, or that holds them all."""
    serving: Serving = request.app.state.serving
    name = request_id(request, body.request_id)
    identity = serving.identity(f"{endpoint.id_prefix}-{name}", body.model)
    if not params.grammar and has_structure(body):
        grammar = await while_connected(request.receive, serving.llm.input_processor.grammars.find(body))
        params = replace(params, grammar=grammar)
    times = _Times(arrival_ns=request.state.arrival_ns, deadline_s=deadline_s(request, body.timeout_s))
    processing = _process(serving, body, identity.response_id, params, prompts, times)
    requests = await (while_connected(request.receive, processing) if params.grammar else processing)
    names = _names(serving, body)
    shown = _shown(body, requests, endpoint.logprobs(names) if params.logprobs is not None else None)
    if body.stream:
        form_of = functools.partial(_chunk_format, endpoint.chunks(identity, shown), prompts.echoed, params.n)
        return StreamResponse(serving.llm, requests, form_of, body.stream_options, request_id=name)
    outputs = await collect(serving.llm, requests, request.receive)
    if prompts.echoed is not None:
        Echo(prompts.echoed, outputs, params.n).prepend_all(outputs)
    answer = Answer(
        identity=identity, requests=requests, outputs=outputs, shown=shown, names=names,
        num_prompt_logprobs=body.prompt_logprobs,
    )  # fmt: skip
    is_long = shown.logprobs is not None or answer.num_prompt_logprobs is not None
    content = await run_near(not is_long, endpoint.answer, answer)
    return JsonResponse(content, headers={HEADER: name})


def _chunk_format(
    form: ChunkFormat, echoed: list[str] | None, n: int, collectors: Sequence[PromptSource]
) -> ChunkFormat:
    """Return how a stream's chunks look; with `echo`, the prompts come first."""
    return form if echoed is None else EchoChunks(form, Echo(echoed, collectors, n))


async def _process(
    serving: Serving,
    body: ChatCompletionRequest | CompletionRequest,
    response_id: str,
    params: SamplingParams,
    prompts: _Prompts,
    times: _Times,
) -> list[ProcessedRequest]:
    truncation = Truncation.of(body.truncate_prompt_tokens, body.truncation_side)
    return await serving.llm.input_processor.process_all(
        [
            GenerateRequest(
                request_id=response_id,
                prompt=prompt,
                params=params,
                kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
                add_special_tokens=prompts.add_special_tokens,
                first_index=i * params.n,
                truncation=truncation,
                name=prompts.name,
                limit_name=body.limit_name,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                arrival_ns=times.arrival_ns,
                deadline_s=times.deadline_s,
                adapter=serving.adapter(body.model),
            )
            for i, prompt in enumerate(prompts.prompts)
        ]
    )


def _shown(
    body: ChatCompletionRequest | CompletionRequest, requests: list[ProcessedRequest], logprobs: LogprobFormat | None
) -> Shown:
    has_ids = bool(body.return_token_ids)
    prompt_ids = [request.prompt_token_ids for request in requests] if has_ids else None
    n = requests[0].params.n
    return Shown(logprobs=logprobs, token_ids=has_ids, prompt_token_ids=prompt_ids, sequences_per_prompt=n)


def _names(serving: Serving, body: ChatCompletionRequest | CompletionRequest) -> TokenNames:
    tokenizer = serving.llm.model.tokenizer
    return tokenizer.id_names if body.return_tokens_as_token_ids else tokenizer.names


def _parsed_chat(parsing: ChatParsing) -> _Endpoint:
    """Return the chat endpoint of a request whose answers have tool calls or reasoning."""
    return replace(
        _CHAT,
        chunks=functools.partial(ParsedChunks, parsing=parsing),
        answer=functools.partial(chat_answer, choice=functools.partial(parsed_choice, parsing)),
    )


def _with_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a request with echo: where it wants logprobs, it wants those of its prompt too."""
    if params.logprobs is None:
        return params
    return replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))


def _texts(serving: Serving, prompts: list[str | list[int]], skip_special_tokens: bool) -> list[str]:
    """Return the prompts as `echo` shows them.

    Raises:
        RequestError: If one has what is no token id.
    """
    decode = serving.llm.model.tokenizer.decode
    for prompt in prompts:
        if not isinstance(prompt, str):
            serving.llm.input_processor.check_token_ids("prompt", prompt)
    return [p if isinstance(p, str) else decode(p, skip_special_tokens=skip_special_tokens) for p in prompts]


_CHAT = _Endpoint(id_prefix="chatcmpl", chunks=ChatChunks, logprobs=ChatLogprobs, answer=chat_answer)
_COMPLETION = _Endpoint(
    id_prefix="cmpl", chunks=CompletionChunks, logprobs=CompletionLogprobs, answer=completion_answer
)

ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions",
        handler=chat_completions,
        summary="Answer a chat",
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
    ),
    Endpoint(
        path="/v1/completions",
        handler=completions,
        summary="Complete prompts",
        body=CompletionRequest,
        answer=Completion,
        event=Completion,
    ),
)
