"""Reading a request's JSON body: size limit and strict decoding; body_errors.py says what is wrong with it."""

import asyncio
import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from ringserve.server.errors import BodyTooLargeError, ClientGoneError, RequestError, shown
from ringserve.server.http.body_errors import MAX_REREAD_BYTES, no_json, wrong_value
from ringserve.server.text.json_size import check_json_size

T = TypeVar("T")

_INLINE_BYTES = 65_536  # of a body; what more holds is counted on a thread


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
            raise RequestError(f"Content-Type is {shown(content_type)}: must be application/json")
        if (encoding := request.headers.get("content-encoding", "")).lower() not in ("", "identity"):
            raise RequestError(
                f"Content-Encoding is {shown(encoding)}: send the body as it is, or through a proxy that unpacks"
            )
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
    """Return JSON as a `kind`; strict: no NaN, no Infinity, no lone surrogates, no other type but 16.0 for 16.

    Raises:
        RequestError: Naming the field and its value where there is one.
    """
    try:
        return _decode(body, kind)
    except msgspec.ValidationError as exc:
        raise wrong_value(body, kind, str(exc)) from exc
    except msgspec.DecodeError as exc:
        raise no_json(body, str(exc)) from exc
    except UnicodeDecodeError as exc:
        raise RequestError(f"the body is not valid UTF-8: {exc.reason} at byte {exc.start}") from exc
    except RecursionError as exc:
        raise RequestError("the body is nested too deeply: flatten it") from exc


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        if "got `float`" not in str(exc) or len(body) > MAX_REREAD_BYTES:
            raise
        return msgspec.convert(_with_integers(msgspec.json.decode(body)), kind)


def _with_integers(value: Any) -> Any:
    """Return JSON with 16 for 16.0: JavaScript's and Lua's numbers are all of one kind, and vLLM takes them too."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return {key: _with_integers(item) for key, item in value.items()} if isinstance(value, dict) else value
