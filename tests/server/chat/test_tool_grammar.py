"""The grammar of answers to requests with tools: calls as the model writes them, or the form that was asked for."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from ringserve.server.chat.parser import ChatParsing
from ringserve.server.chat.tool_formats import FORMATS
from ringserve.server.chat.tool_grammar import answer_grammar
from ringserve.server.chat.tools import FunctionDefinition, ToolUse
from ringserve.server.errors import RequestError
from ringserve.server.grammar import structured_output
from ringserve.server.grammar.check import ByteTokenizer
from ringserve.server.grammar.checker import GrammarChecker
from ringserve.server.grammar.structured_output import Grammar
from ringserve.server.text.tokenizer import Tokenizer

ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "$defs": {"n": {"type": "integer"}},
}
FUNCTIONS = {0: FunctionDefinition("add", parameters=ADD), 1: FunctionDefinition("now")}
CALLS = {
    "hermes": [
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "llama3_json": [
        '{"name": "add", "parameters": {"a": 2}}',
        '{"name": "add", "parameters": {"a": 2}}; {"name": "now", "parameters": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]',
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}, {"name": "now", "arguments": {}}]',
    ],
}
FORMS: dict[str, tuple[Callable[[], Grammar], str]] = {
    "json_schema": (
        lambda: structured_output.from_json_schema(
            {"type": "object", "properties": {"b": {"enum": [1]}, "name": {"type": "string"}}}
        ),
        '{"b": 1}',
    ),
    "json_object": (structured_output.json_object, '{"x": [true]}'),
    "regex": (lambda: structured_output.regex("[a-c]{2}"), "ab"),
    "choice": (lambda: structured_output.choice(["yes", 'n"o']), 'n"o'),
    "compact": (lambda: structured_output.json_object(whitespace_flexible=False), '{"x":[true],"y":{}}'),
    "array": (lambda: structured_output.from_json_schema({"type": "array", "items": {"type": "object"}}), '[{"T": 1}]'),
}


def grammar_of(form: str, name: str = "regex", *, token_ids: dict[str, int] | None = None, **use: Any) -> str:
    wanted = ToolUse(**{"functions": FUNCTIONS, "mode": "auto", **use})
    parsing = ChatParsing(tools=wanted.format(FORMATS[form]), names=wanted.names)
    return answer_grammar(wanted, parsing, FORMS[name][0](), (token_ids or {}).get)


def admits(grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("form", CALLS)
def test_an_answer_is_calls_or_the_form_and_nothing_else(form: str, name: str) -> None:
    grammar, text = grammar_of(form, name), FORMS[name][1]
    assert all(admits(grammar, calls) for calls in CALLS[form])
    assert admits(grammar, text)
    wrong = [
        "", "Hello.", CALLS[form][0][:-1], f"{text} {CALLS[form][0]}", f"{CALLS[form][0]} {text}", f"Yes. {text}",
        CALLS[form][0].replace("add", "sub"),
    ]  # fmt: skip
    if FORMS[name][1][0] != "{" or form != "llama3_json":  # whose calls are objects as others are
        wrong += [CALLS[form][0].replace("2", '"2"')]
        assert [text for text in wrong if admits(grammar, text)] == []


@pytest.mark.parametrize("form", CALLS)
def test_one_call_is_all_where_they_may_not_be_parallel(form: str) -> None:
    assert [admits(grammar_of(form, is_parallel=False), calls) for calls in CALLS[form]] == [True, False]


@pytest.mark.parametrize("form", CALLS)
def test_what_the_grammar_admits_the_parser_reads(form: str) -> None:
    parser = ChatParsing(tools=FORMATS[form], names=frozenset(("add", "now"))).parser()
    delta = parser.finish(CALLS[form][1])
    assert [call.name for call in delta.tool_calls if call.name] == ["add", "now"]
    assert delta.content == ""
    parser = ChatParsing(tools=FORMATS[form], names=frozenset(("add", "now"))).parser()
    assert parser.finish('{"name": "b"}').content == '{"name": "b"}'


def test_a_marker_that_is_a_special_token_is_that_token_and_not_its_letters() -> None:
    def lark(**token_ids: int) -> str:
        return str(json.loads(grammar_of("mistral", token_ids=token_ids))["grammars"][0]["lark_grammar"])

    assert 'calls: "[TOOL_CALLS][" call' not in lark()
    assert '"[TOOL_CALLS]" "[" call' in lark()
    assert '<[5]> "[" call' in lark(**{"[TOOL_CALLS]": 5})


def test_a_thought_may_come_before_either() -> None:
    use = ToolUse(functions=FUNCTIONS, mode="auto")
    form = structured_output.regex("[a-c]{2}")
    for reasoning, thought in ((False, "<think>so</think>\n"), (True, "so</think>")):
        parsing = ChatParsing(tools=FORMATS["hermes"], reasoning=reasoning)
        grammar = answer_grammar(use, parsing, form, {}.get)
        assert admits(grammar, f"{thought.strip()}ab")
        assert not admits(grammar, f"{thought}\u205fab")
        assert admits(grammar, thought + CALLS["hermes"][0])


def test_who_may_not_call_gets_the_form_who_must_calls_and_who_asks_for_none_is_free() -> None:
    assert grammar_of("hermes", mode="none") == FORMS["regex"][0]()
    assert not admits(grammar_of("hermes", mode="required"), "ab")
    parsing = ChatParsing(tools=FORMATS["hermes"])
    assert answer_grammar(ToolUse(functions=FUNCTIONS, mode="auto"), parsing, "", {}.get) == ""


def test_a_grammar_that_people_write_is_refused_by_its_field_s_name() -> None:
    use, parsing = ToolUse(functions=FUNCTIONS, mode="auto"), ChatParsing(tools=FORMATS["hermes"])
    with pytest.raises(RequestError, match="beside tools") as caught:
        answer_grammar(use, parsing, structured_output.ebnf('start: "<" /[a-z]+/', field="guided_grammar"), {}.get)
    assert caught.value.param == "guided_grammar"


def test_schemas_that_cannot_be_followed_or_are_too_long_together_are_refused() -> None:
    for parameters, param in (
        ({"properties": {"a": {"divisibleBy": 2}}}, "tools[3].function.parameters"),
        ({"description": "x" * 255_000}, "tools"),
    ):
        functions = dict.fromkeys((3, 4), FunctionDefinition("f", parameters=parameters))
        with pytest.raises(RequestError) as caught:
            grammar_of("hermes", "json_schema", functions=functions)
        assert caught.value.param == param


@pytest.mark.parametrize("mode", ["required", "named", "auto"])
async def test_a_schema_that_the_library_refuses_is_named_and_no_grammar_is_shown(mode: Any) -> None:
    wrong = FunctionDefinition("f", parameters={"type": "object", "properties": {"a": {"type": "cat"}}})
    functions = {4: wrong} if mode == "named" else {0: FunctionDefinition("now"), 4: wrong}
    grammar = grammar_of("hermes", "json_schema", functions=functions, mode=mode)
    with pytest.raises(RequestError) as caught:
        await GrammarChecker(Tokenizer(LibraryTokenizer(models.BPE()), {})).check(grammar)
    assert caught.value.param == "tools[4].function.parameters"
    assert str(caught.value).startswith("tools[4].function.parameters: the schema has the type cat: must be null, ")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_comes_after_the_reasoning_that_the_prompt_has_begun(name: str) -> None:
    make, text = FORMS[name]
    grammar = answer_grammar(None, ChatParsing(reasoning=True), make(), {}.get)
    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokenizer()))
    for gap, is_admitted in (("", True), ("\n\n", False), ("\u205f", False)):
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        is_followed = matcher.consume_tokens(list(f"Let me see {{</think>{gap}{text}".encode()))
        assert (is_followed and matcher.is_accepting()) == is_admitted
    assert isinstance(grammar, Grammar)
    assert grammar.field == make().field
    assert answer_grammar(None, ChatParsing(reasoning=None), make(), {}.get) == make()
