"""The body of POST /v1/responses: strict types, unknown fields ignored, unsupported ones refused by name."""

from typing import Any, ClassVar, Literal

import msgspec

from ringserve.server.api.generation_fields import NEUTRAL, GenerationFields
from ringserve.server.api.responses.items import Item, chat_messages
from ringserve.server.chat import tools as chat_tools
from ringserve.server.chat.template import ChatPrompt
from ringserve.server.errors import RequestError, check_field, shown
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.grammar import structured_output
from ringserve.server.grammar.structured_output import Grammar

LOGPROBS = "message.output_text.logprobs"
_MAX_METADATA = 16
_MAX_TOP_LOGPROBS = 20

# What `include` may name; all but logprobs belong to hosted tools, images and encryption, which outputs never have.
_INCLUDABLE = frozenset((
    LOGPROBS, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
))  # fmt: skip

# Fields of the other endpoints, and of OpenAI's own service, with the values that ask for nothing.
_FOREIGN: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "echo": (False,),
    "max_tokens": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
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


class Tool(msgspec.Struct):
    """One of `tools`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> chat_tools.Tool:
        """Return the tool as chat completions know it."""
        assert self.name is not None  # checked
        function = chat_tools.FunctionDefinition(self.name, self.description, self.parameters, self.strict)
        return chat_tools.Tool("function", function)


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """`tool_choice` as an object."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class ResponseRequest(GenerationFields, kw_only=True):
    """POST /v1/responses."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        **{name: values for name, values in NEUTRAL.items() if name not in ("tools", "tool_choice")}, **_FOREIGN,
    }  # fmt: skip
    needed: ClassVar[str | None] = "input"
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of hosted tools, of which there are none
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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
        super().check()
        for i, name in enumerate(self.include or ()):
            if name not in _INCLUDABLE:
                raise RequestError(
                    f"include[{i}] is {shown(name)}: must be one of {', '.join(sorted(_INCLUDABLE))}", param="include"
                )
        self._check_ranges()
        self._check_text()
        self._check_tools()

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """Return the request's sampling parameters, without a grammar.

        Raises:
            RequestError: If a value is out of its range.
        """
        check_field(
            self.wants_logprobs or not self.top_logprobs, "top_logprobs", self.top_logprobs,
            f"name {LOGPROBS} in include, or leave it out",
        )  # fmt: skip
        num_logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return self.sampling_params(self.max_output_tokens, defaults, logprobs=num_logprobs)

    @property
    def has_format(self) -> bool:
        """Whether `text.format` asks for more than plain text."""
        return self.text is not None and self.text.format is not None and self.text.format.type != "text"

    def format_grammar(self) -> Grammar:
        """Return the grammar of `text.format`, where there is one. Takes milliseconds: for a thread.

        Raises:
            RequestError: If the schema cannot be followed.
        """
        assert self.text is not None
        assert self.text.format is not None
        if self.text.format.type == "json_object":
            return structured_output.json_object(field="text.format")
        return structured_output.from_json_schema(self.text.format.schema, field="text.format.schema")

    def chat_prompt(self, items: list[Item]) -> ChatPrompt:
        """Return what the chat template gets."""
        extra = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort is not None:
            extra["reasoning_effort"] = self.reasoning.effort
        messages = chat_messages(self.instructions, items)
        return ChatPrompt(messages=[message.to_template(i) for i, message in enumerate(messages)], extra=extra)

    def repeated(self, params: SamplingParams) -> dict[str, Any]:
        """Return what the response object repeats of the request, with the values that were used."""
        text, reasoning = self.text or TextConfig(), self.reasoning or ReasoningConfig()
        return {
            "background": False, "instructions": self.instructions,
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

    def tool_use(self) -> chat_tools.ToolUse | None:
        """Return what the request wants of its tools; None if it has none.

        Raises:
            RequestError: If that makes no sense.
        """
        if not self.tools and self.tool_choice in (None, "none", "auto"):
            return None
        given = [tool.to_chat() for tool in self.tools] if self.tools else None
        return chat_tools.tool_use(given, _chat_choice(self.tool_choice), self.parallel_tool_calls)

    def _check_ranges(self) -> None:
        check_field(
            self.max_output_tokens is None or self.max_output_tokens >= 1, "max_output_tokens", self.max_output_tokens,
            "must be at least 1",
        )  # fmt: skip
        limit = _MAX_TOP_LOGPROBS
        check_field(
            0 <= (self.top_logprobs or 0) <= limit, "top_logprobs", self.top_logprobs, f"must be from 0 to {limit}"
        )
        metadata = self.metadata or {}
        is_small = len(metadata) <= _MAX_METADATA and all(len(k) <= 64 and len(v) <= 512 for k, v in metadata.items())
        check_field(
            is_small, "metadata", metadata,
            f"at most {_MAX_METADATA} pairs, keys of at most 64 and values of at most 512 characters",
        )  # fmt: skip

    def _check_text(self) -> None:
        text = self.text or TextConfig()
        check_field(
            text.verbosity in (None, "medium"), "text.verbosity", text.verbosity,
            "this server does not support it, leave it out",
        )  # fmt: skip
        form = text.format
        if form is not None and form.type == "json_schema":
            check_field(form.schema is not None, "text.format.schema", form.schema, "json_schema needs a schema")
            check_field(form.name is not None, "text.format.name", form.name, "json_schema needs a name")

    def _check_tools(self) -> None:
        for i, tool in enumerate(self.tools or ()):
            check_field(
                tool.type == "function", f"tools[{i}].type", tool.type,
                "this server has no tools of its own, only the client's functions",
            )  # fmt: skip
            check_field(bool(tool.name), f"tools[{i}].name", tool.name, "a function needs a name")
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            check_field(
                choice.type in ("function", "allowed_tools"), "tool_choice.type", choice.type,
                "must be function or allowed_tools",
            )  # fmt: skip
            is_named = bool(choice.name) if choice.type == "function" else bool(choice.tools)
            name = "name" if choice.type == "function" else "tools"
            check_field(is_named, f"tool_choice.{name}", getattr(choice, name), "must say which of the tools")


def _chat_choice(choice: ToolChoice | Literal["none", "auto", "required"] | None) -> chat_tools.ToolChoice | None:
    """Return tool_choice as chat completions know it."""
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type == "function":
        return chat_tools.FunctionChoice(chat_tools.FunctionName(choice.name or ""))
    names = [chat_tools.FunctionName(str(tool.get("name"))) for tool in choice.tools or ()]
    allowed = [chat_tools.AllowedTool("function", name) for name in names]
    return chat_tools.AllowedToolsChoice(chat_tools.AllowedTools(choice.mode or "auto", allowed))


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
        check_field(start >= 0, "after", after, "is none of this response's input items")
    page = listed[start : start + limit]
    return {
        "object": "list", "data": page, "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None, "has_more": start + limit < len(listed),
    }  # fmt: skip
