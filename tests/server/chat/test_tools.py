from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from ringserve.server.chat.tool_formats import FORMATS, NAMED, REQUIRED, TEXT
from ringserve.server.chat.tools import Tool, ToolChoice, ToolUse, tool_use
from ringserve.server.errors import RequestError

PARAMETERS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}


def use(choice: Any = None, parallel: bool | None = None, tools: Any = (ADD, NOW)) -> ToolUse | None:
    parsed = None if tools is None else msgspec.convert(tools, list[Tool])
    return tool_use(parsed, msgspec.convert(choice, ToolChoice | None), parallel)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def certain(*args: Any, **options: Any) -> ToolUse:
    found = use(*args, **options)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("choice", "mode", "names", "form", "finish"),
    [
        (None, "auto", {"add", "now"}, FORMATS["mistral"], "tool_calls"),
        ("auto", "auto", {"add", "now"}, FORMATS["mistral"], "tool_calls"),
        ("none", "none", {"add", "now"}, TEXT, "tool_calls"),
        ("required", "required", {"add", "now"}, REQUIRED, "tool_calls"),
        (named("now"), "named", {"now"}, NAMED, "stop"),
        (allowed("auto", "add"), "auto", {"add"}, FORMATS["mistral"], "tool_calls"),
        (allowed("required", "now"), "required", {"now"}, REQUIRED, "tool_calls"),
    ],
)
def test_tool_choice_says_which_functions_and_how(choice: Any, mode: str, names: Any, form: Any, finish: str) -> None:
    found = certain(choice)
    assert (found.mode, found.names, found.call_finish) == (mode, names, finish)
    assert found.format(FORMATS["mistral"]) is form


def test_no_tools_are_no_tools() -> None:
    assert use(tools=None) is None
    assert use("none", tools=None) is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [ADD] * 2}, "tools"),
        ({"tools": [{**NOW, "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": None, "choice": "auto"}, "tool_choice"),
        ({"tools": None, "choice": "required"}, "tool_choice"),
        ({"tools": None, "choice": named("add")}, "tool_choice"),
        ({"choice": named("sub")}, "tool_choice"),
        ({"choice": allowed("auto", "add", "sub")}, "tool_choice"),
        ({"choice": allowed("auto")}, "tool_choice"),
        ({"tools": [named("a b")]}, "tools[0].function.name"),
        ({"tools": [named("a\n")]}, "tools[0].function.name"),
        ({"tools": [ADD, named("x" * 65)]}, "tools[1].function.name"),
        ({"tools": [{**NOW, "function": {"name": "f", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        use(**options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Tool, {"type": "custom", "function": {"name": "f"}}),
        (Tool, {"type": "function"}),
        (Tool, {"type": "function", "function": {"name": "f", "parameters": [1]}}),
        (ToolChoice, "any"),
        (ToolChoice, {"type": "custom", "custom": {"name": "f"}}),
        (ToolChoice, {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}),
    ],
)
def test_other_kinds_of_tools_and_choices_are_refused(kind: Any, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, kind)


def test_without_a_known_format_a_call_can_only_be_forced() -> None:
    with pytest.raises(RequestError, match="--tool-call-parser"):
        certain().format(None)
    assert certain("required").format(None) is REQUIRED
    assert certain("none").format(None) is TEXT


def test_templates_get_each_tool_with_its_parameters() -> None:
    add, now = certain().for_template()
    assert add == ADD
    assert now == {
        "type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }  # fmt: skip


def test_a_template_without_tools_has_them_in_the_system_s_turn() -> None:
    user = {"role": "user", "content": "2+2?"}
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    system, same, told = certain().told([user, turn])
    assert same == user
    assert system["role"] == "system"
    assert '"name":"add"' in system["content"]
    assert "<tool_call>" in system["content"]
    assert told["content"] == '<tool_call>{"name": "add", "arguments": {"a":2}}</tool_call>'
    (joined, _) = certain("required").told([{"role": "system", "content": "Be brief."}, user])
    assert joined["content"].startswith("Be brief.\n\n")
    assert "JSON list" in joined["content"]
    assert "Call now" in certain(named("now")).told([user])[0]["content"]


def test_a_forced_call_s_grammar_has_each_function_with_its_schema() -> None:
    rules = dict(line.split(": ", 1) for line in certain("required").grammar(None).splitlines())
    assert rules["start"] == "calls"
    assert rules["call"] == "call_0 | call_1"
    assert rules["calls"] == '"[" call (", " call){0,15} "]"'
    schema = msgspec.json.decode(rules["parameters_0"].removeprefix("%json "))
    assert schema["$defs"] == PARAMETERS["$defs"]
    assert schema["additionalProperties"] is False
    assert PARAMETERS.keys() == {"type", "properties", "$defs"}, "the request's schema is left alone"


def test_a_call_alone_has_a_list_of_one() -> None:
    assert 'calls: "[" call "]"' in certain("required", False).grammar(None)
    assert certain(named("now")).grammar(None).startswith("start: parameters_1\n")


def test_a_schema_that_is_open_by_its_own_words_stays_open() -> None:
    for parameters in ({"type": "object"}, {"properties": {}, "additionalProperties": True}, {"allOf": []}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        assert '"additionalProperties":false' not in certain("required", tools=tools).grammar(None)


def admits(grammar: str, text: str) -> bool:
    """Whether a grammar admits a text as a whole, by the library that the engine asks."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


CALLS = '[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]'
THOUGHTS = {
    "": (True, True, False),
    "<think>a </thin\n</think>\n\n": (False, True, True),
    "a</think>": (False, False, True),
}


@pytest.mark.parametrize("thought", list(THOUGHTS))
def test_a_forced_call_may_come_after_a_thought(thought: str) -> None:
    use, named_add = certain("required"), certain(named("add"))
    for reasoning, is_admitted in zip((None, False, True), THOUGHTS[thought], strict=True):
        assert admits(use.grammar(reasoning), thought + CALLS) == is_admitted
        assert admits(named_add.grammar(reasoning), thought + '{"a": 1}') == is_admitted


@pytest.mark.parametrize(
    "calls",
    ["[]", "", "{}", '[{"name": "sub", "parameters": {}}]', '[{"name": "add", "parameters": {"a": "1"}}]',
     '[{"name": "now", "parameters": {"a": 1}}]', CALLS[:-1], "ok"],
)  # fmt: skip
def test_nothing_else_is_a_forced_call(calls: str) -> None:
    assert not admits(certain("required").grammar(None), calls)


def test_a_schema_that_cannot_be_followed_is_refused_when_its_call_is_forced() -> None:
    for parameters in ({"properties": {"a": {"divisibleBy": 2}}}, {"description": "x" * 300_000}):
        tools = [NOW, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
        for choice in ("required", named("f")):
            with pytest.raises(RequestError) as caught:
                certain(choice, tools=tools).grammar(None)
            assert caught.value.param == "tools[1].function.parameters"


def test_a_choice_among_no_tools_is_shown_as_the_request_has_it() -> None:
    with pytest.raises(RequestError, match=r"^tool_choice is \{'function': \{'name': 'f'\}, 'type': 'function'\} and"):
        use(named("f"), tools=None)
