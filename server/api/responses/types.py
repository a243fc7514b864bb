"""What the responses endpoints answer and stream, as types: for /openapi.json. responses_stream.py writes the JSON."""

from typing import Any, Literal

import msgspec

from ringserve.server.api.render.answer_types import TokenLogprob
from ringserve.server.api.responses.protocol import TextFormat, Tool, ToolChoice

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """A part of what a client has said."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    """A part of what the model has said; `logprobs` only where it said that in this response."""

    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A part of what the model has thought."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A part of a summary of that, which a client has sent; this server makes none."""

    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """Something said."""

    id: str
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """Something thought; `status` only where it was thought in this response."""

    id: str
    status: ItemStatus | None = None
    summary: list[ReasoningText | SummaryText]
    content: list[ReasoningText | SummaryText]
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call of a tool; `arguments` is JSON as a text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True):
    """What a call came to."""

    id: str
    status: ItemStatus
    call_id: str
    output: str | list[InputText]


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens` came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens` were thought."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class UsedText(msgspec.Struct):
    """`text`, as it was used."""

    format: TextFormat
    verbosity: str


class UsedReasoning(msgspec.Struct):
    """`reasoning`, as it was used."""

    effort: str | None
    summary: None


class Response(msgspec.Struct, kw_only=True):
    """What /v1/responses answers: the output, and what the request asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: UsedReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: UsedText
    tool_choice: Literal["none", "auto", "required"] | ToolChoice
    tools: list[Tool]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None


class InputTokens(msgspec.Struct):
    """What /v1/responses/input_tokens answers."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(msgspec.Struct):
    """A page of what a response was made from."""

    object: Literal["list"]
    data: list[OutputItem | FunctionCallOutputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct):
    """What a deletion answers."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class _Event(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int


class _Whole(_Event, kw_only=True):
    response: Response


class ResponseCreated(_Whole, tag="response.created"):
    """The first event."""


class ResponseInProgress(_Whole, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(_Whole, tag="response.completed"):
    """The last event, where the model ended by itself."""


class ResponseIncomplete(_Whole, tag="response.incomplete"):
    """The last event, where the tokens ran out."""


class ResponseFailed(_Whole, tag="response.failed"):
    """The last event, after an error."""


class StreamError(_Event, tag="error", kw_only=True):
    """What went wrong."""

    code: str
    message: str
    param: str | None


class _ItemEvent(_Event, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_ItemEvent, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_ItemEvent, tag="response.output_item.done"):
    """An item has ended."""


class _InItem(_Event, kw_only=True):
    item_id: str
    output_index: int


class _InPart(_InItem, kw_only=True):
    content_index: int


class ContentPartAdded(_InPart, tag="response.content_part.added", kw_only=True):
    """A part of an item begins."""

    part: OutputText | ReasoningText


class ContentPartDone(_InPart, tag="response.content_part.done", kw_only=True):
    """A part of an item has ended."""

    part: OutputText | ReasoningText


class OutputTextDelta(_InPart, tag="response.output_text.delta", kw_only=True):
    """More text."""

    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_InPart, tag="response.output_text.done", kw_only=True):
    """The whole text."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(_InPart, tag="response.reasoning_text.delta", kw_only=True):
    """More of a thought."""

    delta: str


class ReasoningTextDone(_InPart, tag="response.reasoning_text.done", kw_only=True):
    """The whole thought."""

    text: str


class FunctionCallArgumentsDelta(_InItem, tag="response.function_call_arguments.delta", kw_only=True):
    """More of a call's arguments."""

    delta: str


class FunctionCallArgumentsDone(_InItem, tag="response.function_call_arguments.done", kw_only=True):
    """A call's arguments."""

    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | StreamError
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
)
