import asyncio
import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from ringserve.server.errors import RequestError
from ringserve.server.grammar.check import ByteTokenizer, begin
from ringserve.server.grammar.checker import GrammarChecker
from ringserve.server.grammar.structured_output import (
    Grammar,
    choice,
    ebnf,
    find_grammar,
    from_json_schema,
    json_object,
    regex,
)
from ringserve.server.text.tokenizer import Tokenizer
from tests.schemas import REFUSED, all_schemas
from tests.server.text.byte_tokenizer import BYTES, byte_tokenizer, fields


@pytest.fixture(scope="module")
def library() -> LibraryTokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def tokenizer(library: LibraryTokenizer) -> LLTokenizer:
    return LLTokenizer(library.to_str(), eos_token=256)


@pytest.fixture
def checker(library: LibraryTokenizer) -> GrammarChecker:
    return GrammarChecker(Tokenizer(library, {}))


def admits(grammar: str, text: str, tokenizer: LLTokenizer) -> bool:
    """Whether a text is one that a grammar admits, to its end."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert matcher.get_error() == ""
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def test_no_field_is_no_grammar() -> None:
    assert find_grammar(fields()) is None
    assert find_grammar(fields(response_format={"type": "text"})) is None


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}}, "12", '"12"'),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true", "1"),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "false", "1"),
        ({"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}}, '{"a":1}', '{"a": 1}'),
        ({"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": "_"}}, '{"a":_1}', '{"a": 1}'),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, "aaa", "b"),
        ({"structured_outputs": {"choice": ["x", "y"], "json": None, "json_object": False}}, "y", "xy"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "b", "c"),
        ({"guided_json": {"const": "é"}}, '"é"', '"e"'),
        ({"guided_regex": "[0-9]{3}"}, "123", "12"),
        ({"guided_choice": ["", "no"]}, "", "n"),
        ({"guided_grammar": 'root ::= "a" [0-9]+'}, "a12", "a"),
    ],
)
def test_every_field_makes_its_grammar(given: dict[str, Any], good: str, bad: str, tokenizer: LLTokenizer) -> None:
    grammar = find_grammar(fields(**given))
    assert grammar is not None
    assert grammar.field in given
    assert admits(grammar, good, tokenizer)
    assert not admits(grammar, bad, tokenizer)


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object or json_schema"),
        ({"response_format": "json"}, "response_format", "'json'"),
        ({"response_format": {}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "response_format", "schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": []}, "structured_outputs", "object"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex, choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
        (
            {"structured_outputs": {"disable_additional_properties": True, "json": {}}},
            "structured_outputs",
            "disable_add",
        ),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "5"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs", "list of texts"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs", "JSON object"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
        ({"guided_choice": "ab"}, "guided_choice", "list of texts"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "Expected"),
        ({"guided_grammar": ' {"grammars": [{"json_schema": {}}]}'}, "guided_grammar", "Lark's notation or in GBNF"),
        ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar", "GBNF"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "65536 bytes"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "262144"),
        ({"guided_choice": ["x" * 300_000]}, "guided_choice", "262144"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex and guided_choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "one",
        ),
    ],
)
def test_a_field_that_means_no_one_form_is_refused_by_name(given: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        find_grammar(fields(**given))
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "look-ahead"),
        ({"guided_regex": "(a)\\1"}, "backreferences"),
        ({"guided_grammar": "start: nothing"}, "no rule or terminal"),
        ({"guided_grammar": "not a grammar"}, "line 1, column 5"),
        ({"guided_grammar": "start: <nothing>"}, "special token"),
        ({"guided_json": {"type": "strin"}}, "strin"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_refused_by_its_field(
    given: dict[str, Any], message: str, checker: GrammarChecker
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await checker.find(fields(**given))
    assert caught.value.param in given
    assert len(str(caught.value)) < 500


async def test_special_tokens_may_be_named(checker: GrammarChecker) -> None:
    assert await checker.find(fields(guided_grammar='start: "a" <end>')) == 'start: "a" <end>'


@pytest.mark.parametrize("grammar", ['start: "ab" <end> "é"', 'start: <end> "a"', 'start: "a" <[0]> | "b" <[3]>'])
async def test_text_may_stand_beside_special_tokens_wherever_those_are_in_the_vocabulary(grammar: str) -> None:
    library = byte_tokenizer(["<end>", "<|a|>", *BYTES], ["<end>", "<|a|>"])
    await GrammarChecker(Tokenizer(library, {})).check(grammar)


@pytest.mark.parametrize(
    "name",
    ["<end>", "<call>", "<|a|>", "<b>", "<[5]>", "<[256-259]>", "<[260]>", "<[261]>", "<[256,999]>", "<[*]>", "<[^5]>",
     "<mark", "[mark]", "<wor>"],
)  # fmt: skip
async def test_the_tokens_that_may_be_named_are_those_that_the_engines_tokenizer_knows(name: str) -> None:
    library = byte_tokenizer([*BYTES, "<wor>"], ["<end>", "<|a|>"])
    library.add_tokens([AddedToken("<call>", special=False), AddedToken("[mark]", special=False)])
    grammar, whole = f'start: "a" {name} "b"', LLTokenizer(library.to_str())
    is_good = not LLMatcher(whole, grammar, log_level=0).is_error()
    try:
        await GrammarChecker(Tokenizer(library, {})).check(grammar)
    except RequestError:
        assert not is_good
    else:
        assert is_good


async def test_a_library_users_grammar_is_checked_under_its_parameters_name(checker: GrammarChecker) -> None:
    await checker.check('start: "a"')
    with pytest.raises(RequestError, match="grammar: "):
        await checker.check("start: (")


async def test_a_text_is_checked_once(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, ask = [], GrammarChecker._ask

    async def counted(self: GrammarChecker, question: bytes) -> Any:
        checked.append(json.loads(question)["grammar"])
        return await ask(self, question)

    monkeypatch.setattr(GrammarChecker, "_ask", counted)
    for _ in range(2):
        await checker.check('start: "a"')
        with pytest.raises(RequestError, match="grammar: "):
            await checker.check("start: (")
    assert checked == ['start: "a"', "start: ("]
    for n in range(140):
        await checker.check(f'start: "{n}"')
    assert len(checker._answers) == 128


def _one_property(name: str) -> dict[str, Any]:
    return {"properties": {name: {"type": "string"}}}


HOSTILE = {
    "many properties": from_json_schema(
        {"type": "object", "properties": {f"p{n}": {"pattern": f"^a{n}.*$"} for n in range(2000)}}
    ),
    "a long choice": choice([f"option {n}" for n in range(14_000)]),
    "repetitions": regex("((a|b){1000}c){1000}.{5000}"),
    "nested repetitions": regex("(((a{100}){100}){100}){100}"),
    "ambiguity": ebnf("start: a a a a a a a a\na: b*\nb: c*\nc: /x/ | a"),
    "alternatives": from_json_schema(
        {"allOf": [{"anyOf": [_one_property(f"a{n}{m}") for m in range(4)]} for n in range(10)]}
    ),
    "large bounds": from_json_schema(
        {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "minItems": 10**6}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_holds_neither_the_loop_nor_much_memory(name: str, checker: GrammarChecker) -> None:
    longest_s, before_kb = 0.0, _resident_kb()

    async def tick() -> None:
        nonlocal longest_s
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.perf_counter() - started)

    ticking = asyncio.create_task(tick())
    started = time.perf_counter()
    try:
        await asyncio.wait_for(checker.check(HOSTILE[name]), timeout=20)
    except RequestError as exc:
        print(exc)
    print(f"{name}: {time.perf_counter() - started:.3f} s, the loop stood for {longest_s:.3f} s at most")
    ticking.cancel()
    assert _resident_kb() - before_kb < 300_000


def _resident_kb() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4


LINKED: dict[str, Any] = {  # a list as generators of schemas write it: a type or null is a oneOf there
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_schema_keyword_that_cannot_be_followed_is_named(keyword: str) -> None:
    try:
        error = begin(from_json_schema(REFUSED[keyword]), LLTokenizer(TokenizerWrapper(ByteTokenizer())))
    except RequestError as exc:
        error = str(exc)
    assert keyword in error


def test_all_other_schemas_are_taken() -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokenizer()))
    assert [begin(from_json_schema(schema), tokenizer) for schema in all_schemas()] == [""] * 200


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"']),
        ({"format": "date-time", "type": "string"}, ['"2024-02-29T10:00:00Z"'], ['"2023-02-29T10:00:00Z"']),
        ({"format": "date", "type": "string", "allOf": [{"pattern": "^2024"}]}, ['"2024-02-29"'], ['"2020-02-29"']),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"b":1}'], [r'{"b":1,"\u0061":"x"}']),
        ({"type": "array", "uniqueItems": False}, ["[1,1]"], ["1"]),
        ({"type": "string", "pattern": "^[[a]$"}, ['"["', '"a"'], ['"]"']),
        ({"type": "string", "pattern": r"^[^[\]]$"}, ['"x"'], ['"["', '"]"']),
        ({"type": "string", "pattern": "^[a-z&&[^b]]$"}, ['"a]"', '"b]"', '"&]"', '"[]"'], ['"a"']),
        ({"type": "string", "pattern": "^[!--]$"}, ['"!"', '"+"', '"-"'], ['"a"']),
        ({"type": "string", "pattern": "^[a~~b]$"}, ['"~"', '"b"'], ['"c"']),
        ({"type": "string", "pattern": r"^\[a[b]$"}, ['"[ab"'], ['"[a[b]"']),
        ({"type": "string", "pattern": r"^[ -\x7f]$"}, ['"a"', '"~"'], ['"é"']),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"a"', '"ab"'], ['""', '"abc"']),
        (LINKED, ['{"next":null}', '{"next":{"next":null}}'], ['{"next":5}', '{"next":{}}']),
        ({"oneOf": [{"type": "integer"}, {"enum": ["a", True]}, {"const": None}]}, ["1", '"a"', "null"], ["false"]),
        ({"oneOf": [{"type": ["array", "null"]}, {"type": "number"}]}, ["[]", "null", "1.5"], ['"a"', "{}"]),
        ({"enum": [{"uniqueItems": False, "format": "date"}]}, ['{"uniqueItems":false,"format":"date"}'], ["{}"]),
        ({"properties": {"uniqueItems": {"const": 1}, "format": {"const": "date"}}, "type": "object"}, ["{}"], ["1"]),
        (
            {"properties": {"disallow": {"const": 1}}, "type": "object", "required": ["disallow"]},
            ['{"disallow":1}'],
            ["{}"],
        ),
    ],
)
def test_a_schema_means_no_more_than_it_says(
    schema: dict[str, Any], good: list[str], bad: list[str], tokenizer: LLTokenizer
) -> None:
    grammar = from_json_schema(schema)
    assert all(admits(grammar, text, tokenizer) for text in good)
    assert not any(admits(grammar, text, tokenizer) for text in bad)


def test_whitespace_has_an_end(tokenizer: LLTokenizer) -> None:
    assert admits(json_object(), '{\n  "a" : 1 }', tokenizer)
    assert not admits(json_object(), "{" + " " * 41 + "}", tokenizer)


def test_a_schema_that_nests_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(150):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="nests more than 100"):
        from_json_schema(schema)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=100, deadline=None)
@given(st.lists(texts, min_size=1, max_size=5), texts)
def test_a_choice_admits_its_texts_and_nothing_else(choices: list[str], other: str) -> None:
    tokenizer = _bytes_tokenizer()
    grammar = choice(choices)
    assert all(admits(grammar, text, tokenizer) for text in choices)
    assert admits(grammar, other, tokenizer) == (other in choices)


def _bytes_tokenizer(made: list[LLTokenizer] = []) -> LLTokenizer:  # noqa: B006 - made once for all examples
    if not made:
        made.append(LLTokenizer(byte_tokenizer().to_str(), eos_token=256))
    return made[0]


def test_a_grammar_is_its_text() -> None:
    grammar = regex("a", field="guided_regex")
    assert isinstance(grammar, Grammar)
    assert grammar.field == "guided_regex"


_ATOMS = [
    "a", "b", '"', r"\\", ".", r"\d", r"\s", r"\S", "[ab]", "[^a]", '[^"]', r"[^\\]", r'[^"\\]', "[^]a]", "[a-z]",
    "[^a-z]", r"[^\n]", r"\n", r'[\s"]', r"[^\s]", r'[^\d"]', "é", "[é-ü]", "[^é]", "/", r"\/", r"\x41", r"[^\x22]",
    r"[\x00-!#-~]", r'[^\x00-\x1f"]', r"\W", r"\D", r"[\t-~]", "[!-~]", r"\[", '[^^"]', r'[\^"]', '(?:a|")',
    r'(?:[^"]|\\)', "😀", "[^😀]",
]  # fmt: skip
_CHARACTERS = '"\\ab\n\tzé😀/1 ^][A\b'


@pytest.mark.parametrize("seed", range(4))
def test_what_a_pattern_admits_python_matches(seed: int, tokenizer: LLTokenizer) -> None:
    rng, num_taken, num_admitted = random.Random(seed), 0, 0
    for _ in range(80):
        atoms = [
            rng.choice(_ATOMS) + rng.choice(["", "", "", "*", "+", "?", "{1,2}"]) for _ in range(rng.randint(1, 4))
        ]
        pattern = rng.choice(["^", "^", ""]) + "".join(atoms) + rng.choice(["$", "$", ""])
        try:
            grammar = from_json_schema({"type": "string", "pattern": pattern})
        except RequestError:
            continue  # it may hold control characters
        num_taken += 1
        for _ in range(25):
            text = "".join(rng.choice(_CHARACTERS) for _ in range(rng.randint(0, 4)))
            if admits(grammar, json.dumps(text, ensure_ascii=False), tokenizer):
                num_admitted += 1
                assert re.search(pattern, text, re.ASCII), (pattern, text)
    assert num_taken > 40
    assert num_admitted > 50


@pytest.mark.parametrize(
    "grammar",
    [
        from_json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1200)}}),
        ebnf('start: ((("a"{1000}){1000}){1000}){1000}'),
    ],
)
def test_what_becomes_too_complex_after_its_first_token_is_refused(grammar: str) -> None:
    assert begin(grammar, LLTokenizer(TokenizerWrapper(ByteTokenizer())))
