"""What a request says of its output's form, as one grammar in llguidance's notation: the text that the engine gets.

Knows the fields: OpenAI's response_format, vLLM's structured_outputs and the older guided_*. Knows no engine.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
from llguidance import LLMatcher, grammar_from

from ringserve.server.errors import RequestError, shown
from ringserve.server.grammar import json_schema
from ringserve.server.grammar.errors import explain

MAX_GRAMMAR_BYTES = 256 * 1024
_MAX_WRITTEN_BYTES = 64 * 1024  # of grammars that people write: those in GBNF are converted by a parser in Python
# No unbounded whitespace, on which small models never end, and no \u escapes: by one, an object could name a property
# a second time without the grammar's seeing it. All text can do without.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_ESCAPES = 'nrbtf\\"'


class Grammar(str):
    """A grammar in llguidance's notation, and the request field that it comes from.

    `parts` makes grammars of other fields that it was put together from: where it is wrong, one of them may be why.
    A plain str, whatever made it, does as SamplingParams.grammar too.
    """

    field: str = "grammar"
    parts: "Callable[[], Iterable[Grammar]]" = tuple
    is_written: bool = False  # by people, of terminals that may begin as others do: no alternative can stand beside it


def field_of(grammar: str) -> str:
    """Return the request field that a grammar comes from."""
    return grammar.field if isinstance(grammar, Grammar) else Grammar.field


def _named(text: str, field: str) -> Grammar:
    grammar = Grammar(text)
    grammar.field = field
    return grammar


def from_json_schema(schema: Any, *, field: str = "json_schema", **whitespace: Any) -> Grammar:
    """Return the grammar of the JSON texts that a schema admits.

    Args:
        schema: An object, or its JSON text.
        field: The request's, for errors.
        whitespace: llguidance's `whitespace_pattern` or `whitespace_flexible`, if not the usual.

    Raises:
        RequestError: If the schema holds what cannot be followed exactly.
    """
    prepared = json_schema.prepare(schema, field)
    options = {"json_allowed_escapes": _ESCAPES, **(whitespace or {"whitespace_pattern": _WHITESPACE})}
    return _named(LLMatcher.grammar_from_json_schema(prepared, overrides=options), field)  # type: ignore[arg-type]


def json_rule(schema: dict[str, Any], *, field: str, is_flexible: bool = False) -> str:
    """Return a schema as an expression of Lark's notation.

    Args:
        schema: A document with refs of its own.
        field: The request's, for errors.
        is_flexible: Whether spaces are as free as from_json_schema's; else they are those that json.dumps writes.

    Raises:
        RequestError: If the schema holds what cannot be followed exactly.
    """
    fixed = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    spaces = {"whitespace_pattern": _WHITESPACE} if is_flexible else fixed
    options = {"json_allowed_escapes": _ESCAPES, **spaces}
    return f"%json {msgspec.json.encode(json_schema.prepare(schema, field) | {'x-guidance': options}).decode()}"


def with_form(rules: str, form: str) -> Grammar:
    """Return a grammar whose rules, in Lark's notation, may say `@form` for what another grammar admits."""
    grammars = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    named = {**grammars[0], "name": "form"}
    return Grammar(json.dumps({"grammars": [{"lark_grammar": rules}, named, *grammars[1:]]}))


def json_object(*, field: str = "json_object", **whitespace: Any) -> Grammar:
    """Return the grammar of all JSON objects; arguments as from_json_schema."""
    return from_json_schema({"type": "object"}, field=field, **whitespace)


def regex(pattern: str, *, field: str = "regex") -> Grammar:
    """Return the grammar of the texts that a regular expression matches as a whole.

    Raises:
        RequestError: If the pattern is no text, or too long.
    """
    return _named(LLMatcher.grammar_from_regex(_text(pattern, field)), field)


def choice(choices: Sequence[str], *, field: str = "choice") -> Grammar:
    """Return the grammar of a few texts.

    Raises:
        RequestError: If there are none, or one is no text.
    """
    is_list = isinstance(choices, (list, tuple)) and len(choices) > 0
    if not is_list or not all(isinstance(each, str) for each in choices):
        raise RequestError(f"{field} is {shown(choices)}: must be a list of texts, at least one", param=field)
    # One terminal, which is one automaton; as alternatives of a rule, thousands would be too complex.
    texts = " | ".join(quote(each) for each in choices if each)
    if "" not in choices:
        return _named(f"start: CHOICE\nCHOICE: {texts}", field)
    return _named(f"start: CHOICE?\nCHOICE: {texts}" if texts else 'start: ""', field)


def ebnf(text: str, *, field: str = "grammar") -> Grammar:
    """Return a grammar that is written in Lark's notation, or in GBNF, which has "::=" for its colons.

    Raises:
        RequestError: If it is no text, too long, in neither, or cannot be converted.
    """
    if _text(text, field).lstrip().startswith("{"):  # the library's own notation, in which schemas would go unchecked
        raise RequestError(f"{field} is {shown(text)}: must be a grammar in Lark's notation or in GBNF", param=field)
    notation: Literal["lark", "grammar"] = "grammar" if "::=" in text else "lark"
    try:
        grammar = _named(grammar_from(notation, text), field)
    except ValueError as exc:
        raise RequestError(f"{field}: {explain(str(exc))}", param=field) from exc
    grammar.is_written = True
    return grammar


class StructuredFields(Protocol):
    """The request fields that this module reads."""

    response_format: Any
    structured_outputs: Any
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any


def has_structure(fields: StructuredFields) -> bool:
    """Whether a request asks for a form at all; False settles it, True may still mean plain text."""
    return any(getattr(fields, name) is not None for name in _READERS)


def find_grammar(fields: StructuredFields) -> Grammar | None:
    """Return the one grammar that a request asks for, None for plain text. Takes milliseconds: for a thread.

    Raises:
        RequestError: If the fields ask for several, or for one that cannot be made.
    """
    found = [
        grammar
        for name, read in _READERS.items()
        if (value := getattr(fields, name)) is not None and (grammar := read(value, name)) is not None
    ]
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(grammar.field for grammar in found))
        raise RequestError(f"{names} are set: the output can have one form, leave the others out", param=found[1].field)
    if found and len(found[0].encode()) > MAX_GRAMMAR_BYTES:
        field = found[0].field
        raise RequestError(f"{field} makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes", param=field)
    return found[0] if found else None


def _read_response_format(value: Any, field: str) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object(field=field)
    if kind == "json_schema":
        named = value.get("json_schema")
        if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
            raise RequestError(f"{field} has no json_schema.schema that is an object", param=field)
        return from_json_schema(named["schema"], field=field)
    raise RequestError(f"{field} is {shown(value)}: its type must be text, json_object or json_schema", param=field)


def _read_structured_outputs(value: Any, field: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise RequestError(f"{field} is {shown(value)}: must be an object", param=field)
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    whitespace = _read_whitespace(given, field)
    for name in given:
        if name not in _FORMS:
            raise RequestError(f"{field}.{name} is not supported: leave it out", param=field)
    if len(given) != 1:
        named = ", ".join(given) or "none"
        raise RequestError(f"{field} has {named}: must have exactly one of {', '.join(_FORMS)}", param=field)
    ((name, item),) = given.items()
    return _FORMS[name](item, field, whitespace)


def _read_whitespace(given: dict[str, Any], field: str) -> dict[str, Any]:
    """Take the whitespace options out of what is given."""
    compact, pattern = given.pop("disable_any_whitespace", False), given.pop("whitespace_pattern", None)
    if compact:
        return {"whitespace_flexible": False}
    return {} if pattern is None else {"whitespace_pattern": _text(pattern, field)}


_FORMS: Mapping[str, Callable[[Any, str, dict[str, Any]], Grammar]] = {
    "json": lambda item, field, whitespace: from_json_schema(item, field=field, **whitespace),
    "json_object": lambda _, field, whitespace: json_object(field=field, **whitespace),
    "regex": lambda item, field, _: regex(item, field=field),
    "choice": lambda item, field, _: choice(item, field=field),
    "grammar": lambda item, field, _: ebnf(item, field=field),
}
_READERS: Mapping[str, Callable[[Any, str], Grammar | None]] = {
    "response_format": _read_response_format,
    "structured_outputs": _read_structured_outputs,
    "guided_json": lambda value, name: from_json_schema(value, field=name),
    "guided_regex": lambda value, name: regex(value, field=name),
    "guided_choice": lambda value, name: choice(value, field=name),
    "guided_grammar": lambda value, name: ebnf(value, field=name),
}


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{field} is {shown(value)}: must be a text", param=field)
    if len(value.encode()) > _MAX_WRITTEN_BYTES:
        raise RequestError(f"{field} has more than {_MAX_WRITTEN_BYTES} bytes: shorten it", param=field)
    return value


def quote(text: str) -> str:
    """Return a text as Lark writes it: like JSON, in ASCII without control characters."""
    return json.dumps(text).replace("\x7f", r"\u007f")
