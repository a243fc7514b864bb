"""Reading a request's JSON body: size limit, strict decoding, and errors that name the field and its value."""

import asyncio
import re
import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.errors import BodyTooLargeError, ClientGoneError, RequestError
from server.json_size import check_json_size

T = TypeVar("T")

_INLINE_BYTES = 65_536  # of a body; what more holds is counted on a thread
_MAX_REREAD_BYTES = 2**20  # of a body that is decoded once more to show a wrong value
_MAX_REASON_CHARS = 200  # msgspec repeats a whole value where it has no enum or tag for it

_NOTHING = object()
_AT_PATH = re.compile(r" - at `\$(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_SOME_VALUE = "[...]"  # how msgspec calls one of an object's values, whose key it does not say
_GOT = re.compile(r"got `(\w+)`$")
_KINDS = {dict: "object", list: "array", str: "str", int: "int", float: "float", bool: "bool", type(None): "null"}


class BodyReader:
    """Reads bodies of at most `max_bytes`. Large ones are decoded one a turn of the loop, however many come at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._turn = asyncio.Lock()

    async def read(self, request: Request, kind: type[T]) -> T:
        """Return a request's body as a `kind`, and note in its state when it was there.

        Raises:
            RequestError: If it is not JSON of this kind, or its content type is not application/json.
            BodyTooLargeError: If it exceeds the limit.
            ClientGoneError: If the client left before it was there.
        """
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise RequestError(f"Content-Type is {content_type!r}: must be application/json")
        try:
            body = await self._bytes(request)
        except ClientDisconnect as exc:
            raise ClientGoneError("the client closed its connection before its request was complete") from exc
        request.state.arrival_ns = time.monotonic_ns()
        if len(body) <= _INLINE_BYTES:
            return decode(body, kind)
        await asyncio.to_thread(check_json_size, body, "the body")
        async with self._turn:
            await asyncio.sleep(0)  # all others have their turn between two of these
            return decode(body, kind)

    async def _bytes(self, request: Request) -> bytes:
        most = self._max_bytes
        length = request.headers.get("content-length", "0").lstrip("0")  # int() takes no more than 4,300 digits
        if length.isdecimal() and int(length) > most:
            raise BodyTooLargeError(f"the body has {length} bytes: at most {most}")
        parts, num_bytes = [], 0
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > most:
                raise BodyTooLargeError(f"the body exceeds the limit of {most} bytes")
            parts.append(part)
        return b"".join(parts)


def decode(body: bytes, kind: type[T]) -> T:
    """Return JSON as a `kind`; strict: no NaN, no Infinity, no lone surrogates, no type coercion.

    Raises:
        RequestError: Naming the field and its value where there is one.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        raise _field_error(body, str(exc)) from exc
    except msgspec.DecodeError as exc:
        hint = ", or a lone surrogate in a string" if b"\\ud" in body.lower() else ""
        raise RequestError(f"the body is not valid JSON{hint}: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise RequestError(f"the body is not valid UTF-8: {exc.reason} at byte {exc.start}") from exc
    except RecursionError as exc:
        raise RequestError("the body is nested too deeply: flatten it") from exc


def _field_error(body: bytes, message: str) -> RequestError:
    match = _AT_PATH.search(message)
    reason = _AT_PATH.sub("", message)
    at = _with_key(body, match[1], reason) if match else ""
    path = at.lstrip(".")
    if len(reason) > _MAX_REASON_CHARS:
        reason = f"{reason[:_MAX_REASON_CHARS]}..."
    missing = _MISSING.search(reason)
    if missing is not None:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{name} is missing: it is required", param=name)
    if not path:
        return RequestError(f"the body is wrong: {reason}", param=None)
    return RequestError(f"{path} is {_shown_at(body, at)}: {reason}", param=path)


def _with_key(body: bytes, path: str, reason: str) -> str:
    """Put the key of the first value that msgspec can mean into a path that ends without it."""
    got = _GOT.search(reason)
    if not path.endswith(_SOME_VALUE) or got is None:
        return path
    path = path.removesuffix(_SOME_VALUE)
    values = _value_at(body, path)
    keys = [key for key, value in values.items() if _KINDS[type(value)] == got[1]] if isinstance(values, dict) else []
    return f"{path}.{keys[0]}" if keys else path


def _shown_at(body: bytes, path: str) -> str:
    """Return the value at a msgspec path for an error message."""
    if len(body) > _MAX_REREAD_BYTES:
        return "wrong"
    value = _value_at(body, path)
    text = "not readable" if value is _NOTHING else msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else f"{text[:100]}..."


def _value_at(body: bytes, path: str) -> Any:
    """Return the value at a msgspec path; _NOTHING where there is none, or the body is too long to look again."""
    if len(body) > _MAX_REREAD_BYTES:
        return _NOTHING
    try:
        value: Any = msgspec.json.decode(body)
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError):
        return _NOTHING
    return value
