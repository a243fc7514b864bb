"""What every generating endpoint does with validated requests: stream them, or collect them; and abort with the client.

The handler's own task only waits for the end or the disconnect.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from ringserve.server.api.chat_settings import ChatSettings
from ringserve.server.api.generation_fields import StreamOptions
from ringserve.server.api.render.chunks import ChunkFormat, StreamIdentity
from ringserve.server.api.render.sse import DONE_ENDING, Ending, EventStream
from ringserve.server.api.response_store import ResponseStore
from ringserve.server.errors import ClientGoneError, ModelNotFoundError, ServerError, shown
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.collector import RequestOutputCollector
from ringserve.server.generation.input_processor import ProcessedRequest
from ringserve.server.generation.outputs import RequestOutput
from ringserve.server.http.request_body import BodyReader
from ringserve.server.http.request_id import HEADER
from ringserve.server.http.sink import Headers, open_sink, until_disconnect

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What the endpoints share."""

    llm: AsyncLLM
    model_names: tuple[str, ...]  # the first is the one that responses report
    version: str
    bodies: BodyReader
    responses: ResponseStore = field(default_factory=ResponseStore)
    chat: ChatSettings = field(default_factory=ChatSettings)
    adapters: list[str] = field(default_factory=list)  # LoRA: models of their own to requests; they come and go
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served.

        Raises:
            ModelNotFoundError: Naming those that are.
        """
        if name is not None and name not in self.model_names and name not in self.adapters:
            served = ", ".join((*self.model_names, *self.adapters))
            raise ModelNotFoundError(f"model is {shown(name)}: this server has {served}", param="model")

    def adapter(self, name: str | None) -> str:
        """Return the adapter that a request for the model `name` wants; "" if none."""
        return name if name in self.adapters else ""

    def identity(self, response_id: str, name: str | None = None) -> StreamIdentity:
        """Return what all chunks of one response to a request for the model `name` have in common."""
        return StreamIdentity(
            response_id=response_id,
            created=int(time.time()),
            model=self.adapter(name) or self.model_names[0],
            fingerprint=f"ringserve-{self.version}",
        )


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what work returns: what a request waits for before it generates. A client that goes away cancels it.

    Raises:
        ClientGoneError: If it did.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError("the client has closed its connection")
    finally:
        working.cancel()
        leaving.cancel()


class StreamResponse:
    """An ASGI response that streams requests' tokens as server-sent events, in one stream, by choice index.

    Args:
        llm: Generates.
        requests: Ready to submit.
        form_of: Makes the chunk format from the requests' collectors, which are filled in when it is used.
        options: The request's `stream_options`.
        request_id: For the response's header; "" for none.
        ending: What the stream ends with.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        requests: list[ProcessedRequest],
        form_of: Callable[[list[RequestOutputCollector]], ChunkFormat],
        options: StreamOptions | None,
        *,
        request_id: str = "",
        ending: Ending = DONE_ENDING,
    ) -> None:
        self._llm = llm
        self._requests = requests
        self._form_of = form_of
        self._options = options or StreamOptions()
        self._ending = ending
        self._headers: Headers = [(HEADER.encode(), request_id.encode())] if request_id else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the stream has ended or the client is gone."""
        sink = open_sink(scope, send)
        collectors: list[RequestOutputCollector] = []
        stream = EventStream(
            sink,
            self._form_of(collectors),
            cached_tokens=lambda: sum(collector.num_cached_tokens for collector in collectors),
            headers=self._headers,
            num_choices=sum(request.params.n for request in self._requests),
            num_prompt_tokens=[len(request.prompt_token_ids) for request in self._requests],
            include_usage=bool(self._options.include_usage),
            continuous_usage=bool(self._options.continuous_usage_stats),
            ending=self._ending,
        )
        try:
            _submit(self._llm, self._requests, collectors, stream)
            sink.on_writable = _Flush(collectors)
            sink.on_idle = stream.keep_alive
            for collector in collectors:
                collector.attach(stream)
            await sink.wait_closed(receive)
        finally:
            sink.on_writable = sink.on_idle = None
            for collector in collectors:
                self._llm.release(collector)


class _Flush:
    """Pushes what has merged while the client was slow."""

    def __init__(self, collectors: list[RequestOutputCollector]) -> None:
        self._collectors = collectors

    def __call__(self) -> None:
        for collector in self._collectors:
            collector.flush()


def _submit(
    llm: AsyncLLM, requests: list[ProcessedRequest], collectors: list[RequestOutputCollector], stream: EventStream
) -> None:
    try:
        _submit_all(llm, requests, collectors)
    except ServerError as exc:
        stream.fail(exc)


def _submit_all(llm: AsyncLLM, requests: list[ProcessedRequest], collectors: list[RequestOutputCollector]) -> None:
    llm.check_admission_of(requests)
    for request in requests:
        collectors.append(llm.submit(request, is_admitted=True))


async def collect(llm: AsyncLLM, requests: list[ProcessedRequest], receive: Receive) -> list[RequestOutput]:
    """Return the final output of each request; a client that goes away aborts them all at once.

    Raises:
        ClientGoneError: If it did.
        ServerError: The first error of any of them; the others are aborted.
    """
    collectors: list[RequestOutputCollector] = []

    def abort(_: object) -> None:
        for collector in collectors:
            llm.release(collector)
            collector.put_error(ClientGoneError("the client has closed its connection"))

    listener = asyncio.ensure_future(until_disconnect(receive))
    listener.add_done_callback(abort)
    try:
        _submit_all(llm, requests, collectors)
        return [await collector.get() for collector in collectors]
    finally:
        listener.remove_done_callback(abort)
        listener.cancel()
        for collector in collectors:
            llm.release(collector)
