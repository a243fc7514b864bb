"""What the generating endpoints answer, as types: for /openapi.json. choices.py and chunks.py write the JSON itself."""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens` came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request, of all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(msgspec.Struct):
    """One candidate for a token's place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The sampled token, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """An entry for each token of a chat's answer."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Columns with an entry for each token of a completion."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionCall(msgspec.Struct):
    """`arguments` is JSON as a text; in a stream, a piece of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """One call of a tool; `index` in streams alone."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True):
    """The assistant's message; in a stream, what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct, kw_only=True):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChoice(_Choice, kw_only=True):
    """One of n answers."""

    message: Message
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_Choice, kw_only=True):
    """What is new of one of n answers."""

    delta: Message
    logprobs: ChatLogprobs | None


class CompletionChoice(_Choice, kw_only=True):
    """One completion, or what is new of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class _Answer(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None
    usage: Usage | None = None


class ChatCompletion(_Answer, kw_only=True):
    """What /v1/chat/completions answers."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(_Answer, kw_only=True):
    """What /v1/chat/completions streams."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class Completion(_Answer, kw_only=True):
    """What /v1/completions answers, and streams."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
