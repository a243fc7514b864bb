"""What an answer to a request with tools has to follow: the grammar of forced calls, or of the model's own calls where
the alternative is a form that the request asks for. Takes milliseconds: for a thread.
"""

import re
from collections.abc import Callable

import msgspec

from ringserve.server.chat.parser import ChatParsing
from ringserve.server.chat.tool_parser import CallSyntax
from ringserve.server.chat.tools import (
    MAX_CALLS,
    FunctionDefinition,
    ToolUse,
    parameters_field,
    parameters_schema,
    thought_rules,
)
from ringserve.server.errors import RequestError
from ringserve.server.grammar import json_schema
from ringserve.server.grammar.structured_output import MAX_GRAMMAR_BYTES, Grammar, field_of, json_rule, quote, with_form

SpecialTokenId = Callable[[str], int | None]


def answer_grammar(use: ToolUse | None, parsing: ChatParsing, form: str, special_token_id: SpecialTokenId) -> str:
    """Return the grammar of the answers to a request, "" where they are free.

    Args:
        use: Of its tools.
        parsing: How the answers will be read.
        form: The grammar that it asks for beside its tools, checked; "" for none.
        special_token_id: Returns the id of the special token that is written so, None if it is text.

    Raises:
        RequestError: If a tool's schema cannot be followed, or all are too long.
    """
    if use is None or use.mode == "none":
        return _after_thought(form, parsing.reasoning)
    if use.is_forced:
        return use.grammar(parsing.reasoning)
    return _call_or_form(use, parsing, form, special_token_id) if form else ""


def _after_thought(form: str, reasoning: bool | None) -> str:
    """Return the grammar of a form that comes after the reasoning which the prompt has begun."""
    if not form or not reasoning:
        return form
    thought, _, lines = thought_rules(reasoning)
    grammar = with_form("\n".join([f"start: {thought}@form", *lines]), form)
    grammar.field = field_of(form)
    return grammar


def _call_or_form(use: ToolUse, parsing: ChatParsing, form: str, special_token_id: SpecialTokenId) -> Grammar:
    """Return the grammar of what OpenAI's models answer then: calls, or the form, and never text beside them."""
    syntax = parsing.tools.syntax
    assert syntax is not None  # those that models write by themselves have one
    if isinstance(form, Grammar) and form.is_written:
        raise RequestError(
            f"{form.field} is a grammar beside tools, and no grammar can tell it from a call: leave one out, or set "
            "tool_choice to none or required",
            param=form.field,
        )
    markers = {marker: special_token_id(marker) for marker in parsing.tools.markers}
    thought, gap, thought_lines = thought_rules(parsing.reasoning)
    lines = [f"start: {thought}answer", f"answer: {gap}calls | @form", *thought_lines, *_calls(use, syntax, markers)]
    lines += [f"call_{i}: {_object(i, function, syntax.arguments)}" for i, function in use.functions.items()]
    grammar = with_form("\n".join(lines), form)
    grammar.field, grammar.parts = "tools", use.schemas  # the form has been checked alone
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"tools and the form make a grammar of more than {MAX_GRAMMAR_BYTES} bytes", param="tools")
    return grammar


def _calls(use: ToolUse, syntax: CallSyntax, markers: dict[str, int | None]) -> list[str]:
    def written(text: str) -> str:
        return _expression(text, markers)

    more = f"({written(syntax.separator)} call){{0,{MAX_CALLS - 1}}}" if use.is_parallel else ""
    names = " | ".join(f"call_{place}" for place in use.functions)
    return [
        f"calls: {written(syntax.opening)} call {more} {written(syntax.closing)}",
        f"call: {written(syntax.call_opening)} ({names}) {written(syntax.call_closing)}",
    ]


def _object(place: int, function: FunctionDefinition, key: str) -> str:
    """Return the rule of a call's object; its terminals are those of JSON forms, whose beginnings it may share."""
    schema = json_schema.prepare(parameters_schema(function), parameters_field(place))
    moved = msgspec.json.encode(schema).replace(b'"$ref":"#', b'"$ref":"#/properties/%b' % key.encode())
    whole = {
        "type": "object",
        "properties": {"name": {"const": function.name}, key: msgspec.json.decode(moved)},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return json_rule(whole, field=parameters_field(place), is_flexible=True)


def _expression(text: str, markers: dict[str, int | None]) -> str:
    """Return a text as Lark's: special tokens by their ids, for they are no text, and the ends of lines at will."""
    pieces = re.split(f"({'|'.join(map(re.escape, (*markers, chr(10))))})", text)
    return " ".join(_piece(piece, markers.get(piece)) for piece in pieces if piece)


def _piece(piece: str, token_id: int | None) -> str:
    if token_id is not None:
        return f"<[{token_id}]>"
    return '"\\n"?' if piece == "\n" else quote(piece)
