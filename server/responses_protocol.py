"""The body of POST /v1/responses: strict types, unknown fields ignored, unsupported ones refused by name."""

from typing import Any, Literal

import msgspec

from server.errors import RequestError, shown
from server.response_items import Item
from server.sampling_params import SamplingParams

LOGPROBS = "message.output_text.logprobs"
_MAX_METADATA = 16
_MAX_TOP_LOGPROBS = 20

# What `include` may name; all but logprobs belong to hosted tools, images and encryption, which outputs never have.
_INCLUDABLE = frozenset((
    LOGPROBS, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
))  # fmt: skip

# Fields that change the answer and are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "prompt": (),
}


class TextFormat(msgspec.Struct, omit_defaults=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class StreamOptions(msgspec.Struct):
    """`stream_options`: events are never padded to obfuscate their size."""

    include_obfuscation: bool | None = None


class Tool(msgspec.Struct):
    """One of `tools`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """Return the tool as chat completions know it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """`tool_choice` as an object."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    # not OpenAI's: vLLM's
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # refused
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    moderation: Any = None
    prompt: Any = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the output's tokens are to have logprobs."""
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Refuse what is not supported or out of its range.

        Raises:
            RequestError: Naming the field.
        """
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise RequestError(
                    f"{name} is {shown(value)}: this server does not support it, leave it out", param=name
                )
        for i, name in enumerate(self.include or ()):
            if name not in _INCLUDABLE:
                raise RequestError(
                    f"include[{i}] is {shown(name)}: must be one of {', '.join(sorted(_INCLUDABLE))}", param="include"
                )
        self._check_ranges()
        self._check_text()
        self._check_tools()

    def sampling_params(self, defaults: dict[str, float]) -> SamplingParams:
        """Return the request's parameters: its own values, else the model's, else OpenAI's.

        Raises:
            RequestError: If a value is out of its range.
        """
        names = (
            "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output", "ignore_eos",
            "skip_special_tokens",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        stop_token_ids = tuple(self.stop_token_ids or ())
        return SamplingParams(
            **{**defaults, **given}, max_tokens=self.max_output_tokens, stop=stop, stop_token_ids=stop_token_ids
        )

    def echo(self, params: SamplingParams) -> dict[str, Any]:
        """Return what the response object repeats of the request, with the values that were used."""
        text, reasoning = self.text or TextConfig(), self.reasoning or ReasoningConfig()
        return {
            "background": False, "error": None, "incomplete_details": None, "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens, "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {}, "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id, "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier, "service_tier": self.service_tier or "default",
            "temperature": params.temperature,
            "text": {"format": text.format or TextFormat("text"), "verbosity": text.verbosity or "medium"},
            "tool_choice": self.tool_choice or "auto", "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0, "top_p": params.top_p,
            "truncation": self.truncation or "disabled", "user": self.user,
        }  # fmt: skip

    def chat_tools(self) -> list[dict[str, Any]]:
        """Return the tools as chat completions know them."""
        return [tool.to_chat() for tool in self.tools or ()]

    def chat_tool_choice(self) -> str | dict[str, Any] | None:
        """Return tool_choice as chat completions know it."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return choice
        if choice.type == "function":
            return {"type": "function", "function": {"name": choice.name}}
        tools = [{"type": "function", "function": {"name": tool.get("name")}} for tool in choice.tools or ()]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": tools}}

    def _check_ranges(self) -> None:
        _check(
            self.max_output_tokens is None or self.max_output_tokens >= 1, "max_output_tokens", self.max_output_tokens,
            "must be at least 1",
        )  # fmt: skip
        limit = _MAX_TOP_LOGPROBS
        _check(0 <= (self.top_logprobs or 0) <= limit, "top_logprobs", self.top_logprobs, f"must be from 0 to {limit}")
        metadata = self.metadata or {}
        is_small = len(metadata) <= _MAX_METADATA and all(len(k) <= 64 and len(v) <= 512 for k, v in metadata.items())
        _check(
            is_small, "metadata", metadata,
            f"at most {_MAX_METADATA} pairs, keys of at most 64 and values of at most 512 characters",
        )  # fmt: skip

    def _check_text(self) -> None:
        text = self.text or TextConfig()
        _check(
            text.verbosity in (None, "medium"), "text.verbosity", text.verbosity,
            "this server does not support it, leave it out",
        )  # fmt: skip
        form = text.format
        if form is not None and form.type == "json_schema":
            _check(form.schema is not None, "text.format.schema", form.schema, "json_schema needs a schema")
            _check(form.name is not None, "text.format.name", form.name, "json_schema needs a name")

    def _check_tools(self) -> None:
        for i, tool in enumerate(self.tools or ()):
            _check(
                tool.type == "function", f"tools[{i}].type", tool.type,
                "this server has no tools of its own, only the client's functions",
            )  # fmt: skip
            _check(bool(tool.name), f"tools[{i}].name", tool.name, "a function needs a name")
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            _check(
                choice.type in ("function", "allowed_tools"), "tool_choice.type", choice.type,
                "must be function or allowed_tools",
            )  # fmt: skip
            is_named = bool(choice.name) if choice.type == "function" else bool(choice.tools)
            name = "name" if choice.type == "function" else "tools"
            _check(is_named, f"tool_choice.{name}", getattr(choice, name), "must say which of the tools")


def deleted(response_id: str) -> dict[str, Any]:
    """Return the answer to a deletion."""
    return {"id": response_id, "object": "response", "deleted": True}


def item_list(items: list[Item], *, limit: int, after: str | None, is_ascending: bool) -> dict[str, Any]:
    """Return one page of items.

    Raises:
        RequestError: If `after` is none of them.
    """
    listed = items if is_ascending else items[::-1]
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(listed) if item["id"] == after), -1)
        _check(start >= 0, "after", after, "is none of this response's input items")
    page = listed[start : start + limit]
    return {
        "object": "list", "data": page, "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None, "has_more": start + limit < len(listed),
    }  # fmt: skip


def _check(is_valid: bool, name: str, value: object, rule: str) -> None:
    if not is_valid:
        raise RequestError(f"{name} is {shown(value)}: {rule}", param=name)
