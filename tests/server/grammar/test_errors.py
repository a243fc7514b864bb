"""What users are told of grammars that are refused: their field, what is wrong, and what to do."""

from typing import Any

import pytest

from ringserve.engine.sampling.grammar import GrammarCompiler
from ringserve.server.errors import RequestError
from ringserve.server.grammar.check import LIMITS
from ringserve.server.grammar.checker import GrammarChecker
from ringserve.server.grammar.errors import explain
from ringserve.server.text.tokenizer import Tokenizer
from tests.server.text.byte_tokenizer import byte_tokenizer, fields

INNER = (  # words of the library that mean nothing to those who wrote the grammar
    "NoExtension", "non-verbose", "f64", "index out of", "Unimplemented", "at 1(", "ff_tokens", "lexeme", "lexer",
    "Current row", "expressions constructed", "fuel", "retriever", "registry", "coerce_one_of", "SearchRegex",
    "lookarounds not supported yet", "≺", " 1 | ", "Failed to generate", "patternProperty ", "Some(",
)  # fmt: skip

REGEXES = [
    "(a", "a)", "[a", "[z-a]", "*a", "a{2,1}", "a{", "a{,", "a{1000000}", "(?=a)b", "(?!a)b", "(?<=a)b", r"(a)\1",
    "(?P<x>a)(?P=x)", r"\b", r"\Bx", "a^", "a$b", "(?i", "(?q)a", r"\p{Foo}", r"\p", r"\x", r"\xZZ", r"\u",
    r"\u{110000}", r"\u{D800}", r"[\d-z]", r"[a-\d]", "(?#comment)a", "(?>a)", "(?(1)a|b)", r"\k<n>", r"\Q.\E", r"\G",
    r"\Z", "(?s", "(?:", "[]", "[^]", r"[^\x00-\x{10FFFF}]", r"\R", r"\h", "(?<n", "(?P<1>a)", "(a{1000}){1000}",
    "a{99999999999}", r"[^\s\S]", r"(?-u)\xff", r"\0", r"\ca", "[a&&b]", r"[\b]", "é{3", "(?im-s:a", "a" * 900 + "(",
    "(a\nb",
]  # fmt: skip
GRAMMARS = [
    "", "start", "start: foo", 'start: "a', "start: 'a'", "start: /a", "start: /(/", "start: a\na: a",
    'start: a b\na: "x"', 'START: "a"', 'start: ("a"', 'start: "a")', 'start: "a"{2,1}', 'start: "a"..',
    'start: "b".."a"', "%import common.FOO\nstart: FOO", "%ignore", "%json {}", "start: %json {",
    'start: %json {"type":"foo"}', "start: %json 5", "start: %lark { }", "start: <foo>", "start: <[99999999]>",
    "start: <[a]>", "start: @other", 'start: A\nA: b\nb: "x"', "start: A\nA: A", 'start: a\na: "x" a', r'start: "\q"',
    r"start: /\q/", r'start: "a" /\bc/', 'start: a\na: "x"\na: "y"', "start[foo=1]: 'a'", 'root ::= "a', "root ::= foo",
    "root ::= [", 'root ::= "a"{2,1}', "root ::= (", 'foo ::= "a"', "root ::= [z-a]", "root ::= root", 'root ::= "\\',
    "root ::= " + "(" * 5000, 'start: x{"a"}', "// only a comment", 'start: A & B\nA: /a/\nB: /b/',
    'start: ("a"{1000}){1000}', '{"grammars":[]}', '{"a":1}', "SELECT 1", "é", "start: " + "a" * 900,
]  # fmt: skip
SCHEMAS: list[dict[str, Any]] = [
    {"type": "number", "minimum": 1e10, "maximum": 1e300}, {"type": "integer", "minimum": 1e20},
    {"type": "object", "patternProperties": {"^a": {}, "b$": {}}},
    {"type": "foo"}, {"type": 5}, {"type": []}, {"type": ["string", "foo"]}, {"enum": []}, {"enum": 5},
    {"pattern": "("},
    {"type": "string", "pattern": "(?=a)"}, {"type": "string", "pattern": 5},
    {"type": "string", "minLength": 3, "maxLength": 1}, {"type": "string", "minLength": -1},
    {"type": "string", "maxLength": 1.5}, {"type": "string", "format": "foo"}, {"type": "string", "format": 5},
    {"type": "string", "pattern": "^a$", "maxLength": 0}, {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "integer", "minimum": "a"}, {"type": "number", "multipleOf": 0}, {"type": "array", "items": 5},
    {"type": "array", "minItems": 3, "maxItems": 1}, {"type": "array", "prefixItems": 5},
    {"type": "array", "uniqueItems": True}, {"type": "object", "properties": 5},
    {"type": "object", "properties": {"a": None}}, {"type": "object", "required": "a"},
    {"type": "object", "required": [5]}, {"type": "object", "required": ["b"], "additionalProperties": False},
    {"type": "object", "patternProperties": {"(": {}}}, {"type": "object", "minProperties": 3}, {"$ref": "#/nope"},
    {"$ref": 5}, {"$ref": "http://x/y"}, {"$ref": "#"}, {"$dynamicRef": "#x"}, {"anyOf": []}, {"allOf": 5},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"oneOf": [{"type": "string"}, {"maxLength": 3}]},
    {"not": {}},
    {"$schema": "foo"}, {"type": "string", "enum": ["a"], "pattern": "b"}, {"type": "integer", "minimum": 10**30},
    {"type": "object", "properties": {f"p{n}": {} for n in range(1100)}},
]  # fmt: skip


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker(Tokenizer(byte_tokenizer(), {}))


async def told(checker: GrammarChecker, field: str, value: Any) -> str:
    """Return what a user is told whose grammar is refused."""
    with pytest.raises(RequestError) as caught:
        await checker.find(fields(**{field: value}))
    assert caught.value.param == field
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in {
        "guided_regex": REGEXES, "guided_grammar": GRAMMARS, "guided_json": SCHEMAS,
    }.items() for value in values],
)  # fmt: skip
async def test_a_bad_grammar_is_told_of_in_its_users_words(field: str, value: Any, checker: GrammarChecker) -> None:
    message = await told(checker, field, value)
    assert message.startswith(field)
    assert 20 < len(message) < 450
    assert not [word for word in INNER if word in message]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("guided_regex", "ab(c", "wrong at '(c', unclosed group: must be in the syntax of Rust's regex"),
        ("guided_regex", "(?i", "wrong at its end, expected flag"),
        ("guided_regex", r"a\bc", "leave them out"),
        ("guided_regex", "[a&&b]", "take out the part that admits nothing"),
        ("guided_regex", "a{1000000}", "too complex: use shorter repetitions"),
        ("guided_grammar", "start: a\na: foo", 'line 2, column 4: there is no rule or terminal "foo": define it'),
        ("guided_grammar", 'start: "a" <foo>', 'the model has no special token "<foo>": write text in quotes'),
        ("guided_grammar", 'START: "a"', "there is no rule start"),
        ("guided_grammar", 'foo ::= "a"', "there is no rule root"),
        ("guided_grammar", 'root ::= "\\', "complete it"),
        ("guided_json", {"type": "foo"}, "the schema has the type foo: must be null, boolean"),
        ("guided_json", {"type": "string", "minLength": -1}, "minLength -1: must be an integer of at least 0"),
        ("guided_json", {"not": {}}, 'the schema has "not": not supported, leave that out'),
        ("guided_json", {"$ref": "http://x/y"}, "refers to http://x/y, which is not in it"),
        ("guided_json", SCHEMAS[-1], "1,000 optional properties in an object"),
    ],
)
async def test_it_says_what_is_wrong_and_what_to_do(
    field: str, value: Any, message: str, checker: GrammarChecker
) -> None:
    assert message in await told(checker, field, value)


def test_what_the_table_does_not_have_is_told_as_it_is_on_one_bounded_line() -> None:
    assert explain("something\n  new") == "something new"
    assert len(explain("x" * 10_000)) == 400


async def test_a_thousand_optional_properties_are_no_limit(checker: GrammarChecker) -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    grammar = await checker.find(fields(guided_json=schema))
    assert "p999" in grammar


def test_the_server_checks_with_the_engines_limits(tmp_path: Any) -> None:
    engines = GrammarCompiler(tmp_path / "tokenizer.json", 1)._limits
    assert str(LIMITS) == str(engines)
