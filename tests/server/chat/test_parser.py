import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.server.chat.parser import ChatDelta, ChatParsing
from ringserve.server.chat.tool_formats import FORMATS, NAMED, REQUIRED, TEXT, format_of_template

NAMES = frozenset({"add", "now"})
SUM = '{"a": 2, "b": [1, {"c": "}]{"}]}'


class Answer(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def parse(parsing: ChatParsing, pieces: list[str]) -> tuple[Answer, list[ChatDelta]]:
    """Join what a parser gives, as a client does; each delta must follow the client's rules."""
    parser = parsing.parser()
    deltas = [parser.push(piece) for piece in pieces]
    deltas.append(parser.finish())
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.id is not None:
            assert (call.index, call.arguments) == (len(calls), "")
            assert call.name
            calls.append((call.name, ""))
        else:
            assert call.name is None
            assert call.arguments
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert parser.has_tool_calls == bool(calls)
    return Answer("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls), deltas


def tools(form: str, **options: Any) -> ChatParsing:
    named = {"required": REQUIRED, "text": TEXT, **FORMATS}
    return ChatParsing(tools=named[form], names=NAMES, **options)


def read(form: str, text: str, **options: Any) -> Answer:
    """Parse a text in one piece, which must give what single characters give."""
    whole, _ = parse(tools(form, **options), [text])
    assert parse(tools(form, **options), list(text))[0] == whole
    return whole


GOOD = [
    ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {SUM}}}\n</tool_call>', "", [("add", SUM)]),
    ("hermes", f'<tool_call>{{"arguments": {SUM}, "name": "add"}}</tool_call>', "", [("add", SUM)]),
    ("hermes", 'Let me see.\n<tool_call>{"name":"now","arguments":{}}</tool_call>', "Let me see.\n", [("now", "{}")]),
    ("hermes", '<tool_call>{"name":"now"}</tool_call> There.', " There.", [("now", "{}")]),
    ("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}}\n</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"id":1,"type":"function","name":"now","arguments":{},"x":[1]}</tool_call>', "",
     [("now", "{}")]),
    ("hermes", '\n<tool_call>{"name":"now","arguments":{}}</tool_call>\n<tool_call>\n{"name":"add","arguments":'
     f"{SUM}}}</tool_call>\n", "", [("now", "{}"), ("add", SUM)]),
    ("hermes", '<tool_call>{"name":"add","arguments":{"s":"</tool_call>\\"\\u00e9"}}</tool_call>', "",
     [("add", '{"s":"</tool_call>\\"\\u00e9"}')]),
    ("llama3_json", f'{{"name": "add", "parameters": {SUM}}}', "", [("add", SUM)]),
    ("llama3_json", f'<|python_tag|>{{"name": "other", "parameters": {SUM}}}', "", [("other", SUM)]),
    ("llama3_json", f' {{"name": "now", "parameters": {{}}}}; {{"name": "add", "arguments": {SUM}}}\n', "",
     [("now", "{}"), ("add", SUM)]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}} ok', " ok", [("now", "{}")]),
    ("llama3_json", 'Well: <|python_tag|>{"name": "now", "parameters": {}}', "Well: ", [("now", "{}")]),
    ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {SUM}}}]', "", [("add", SUM)]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "now", "arguments": {{}}}}, {{"arguments": {SUM}, "name": "add"}} ] yes',
     " yes", [("now", "{}"), ("add", SUM)]),
    ("mistral", f"Hm.[TOOL_CALLS]add[ARGS]{SUM}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{{}}", "Hm.",
     [("add", SUM), ("now", "{}")]),
    ("mistral", f"[TOOL_CALLS]add{SUM}", "", [("add", SUM)]),
    ("required", f'[{{"name": "add", "parameters": {SUM}}}, {{"name": "now", "parameters": {{}}}}]', "",
     [("add", SUM), ("now", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
def test_calls_are_read(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(form, text) == Answer("", content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", ""),
        ("hermes", " \n "),
        ("hermes", "a < b <tool> <tool_cal"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>no JSON</tool_call>"),
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "five"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\ud83d"}</tool_call>'),
        ("hermes", '<tool_call>{"name": ' + "[" * 20_000 + ', "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arg'),
        ("hermes", '<tool_call>{"na\\'),
        ("hermes", '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>'),
        ("hermes", '{"name": "add", "arguments": {}}'),
        ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", '{"answer": {"name": "add", "parameters": {}}}'),
        ("llama3_json", 'So: {"name": "add", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", ";; {"),
        ("mistral", '[{"name": "add", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]add[ARGS]"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("required", "Sorry, no."),
        ("required", "[1, 2]"),
        ("text", ' <tool_call>{"name":"now","arguments":{}}</tool_call> '),
    ],
)
def test_what_is_no_call_is_content_unchanged(form: str, text: str) -> None:
    assert read(form, text) == Answer("", text, [])


def test_a_good_call_after_a_broken_one_is_read() -> None:
    broken = "<tool_call>{'name': 'now'}</tool_call>\n"
    answer = read("hermes", broken + '<tool_call>{"name":"now","arguments":{}}</tool_call>')
    assert answer == Answer("", broken, [("now", "{}")])
    answer = read("mistral", '[TOOL_CALLS][{"name":"now","arguments":{}}, {"nam": 1}]')
    assert answer == Answer("", ', {"nam": 1}]', [("now", "{}")])


@pytest.mark.parametrize("written", ["{'a': 1}", '{"a": 1,}', '{"a": [1}', '{"a": tru', '{"a": "x\ny"}', '{"a": "b'])
def test_broken_arguments_stay_as_the_model_wrote_them(written: str) -> None:
    ((name, arguments),) = read("hermes", f'<tool_call>{{"name": "add", "arguments": {written}').calls
    assert (name, arguments) == ("add", written)
    text = f'<tool_call>{{"name":"add","arguments":{written}}}</tool_call><tool_call>{{"name":"now"}}</tool_call>'
    calls = read("hermes", text).calls
    assert calls[0][1].startswith(written)
    if '"b' not in written:  # an open string goes on to the end
        assert calls[1:] == [("now", "{}")]


def test_arguments_are_streamed_while_they_come() -> None:
    _, deltas = parse(tools("hermes"), ["<tool_call>", '{"name": "add", "arguments"', ': {"a"', ": 1", "1}", "}"])
    assert [[(c.index, c.name, c.arguments) for c in delta.tool_calls] for delta in deltas] == [
        [], [], [(0, "add", ""), (0, None, '{"a"')], [(0, None, ": 1")], [(0, None, "1}")], [], [],
    ]  # fmt: skip


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    _, deltas = parse(tools("hermes"), ["a <", "too", "k> <tool", "_call"])
    assert [delta.content for delta in deltas] == ["a ", "", "<took> ", "", "<tool_call"]
    _, deltas = parse(tools("mistral"), ["a [", "1", "]"])
    assert [delta.content for delta in deltas] == ["a ", "[1", "]", ""]
    _, deltas = parse(tools("llama3_json"), ['{"', 'answer"', ": 1", "}"])
    assert [delta.content for delta in deltas] == ["", "", '{"answer": 1', "}", ""]


def test_ids_are_new_and_look_as_they_must() -> None:
    _, deltas = parse(tools("hermes"), [GOOD[10][1]])
    ids = [call.id for delta in deltas for call in delta.tool_calls if call.id]
    assert len(set(ids)) == 2
    assert all(id_.startswith("call_") for id_ in ids)
    _, deltas = parse(tools("mistral"), ["[TOOL_CALLS]now[ARGS]{}"])
    ((id_,),) = [[call.id for call in delta.tool_calls if call.id] for delta in deltas if delta.tool_calls]
    assert len(id_ or "") == 9
    assert (id_ or "").isalnum()


def test_without_parallel_calls_the_first_is_the_only_one() -> None:
    text = '<tool_call>{"name":"now","arguments":{}}</tool_call><tool_call>{"name":"now","arguments":{}}</tool_call>'
    assert read("hermes", text, is_parallel=False).calls == [("now", "{}")]


def test_a_named_call_is_arguments_alone() -> None:
    parsing = ChatParsing(tools=NAMED, names=frozenset({"add"}), call_finish="stop")
    assert parse(parsing, list(" " + SUM))[0] == Answer("", "", [("add", SUM)])
    assert parse(parsing, [" "])[0].calls == []


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>a < b</think>\n\nc", False, "a < b", "\n\nc"),
        ("\n<think>a</thin></think>", False, "a</thin>", ""),
        ("<think>a", False, "a", ""),
        ("<think>a</thi", False, "a</thi", ""),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<thin", False, "", "<thin"),
        (" \n", False, "", " \n"),
        ("a</think>b", True, "a", "b"),
        ("</think>b<think>c</think>", True, "", "b<think>c</think>"),
        ("a</think>b", False, "", "a</think>b"),
    ],
)
def test_reasoning_is_split_off(text: str, is_open: bool, reasoning: str, content: str) -> None:
    parsing = ChatParsing(reasoning=is_open)
    expected = Answer(reasoning, content, [])
    assert parse(parsing, [text])[0] == expected
    assert parse(parsing, list(text))[0] == expected
    hidden = ChatParsing(reasoning=is_open, include_reasoning=False)
    assert parse(hidden, [text])[0] == Answer("", content, [])


def test_calls_are_looked_for_after_the_reasoning_only() -> None:
    call = '<tool_call>{"name":"now","arguments":{}}</tool_call>'
    assert read("hermes", f"<think>{call}</think>\n{call}", reasoning=False) == Answer(call, "", [("now", "{}")])


def test_only_an_answer_that_ended_by_itself_has_the_finish_reason_of_calls() -> None:
    parser = tools("hermes").parser()
    assert parser.finish_reason("stop") == "stop"
    parser.push('<tool_call>{"name":"now","arguments":{}')
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"
    assert parser.finish_reason(None) is None


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>", "{",
    "}", "[", "]", '"', "\\", ":", ",", ";", " ", "\n", '"name"', '"arguments"', '"parameters"', '"now"', "add", "1",
    '{"name": "now", "arguments": {', '{"name": "add", "parameters": {"a": 1}}', "null", "'", "é", "<", "/",
]  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(
    form=st.sampled_from(["hermes", "llama3_json", "mistral", "required", "text"]),
    reasoning=st.sampled_from([None, False, True]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    data=st.data(),
)
def test_the_grouping_into_pieces_never_changes_the_answer(
    form: str, reasoning: bool | None, fragments: list[str], data: st.DataObject
) -> None:
    text, parsing = "".join(fragments), tools(form, reasoning=reasoning)
    whole, _ = parse(parsing, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parse(parsing, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])[0] == whole
    assert parse(parsing, list(text))[0] == whole
    if reasoning is None and not whole.calls:
        assert whole.content == text
    letters = "".join(whole.reasoning + whole.content + "".join(n + a for n, a in whole.calls)).count("é")
    assert letters <= text.count("é")


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
        lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=3), indent=st.sampled_from([None, 2]), ascii_=st.booleans())
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "mistral array", "required"])
def test_valid_arguments_arrive_as_they_were_written(
    form: str, arguments: list[dict[str, Any]], indent: int | None, ascii_: bool
) -> None:
    raw = [json.dumps(value, indent=indent, ensure_ascii=ascii_) for value in arguments]
    objects = [f'{{"name": "add", "arguments": {text}}}' for text in raw]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects),
        "llama3_json": "; ".join(objects),
        "mistral": "".join(f"[TOOL_CALLS]add[ARGS]{text}" for text in raw),
        "mistral array": f"[TOOL_CALLS][{', '.join(objects)}]",
        "required": f"[{','.join(objects)}]",
    }[form]
    assert read(form.split()[0], text) == Answer("", "", [("add", text) for text in raw])


def test_a_long_answer_in_single_characters_is_read_in_linear_time() -> None:
    text = '<tool_call>{"arguments": {"s": "' + "x" * 200_000 + '"}, "name": "add"}</tool_call>'
    answer, _ = parse(tools("hermes"), list(text))
    assert len(answer.calls[0][1]) == 200_009


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<tool_call>' }}{% if tools %}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("<tool_call>\n<function=name>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_that_of_the_template(source: str, name: str | None) -> None:
    assert format_of_template(source) == name
