"""The formats in which models write tool calls, and those that a grammar makes them write."""

import re
import secrets

from ringserve.server.chat.text_scanner import Reads
from ringserve.server.chat.tool_parser import CallSyntax, ToolFormat, ToolParser

_BRACES = re.compile(r"[\s}]*")
_SEPARATORS = re.compile(r"[\s;]*")
_NAME = re.compile(r"[\w.\-]*")


def _read_hermes(parser: ToolParser) -> Reads[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; the closing tag may be missing."""
    text = parser.text
    while (yield from text.until("<tool_call>", parser.give)):
        text.hold()
        yield from text.try_take("<tool_call>")
        yield from text.space()
        if (yield from parser.call("</tool_call>")):
            text.hold()
            yield from text.run(_BRACES)
            if (yield from text.try_take("</tool_call>")):
                text.held()
        parser.give_held()


def _read_llama3_json(parser: ToolParser) -> Reads[None]:
    """`{"name": ..., "parameters": {...}}` where the output begins, or after `<|python_tag|>`; `;` between calls.

    Without the tag only an object that names one of the request's tools is a call.
    """
    text, may_call = parser.text, True
    while True:
        text.hold()
        yield from text.run(_SEPARATORS)
        has_tag = yield from text.try_take("<|python_tag|>")
        yield from text.space()
        is_name = bool if has_tag else parser.names.__contains__
        may_call = (has_tag or may_call) and (yield from parser.call(None, is_name))
        if not may_call:
            parser.give_held()
            if not (yield from text.until("<|python_tag|>", parser.give)):
                return


def _read_mistral(parser: ToolParser) -> Reads[None]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    text = parser.text
    while (yield from text.until("[TOOL_CALLS]", parser.give)):
        text.hold()
        yield from text.try_take("[TOOL_CALLS]")
        yield from text.space()
        if (yield from text.try_take("[")):
            yield from parser.call_list("[TOOL_CALLS]")
        else:
            yield from _read_mistral_call(parser)
        parser.give_held()


def _read_mistral_call(parser: ToolParser) -> Reads[None]:
    text, name = parser.text, list[str]()
    yield from text.run(_NAME, name.append)
    if (yield from text.try_take("[CALL_ID]")):
        yield from text.run(_NAME)
    yield from text.try_take("[ARGS]")
    yield from text.space()
    if name and (yield from text.peek()) == "{":
        parser.begin("".join(name))
        yield from parser.arguments("[TOOL_CALLS]")


def _mistral_id() -> str:
    """Return nine letters and digits: the templates of these models refuse anything else."""
    return secrets.token_hex(5)[:9]


def _read_required(parser: ToolParser) -> Reads[None]:
    text = parser.text
    text.hold()
    yield from text.space()
    if (yield from text.try_take("[")):
        yield from parser.call_list(None)
    parser.give_held()
    yield from text.rest(parser.give)


def _read_named(parser: ToolParser) -> Reads[None]:
    (name,) = parser.names
    yield from parser.text.space()
    if (yield from parser.text.peek()):
        parser.begin(name)
        yield from parser.text.rest(parser.argue)


def _read_text(parser: ToolParser) -> Reads[None]:
    yield from parser.text.rest(parser.give)


# By their names on the command line, which are vLLM's.
FORMATS = {
    "hermes": ToolFormat(
        read=_read_hermes,
        markers=("<tool_call>", "</tool_call>"),
        syntax=CallSyntax(call_opening="<tool_call>\n", call_closing="\n</tool_call>", separator="\n"),
    ),
    "llama3_json": ToolFormat(
        read=_read_llama3_json,
        markers=("<|python_tag|>",),
        syntax=CallSyntax(arguments="parameters", separator="; "),
    ),
    "mistral": ToolFormat(
        read=_read_mistral,
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        new_id=_mistral_id,
        syntax=CallSyntax(opening="[TOOL_CALLS][", separator=", ", closing="]"),
    ),
}
TOOL_PARSERS = ("auto", *FORMATS, "none")  # as --tool-call-parser names them
REQUIRED = ToolFormat(read=_read_required)  # a list of objects: what the grammar for tool_choice required allows
NAMED = ToolFormat(read=_read_named)  # the arguments alone: what the grammar for a named function allows
TEXT = ToolFormat(read=_read_text)  # no calls


def format_of_template(source: str) -> str | None:
    """Return the name of the format that a chat template shows its model; None if it shows none of them."""
    if "<tool_call>" in source:
        return None if "<function=" in source else "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<|python_tag|>" in source or '{"name": function name, "parameters": ' in source:
        return "llama3_json"
    return None
