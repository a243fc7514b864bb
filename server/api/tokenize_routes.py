"""POST /tokenize and /detokenize, with vLLM's bodies: both on a thread where there is much to do."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ringserve.server.api.chat_request import ChatCompletionRequest
from ringserve.server.api.serving import Serving
from ringserve.server.chat.messages import ChatMessage
from ringserve.server.chat.tools import Tool
from ringserve.server.errors import RequestError
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.http.endpoint import Endpoint
from ringserve.server.http.json_response import JsonResponse
from ringserve.server.text.tokenizer import check_text_size
from ringserve.server.workers import run_near

_INLINE_ITEMS = 4096  # characters or token ids; more are processed on a thread: so many take about a millisecond


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for a chat
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None

    def chat(self) -> ChatCompletionRequest:
        """Return the chat completion request whose prompt is asked about."""
        chat = ChatCompletionRequest(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            documents=self.documents,
            tools=self.tools,
        )
        chat.check()
        return chat


class TokenizeResponse(msgspec.Struct):
    """What /tokenize answers."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    """What /detokenize answers."""

    prompt: str


async def tokenize(request: Request) -> ASGIApp:
    """POST /tokenize."""
    serving: Serving = request.app.state.serving
    body = await serving.bodies.read(request, TokenizeRequest)
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt and messages are both set, or neither: send one of them", param="prompt")
    text, add_special_tokens = body.prompt, body.add_special_tokens is not False
    if text is None:
        text, add_special_tokens = await _render(serving, body.chat()), bool(body.add_special_tokens)
    check_text_size(text, "prompt")
    with_strings = bool(body.return_token_strs)
    is_short = len(text) <= _INLINE_ITEMS
    return JsonResponse(await run_near(is_short, _tokenize, serving.llm.model, text, add_special_tokens, with_strings))


async def detokenize(request: Request) -> ASGIApp:
    """POST /detokenize."""
    serving: Serving = request.app.state.serving
    body = await serving.bodies.read(request, DetokenizeRequest)
    serving.check_model(body.model)
    is_short = len(body.tokens) <= _INLINE_ITEMS
    return JsonResponse(await run_near(is_short, _detokenize, serving.llm, body.tokens))


async def _render(serving: Serving, chat: ChatCompletionRequest) -> str:
    return await serving.llm.input_processor.render_chat(await serving.chat.prompt_of(chat, chat.tool_use()))


def _tokenize(model: ModelInfo, text: str, add_special_tokens: bool, with_strings: bool) -> TokenizeResponse:
    token_ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    strings = model.tokenizer.token_strings(token_ids) if with_strings else None
    return TokenizeResponse(len(token_ids), model.max_model_len, token_ids, strings)


def _detokenize(llm: AsyncLLM, token_ids: list[int]) -> DetokenizeResponse:
    llm.input_processor.check_token_ids("tokens", token_ids)
    return DetokenizeResponse(llm.model.tokenizer.decode(token_ids, skip_special_tokens=False))


ENDPOINTS = (
    Endpoint(
        path="/tokenize",
        handler=tokenize,
        summary="Return a text's or a chat's token ids",
        body=TokenizeRequest,
        answer=TokenizeResponse,
    ),
    Endpoint(
        path="/detokenize",
        handler=detokenize,
        summary="Return token ids' text",
        body=DetokenizeRequest,
        answer=DetokenizeResponse,
    ),
)
