"""The request's side of tool calls: `tools`, `tool_choice`, what the prompt says of them, the grammar of forced calls.

A call that tool_choice forces (required, or a named function) is written under a grammar, in a format of its own that
no model can miss: a list of {"name": ..., "parameters": ...}, or the arguments alone.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ringserve.server.chat.tool_formats import NAMED, REQUIRED, TEXT
from ringserve.server.chat.tool_parser import ToolFormat
from ringserve.server.errors import RequestError, shown
from ringserve.server.grammar.structured_output import MAX_GRAMMAR_BYTES, Grammar, from_json_schema, json_rule

MAX_TOOLS = 128
MAX_CALLS = 16  # by grammar, in one answer: a model that likes lists would not end its list
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OPEN_ENDED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")


class FunctionDefinition(msgspec.Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(msgspec.Struct):
    """A function by its name."""

    name: str


class FunctionChoice(msgspec.Struct, tag_field="type", tag="function"):
    """`tool_choice`: this function, and no other."""

    function: FunctionName


class AllowedTool(msgspec.Struct):
    """One of the tools that an AllowedToolsChoice leaves."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(msgspec.Struct):
    """What an AllowedToolsChoice says."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedToolsChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: some of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """What a request wants of its tools.

    Attributes:
        functions: Those that the model is told of, by their places in the request's `tools`.
        mode: none: it is told, and calls are not looked for; named: there is one function, and it is called.
        is_parallel: Whether an answer may have several calls.
    """

    functions: Mapping[int, FunctionDefinition]
    mode: Literal["none", "auto", "required", "named"]
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The functions' names."""
        return frozenset(function.name for function in self.functions.values())

    @property
    def is_forced(self) -> bool:
        """Whether the answer is a call, by grammar."""
        return self.mode in ("required", "named")

    @property
    def call_finish(self) -> str:
        """The finish reason of an answer with calls; a named function's is OpenAI's."""
        return "stop" if self.mode == "named" else "tool_calls"

    def format(self, model_format: ToolFormat | None) -> ToolFormat:
        """Return the format of the calls in the answer.

        Raises:
            RequestError: If it is the model's choice to call, and the format of its calls is not known.
        """
        if self.mode == "auto" and model_format is None:
            raise RequestError(
                "tools are given with tool_choice auto, and the format of this model's calls is not known: start with "
                "--tool-call-parser, or use tool_choice required",
                param="tool_choice",
            )
        formats = {"none": TEXT, "auto": model_format or TEXT, "required": REQUIRED, "named": NAMED}
        return formats[self.mode]

    def for_template(self) -> list[dict[str, Any]]:
        """Return `tools` as chat templates expect them."""
        return [_shown_to_model(function) for function in self.functions.values()]

    def grammar(self, reasoning: bool | None) -> Grammar:
        """Return the grammar of a forced call, in llguidance's Lark; each schema is a document with refs of its own.

        Args:
            reasoning: None: there is none; False: the model may think before it calls; True: the prompt begins that.

        Raises:
            RequestError: If a schema cannot be followed, or they are too long.
        """
        thought, gap, thought_lines = thought_rules(reasoning)
        arguments = [f"parameters_{place}" for place in self.functions]
        rules = [f"start: {thought}{gap}{arguments[0] if self.mode == 'named' else 'calls'}", *thought_lines]
        if self.mode == "required":
            more = f'(", " call){{0,{MAX_CALLS - 1}}} ' if self.is_parallel else ""
            calls = [f"call_{place}" for place in self.functions]
            rules += [f'calls: "[" call {more}"]"', f"call: {' | '.join(calls)}"]
            rules += [_call_rule(place, function.name) for place, function in self.functions.items()]
        rules += [
            f"parameters_{place}: {json_rule(parameters_schema(function), field=parameters_field(place))}"
            for place, function in self.functions.items()
        ]
        grammar = Grammar("\n".join(rules))
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise RequestError(f"tools make a grammar of more than {MAX_GRAMMAR_BYTES} bytes", param="tools")
        grammar.field, grammar.parts = "tools", self.schemas
        return grammar

    def schemas(self) -> Iterator[Grammar]:
        """Make a grammar of each function's arguments alone."""
        for place, function in self.functions.items():
            yield from_json_schema(parameters_schema(function), field=parameters_field(place))

    def told(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages for a template that knows no tools: the functions in the system's turn, calls as text."""
        text = self._instructions()
        messages = [_with_calls_as_text(message) for message in messages]
        if messages and messages[0]["role"] in ("system", "developer"):
            first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def _instructions(self) -> str:
        functions = "\n".join(_encode(tool["function"]) for tool in self.for_template())
        if self.mode == "named":
            how = f"Call {next(iter(self.names))}: answer with nothing but its arguments, a JSON object."
        elif self.mode == "required":
            how = 'Answer with nothing but a JSON list of calls: [{"name": "...", "parameters": {...}}]'
        else:
            how = (
                'To call a function, answer with <tool_call>{"name": "...", "arguments": {...}}</tool_call>, once for '
                "each call. The results come in the next turn."
            )
        return f"You can call these functions:\n{functions}\n\n{how}"


def tool_use(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """Return what a request wants of its tools; None if it has none.

    Raises:
        RequestError: Naming the field.
    """
    if tools is None:
        if choice not in (None, "none"):
            asked = shown(msgspec.to_builtins(choice))
            raise RequestError(f"tool_choice is {asked} and tools is missing: give both", param="tool_choice")
        return None
    functions = _checked(tools)
    if isinstance(choice, FunctionChoice):
        return ToolUse(functions=_chosen(functions, [choice.function.name]), mode="named", is_parallel=False)
    is_parallel = parallel is not False
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        names = [tool.function.name for tool in allowed.tools]
        return ToolUse(functions=_chosen(functions, names), mode=allowed.mode, is_parallel=is_parallel)
    return ToolUse(functions=functions, mode=choice or "auto", is_parallel=is_parallel)


def thought_rules(reasoning: bool | None) -> tuple[str, str, list[str]]:
    """Return what a grammar says before an answer, before its calls, and the rules for both; argument as grammar's.

    Only calls may come after a gap: in a form it would be text, and most forms have none there.
    """
    if reasoning is None:
        return "", "", []
    opening = "" if reasoning else '"<think>" '
    rules = [f"thought: {opening}thinking", 'thinking[suffix="</think>"]: /(?s:.*)/', r"gap: /[ \n]{0,4}/"]
    return "thought " if reasoning else "thought? ", "gap ", rules


def _checked(tools: list[Tool]) -> dict[int, FunctionDefinition]:
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} tools: 1 to {MAX_TOOLS}, or leave it out", param="tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name, parameters = tool.function.name, tool.function.parameters or {}
        field = f"tools[{i}].function"
        if not _NAME.fullmatch(name):
            raise RequestError(f"{field}.name is {shown(name)}: 1 to 64 letters, digits, _ or -", param=f"{field}.name")
        if name in names:
            raise RequestError(f"{field}.name is {name!r} for the second time: names must differ", param="tools")
        names.add(name)
        if parameters.get("type", "object") != "object":
            raise RequestError(
                f"{field}.parameters has the type {shown(parameters['type'])}: must be a JSON schema of an object",
                param=parameters_field(i),
            )
    return {i: tool.function for i, tool in enumerate(tools)}


def _chosen(functions: dict[int, FunctionDefinition], names: list[str]) -> dict[int, FunctionDefinition]:
    known = [function.name for function in functions.values()]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        asked = shown(wrong[0]) if wrong else "no tool"
        raise RequestError(f"tool_choice names {asked}: tools has {', '.join(known[:8])}", param="tool_choice")
    return {place: function for place, function in functions.items() if function.name in names}


def _shown_to_model(function: FunctionDefinition) -> dict[str, Any]:
    told: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        told["description"] = function.description
    told["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": told}


def _call_rule(index: int, name: str) -> str:
    return f'call_{index}: "{{\\"name\\": \\"{name}\\", \\"parameters\\": " parameters_{index} "}}"'


def parameters_field(place: int) -> str:
    """Return what the request calls the schema of a function's arguments."""
    return f"tools[{place}].function.parameters"


def parameters_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of a function's arguments in a grammar: where it lists properties, a call has these alone."""
    schema = {"type": "object", **(function.parameters or {"properties": {}})}
    if "properties" in schema and not any(name in schema for name in _OPEN_ENDED):
        schema["additionalProperties"] = False
    return schema


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message, as ChatMessage.to_template makes it, with its calls as the system's turn has them written."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        name, arguments = _encode(call["function"]["name"]), _encode(call["function"]["arguments"])
        texts.append(f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>')
    return {**message, "content": "\n".join(texts)}


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
