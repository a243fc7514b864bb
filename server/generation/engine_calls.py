"""Calls to the engine that are not answered yet, by id. In the event loop's thread."""

import asyncio
import itertools
import struct
from typing import Any

import msgspec

from ringserve.server.errors import ConflictError, EngineCallError, NotFoundError, RequestError, ServerError
from ringserve.shm_transport.request_ring import Outbox

_CALL_ID = struct.Struct("<Q")
_ERRORS = {"invalid": RequestError, "not_found": NotFoundError, "conflict": ConflictError}


class _Reply(msgspec.Struct):
    result: Any = None
    error: str | None = None
    fault: str = "failed"


class EngineCalls:
    """Futures of the engine's replies; none is left pending if whoever notices the engine's end calls `fail_all`."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._ids = itertools.count(1)  # 0 is the order to shut down, whose reply nobody reads
        self._pending: dict[int, asyncio.Future[Any]] = {}

    def send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        """Queue a call; the caller flushes the outbox.

        Returns:
            A future of the result. A caller that no longer waits cancels it; the engine carries on.

        Raises:
            RequestError: If an argument is no JSON.
        """
        try:
            body = msgspec.json.encode({"method": method, "args": args, "kwargs": kwargs})
        except (TypeError, ValueError) as exc:
            raise RequestError(f"the arguments of {method} are no JSON: {exc}") from exc
        call_id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        future.add_done_callback(lambda _: self._pending.pop(call_id, None))
        self._outbox.call(call_id, body)
        return future

    def resolve(self, body: bytes) -> None:
        """Take the body of a REPLY; one to a call that nobody waits for is dropped."""
        future = self._pending.pop(_CALL_ID.unpack_from(body)[0], None)
        if future is None or future.done():
            return
        reply = msgspec.json.decode(body[_CALL_ID.size :], type=_Reply)
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(_ERRORS.get(reply.fault, EngineCallError)(reply.error))

    def fail_all(self, error: ServerError) -> None:
        """End every call that waits with an error."""
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)
