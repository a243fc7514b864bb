"""What is wrong with a request's body, as its sender can mend it: the field, its value, and what it must be.

A body that msgspec refuses is read once more here, by readers that take more, to show what it holds.
"""

import codecs
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from ringserve.server.errors import RequestError, shown

MAX_REREAD_BYTES = 2**20  # of a body that is decoded once more
_MAX_SEARCHED_BYTES = 2**18  # of one whose every value is looked at
_MAX_REASON_CHARS = 200  # msgspec repeats a whole value where it has no tag for it

_NOTHING = object()
_AT_PATH = re.compile(r" - at `\$(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_SOME_VALUE = "[...]"  # how msgspec calls one of an object's values, whose key it does not say
_GOT = re.compile(r"got `(\w+)`$")
_NO_CHOICE = re.compile(r"Invalid (?:enum )?value ")
_KINDS = {dict: "object", list: "array", str: "str", int: "int", float: "float", bool: "bool", type(None): "null"}
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_WHOLE = "it holds half of a surrogate pair, send whole characters"


class _Number(str):
    """A number as a body has it."""

    __slots__ = ()


def no_json(body: bytes, reason: str) -> RequestError:
    """Return the error of a body that is no JSON, for a reason that msgspec has given."""
    if not body.strip():
        return RequestError("the body is empty: must be a JSON object")
    if body.startswith(_MARKS) or b"\0" in body[:2]:
        return RequestError("the body is not plain UTF-8: send it so, without a byte order mark")
    try:
        body.decode()
    except UnicodeDecodeError as exc:
        return RequestError(f"the body is not valid UTF-8: {exc.reason} at byte {exc.start}")
    return _fault(body) or RequestError(f"the body is not valid JSON: {reason}")


def wrong_value(body: bytes, kind: Any, reason: str) -> RequestError:
    """Return the error of a body that is JSON, but not of its kind, for a reason that msgspec has given."""
    if "out of range" in reason and (error := _fault(body)) is not None:
        return error
    match = _AT_PATH.search(reason)
    reason = _AT_PATH.sub("", reason)
    at = _with_key(body, match[1], reason) if match else ""
    if (error := _structure_error(at.lstrip("."), reason)) is not None:
        return error
    value = "wrong" if len(body) > MAX_REREAD_BYTES else _shown(_value_at(body, at))
    return _value_error(at.lstrip("."), value, _with_choices(reason, kind, at))


def wrong_item(item: Any, where: str, kind: Any, reason: str) -> RequestError:
    """Return the same for a part of a body, and what its sender calls that; "" for an object that has no name."""
    match = _AT_PATH.search(reason)
    reason = _AT_PATH.sub("", reason)
    at = match[1] if match else ""
    path = (where + at).lstrip(".")
    if (error := _structure_error(path, reason)) is not None:
        return error
    return _value_error(path, _shown(_found(item, at)), _with_choices(reason, kind, at))


def _structure_error(path: str, reason: str) -> RequestError | None:
    """Return the error of a field that is not there, or of the body as a whole."""
    missing = _MISSING.search(reason)
    if missing is not None:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{name} is missing: it is required", param=name)
    return None if path else RequestError(f"the body is wrong: {reason}")


def _value_error(path: str, value: str, reason: str) -> RequestError:
    if len(reason) > _MAX_REASON_CHARS:
        reason = f"{reason[:_MAX_REASON_CHARS]}..."
    return RequestError(f"{path} is {value}: {reason}", param=path)


def _with_choices(reason: str, kind: Any, at: str) -> str:
    """Say what a text must be, where msgspec says only that it is none of that."""
    if _NO_CHOICE.match(reason) is None:
        return reason
    steps = [name or int(index) for name, index in _STEP.findall(at)]
    *most, last = dict.fromkeys(_choices(_type_info(kind), steps))
    return f"must be {', '.join(most)} or {last}" if most else f"must be {last}"


@functools.cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _choices(info: inspect.Type, steps: Sequence[str | int]) -> Iterator[str]:
    """Yield the texts that a type has at a place; for an object's tag, those of all alternatives."""
    if isinstance(info, inspect.UnionType):
        for each in info.types:
            yield from _choices(each, steps)
    elif not steps:
        yield from map(str, info.values) if isinstance(info, inspect.LiteralType) else ()
    elif isinstance(info, inspect.ListType):
        yield from _choices(info.item_type, steps[1:])
    elif isinstance(info, inspect.StructType):
        if steps == [info.tag_field]:
            yield str(info.tag)
        for field in info.fields:
            if field.encode_name == steps[0]:
                yield from _choices(field.type, steps[1:])


def _fault(body: bytes) -> RequestError | None:
    """Return the error of the first lone surrogate, or number that is none: JSON has neither, many libraries do."""
    try:
        _check(_lax(body) if len(body) <= _MAX_SEARCHED_BYTES else None, "")
    except RequestError as exc:
        return exc
    except RecursionError:
        pass
    return None


def _check(value: Any, path: str) -> None:
    if isinstance(value, _Number):
        if not math.isfinite(float(value)):
            raise _value_error(path or "the body", _shown(value), "must be a finite number, as a double holds it")
    elif isinstance(value, str):
        if not _is_whole(value):
            raise _value_error(path or "the body", shown(value), _WHOLE)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not _is_whole(key):
                raise RequestError(f"{path or 'the body'} has the key {shown(key)}: {_WHOLE}", param=path or None)
            _check(item, f"{path}.{key}" if path else key)


def _is_whole(text: str) -> bool:
    """Whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lax(body: bytes) -> Any:
    """Return what Python's own reader makes of a body, numbers as they are written; _NOTHING if it refuses it too."""
    try:
        return json.loads(body, parse_float=_Number, parse_int=_Number, parse_constant=_Number)
    except (ValueError, RecursionError):
        return _NOTHING


def _with_key(body: bytes, path: str, reason: str) -> str:
    """Put the key of the first value that msgspec can mean into a path that ends without it."""
    got = _GOT.search(reason)
    if not path.endswith(_SOME_VALUE) or got is None:
        return path
    path = path.removesuffix(_SOME_VALUE)
    values = _value_at(body, path)
    keys = [key for key, value in values.items() if _KINDS[type(value)] == got[1]] if isinstance(values, dict) else []
    return f"{path}.{keys[0]}" if keys else path


def _shown(value: Any) -> str:
    """Return a value for an error message."""
    if value is _NOTHING:
        return "not readable"
    text = value if isinstance(value, _Number) else msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= 100 else f"{text[:100]}..."


def _value_at(body: bytes, path: str) -> Any:
    """Return the value at a msgspec path; _NOTHING where there is none, or the body is too long to look again."""
    if len(body) > MAX_REREAD_BYTES:
        return _NOTHING
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        value = _lax(body)  # a number of many digits
    return _found(value, path)


def _found(value: Any, path: str) -> Any:
    try:
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
    except (LookupError, TypeError, ValueError):
        return _NOTHING
    return value
