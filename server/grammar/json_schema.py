"""What a client's JSON schema must not hold for its grammar to mean the same: checked and tightened before llguidance.

llguidance refuses the keywords that it does not know of and follows all others; this walk refuses, by name, the few
where it would follow less than the schema says, and drops what says nothing. Runs on a thread for grammars.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from ringserve.server.errors import RequestError, shown

MAX_SCHEMA_BYTES = 256 * 1024
_MAX_DEPTH = 100
_EXACT_INTEGER = 2**53  # larger bounds are rounded to a double

_ONE_SCHEMA = ("additionalProperties", "items", "additionalItems")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords of old drafts that llguidance takes for comments; `x-guidance` would switch its checks off.
_REFUSED = ("disallow", "divisibleBy", "extends", "x-guidance")

_YEAR_MONTH = r"[0-9]{4}-(?:0[13-9]|1[0-2])-[0-9]{2}|[0-9]{4}-02-(?:[01][0-9]|2[0-8])"
_LEAP_YEAR = r"[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00"
_DATE = f"(?:{_YEAR_MONTH}|(?:{_LEAP_YEAR})-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5]"  # no leap seconds: most readers refuse them
# The formats' own grammars let the 29th of February and the 60th second be at any time.
_TIGHTER = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}.{_TIME}"}

# llguidance (1.9) lets a class that holds control characters, but no quote or no backslash, have those too in JSON. So
# negated classes lose the control characters, and where other classes may hold any, the pattern is refused.
_NEGATION = re.compile(r"(\\.)|\[\^(\]?)", re.DOTALL)
_NEGATED_CLASS = re.compile(r"\[\^\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_CLASS = re.compile(r"(\\.)|(\[\^?\]?)((?:\\.|[^\]\\])*)\]", re.DOTALL)
_CLASS_SYNTAX = re.compile(r"\\.|\[|&&|--|~~", re.DOTALL)
# It leaves out the one control character that JSON may hold raw, wherever a schema has it.
_DELETE = re.compile(r"\x7f|\\x7[fF]|\\u007[fF]|\\[xu]\{0*7[fF]\}")
_CONTROLS = re.compile(r"\\[Pc]|\\p\{?\^?C|\\[xu]\{?0{0,6}[01]?[0-9a-fA-F](?![0-9a-fA-F])|\[:|\\[tnrfv]-|[\0-\x1f]")


def prepare(schema: Any, field: str) -> dict[str, Any]:
    """Return a schema for llguidance that admits what the given one admits.

    Args:
        schema: As it came, an object or its JSON text; left as it is.
        field: The request's, for the message.

    Raises:
        RequestError: Naming the field and the keyword.
    """
    parsed = _parse(schema, field) if isinstance(schema, str) else schema
    if not isinstance(parsed, dict):
        raise RequestError(f"{field} holds the schema {shown(parsed)}: must be a JSON object", param=field)
    size = len(msgspec.json.encode(parsed))
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(f"{field} holds a schema of {size} bytes: at most {MAX_SCHEMA_BYTES}", param=field)
    prepared: dict[str, Any] = _Walk(field, parsed).schema(parsed, 0)
    return prepared


def _parse(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as exc:
        raise RequestError(f"{field} is no JSON: {exc}", param=field) from exc


class _Walk:
    """One pass over the places where a schema holds schemas; `root` is the whole."""

    def __init__(self, field: str, root: dict[str, Any]) -> None:
        self._field = field
        self._root = root

    def schema(self, node: Any, depth: int) -> Any:
        """Return a copy of one schema, prepared; what is no schema at all is llguidance's to refuse."""
        if not isinstance(node, dict):
            return node
        if depth > _MAX_DEPTH:
            raise self._error(f"nests more than {_MAX_DEPTH} schemas")
        self._check(node)

        def inner(value: Any) -> Any:
            return self.schema(value, depth + 1)

        prepared = {keyword: _descend(keyword, value, inner) for keyword, value in node.items()}
        if prepared.get("uniqueItems") is False:
            del prepared["uniqueItems"]
        for keyword in _COUNTS:
            if isinstance(count := prepared.get(keyword), float) and count.is_integer():
                prepared[keyword] = int(count)
        if "anyOf" not in prepared and self._are_apart(prepared.get("oneOf")):
            prepared["anyOf"] = prepared.pop("oneOf")
        if isinstance(prepared.get("pattern"), str):
            prepared["pattern"] = self._pattern(prepared["pattern"])
        if isinstance(prepared.get("patternProperties"), dict):
            of_names = prepared["patternProperties"]
            prepared["patternProperties"] = {self._pattern(name): value for name, value in of_names.items()}
        if prepared.get("format") in tuple(_TIGHTER):
            all_of = prepared.get("allOf", [])
            tighter = {"pattern": _TIGHTER[prepared["format"]]}
            prepared["allOf"] = [*(all_of if isinstance(all_of, list) else [all_of]), tighter]
        return prepared

    def _are_apart(self, alternatives: Any) -> bool:
        """Whether no value can be of two of a oneOf's alternatives: each has types of its own."""
        if not isinstance(alternatives, list):
            return False
        kinds = [_kinds(alternative, self._root, _MAX_DEPTH) for alternative in alternatives]
        return all(kinds) and len(frozenset().union(*kinds)) == sum(map(len, kinds))

    def _pattern(self, pattern: str) -> str:
        """Return a pattern that means to Rust's regex what it means in JavaScript, as far as its classes go.

        Negated ones hold no control characters; a bracket inside, and what would be an operator, is a character.
        """
        if _CONTROLS.search(_NEGATED_CLASS.sub("", pattern)) or _DELETE.search(_CLASS.sub(r"\1", pattern)):
            raise self._error(f"has the pattern {shown(pattern)}: control characters are not supported there")
        pattern = _CLASS.sub(_plain_class, pattern)
        return _NEGATION.sub(lambda found: found[1] or r"[^\x00-\x1f" + (found[2] and r"\]"), pattern)

    def _check(self, node: dict[str, Any]) -> None:
        for keyword in _REFUSED:
            if keyword in node:
                raise self._error(f"has the keyword {keyword}, which is not supported")
        required = node.get("required", [])
        if not isinstance(required, list):
            raise self._error(f"has required {shown(required)}: must be a list of property names")
        min_properties = node.get("minProperties", 0)
        if isinstance(min_properties, int) and min_properties > len(required) + 1:
            # A name that comes twice would count twice.
            raise self._error(f"has minProperties {min_properties}: at most one more than are required is supported")
        for keyword in _BOUNDS:
            bound = node.get(keyword)
            if isinstance(bound, int) and abs(bound) > _EXACT_INTEGER:
                raise self._error(f"has {keyword} {bound}: at most 2**53 is exact")
        dialect = node.get("$schema", "")
        if isinstance(dialect, str) and dialect and "json-schema.org" not in dialect:
            raise self._error(
                f"has the $schema {shown(dialect)}: only those of json-schema.org are known, leave it out"
            )
        for keyword in ("enum", "const"):
            if keyword in node and _has_control(node[keyword]):
                raise self._error(f"has a control character in {keyword}, which is not supported")
            if keyword in node and _has_inexact(node[keyword]):
                raise self._error(f"has an integer beyond 2**53 in {keyword}: no such number is exact")
        names = node.get("properties")
        if isinstance(names, dict) and any("\x7f" in name for name in names):
            raise self._error("has a control character in the name of a property, which is not supported")

    def _error(self, what: str) -> RequestError:
        return RequestError(f"{self._field}: the schema {what}", param=self._field)


def _descend(keyword: str, value: Any, prepare_inner: Callable[[Any], Any]) -> Any:
    if keyword in _SCHEMA_MAPS and isinstance(value, dict):
        return {name: prepare_inner(inner) for name, inner in value.items()}
    if keyword in _SCHEMA_LISTS and isinstance(value, list):
        return [prepare_inner(inner) for inner in value]
    return prepare_inner(value) if keyword in _ONE_SCHEMA else value


def _plain_class(found: "re.Match[str]") -> str:
    """Return an escape as it is, and a class with everything escaped that is syntax to Rust's regex alone."""
    if found[1]:
        return found[1]
    inner = _CLASS_SYNTAX.sub(
        lambda part: part[0] if part[0][0] == "\\" else f"{part[0][:-1]}\\{part[0][-1]}", found[3]
    )
    return f"{found[2]}{inner}]"


def _kinds(schema: Any, root: dict[str, Any], depth: int) -> frozenset[str]:
    """Return the types of a schema's values, a number for an integer; none if that is not plain."""
    if not isinstance(schema, dict) or depth == 0:
        return frozenset()
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset("number" if kind == "integer" else str(kind) for kind in given)
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(_kind(value) for value in ([schema["const"]] if "const" in schema else schema["enum"]))
    reference = schema.get("$ref")
    return _kinds(_target(reference, root), root, depth - 1) if isinstance(reference, str) else frozenset()


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "number", float: "number", type(None): "null"}
    return names[type(value)]


def _target(reference: str, root: dict[str, Any]) -> Any:
    """Return what a reference to a place in the schema means, None if it is none or there is nothing."""
    value: Any = root if reference.startswith("#/") else None
    for step in reference[2:].split("/"):
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def _has_control(value: Any) -> bool:
    """Whether JSON can write a string in the value only as a \\u escape, which the grammars have none of; or a DEL."""
    text = msgspec.json.encode(value)
    return b"\\u" in text.replace(b"\\\\", b"") or b"\x7f" in text


def _has_inexact(value: Any) -> bool:
    """Whether a value holds an integer that a double rounds."""
    if isinstance(value, dict):
        return any(map(_has_inexact, value.values()))
    if isinstance(value, list):
        return any(map(_has_inexact, value))
    return isinstance(value, int) and abs(value) > _EXACT_INTEGER
