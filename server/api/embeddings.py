"""POST /v1/embeddings: request and answer types, and the way between them.

A large answer is encoded on a thread, row by row: msgspec holds the GIL while it encodes, a row takes it for some
microseconds, 2048 rows in one call for a tenth of a second.
"""

import asyncio
import base64
import functools
import time
from collections.abc import Coroutine
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive

from ringserve.server.api.serving import Serving
from ringserve.server.errors import ClientGoneError, DeadlineError, RequestError, shown
from ringserve.server.generation.input_processor import EncodeRequest, Truncation
from ringserve.server.http.deadline import deadline_s
from ringserve.server.http.endpoint import Endpoint
from ringserve.server.http.request_id import HEADER, request_id
from ringserve.server.http.sink import until_disconnect
from ringserve.server.workers import run_all, run_near
from ringserve.shm_transport.records import Pooling

T = TypeVar("T")

MAX_INPUTS = 2048  # OpenAI's
_AT_ONCE = 256  # inputs of one request in the engine's queue, so that a large one leaves room for others
_INLINE_NUMBERS = 16_384  # of an answer; more are encoded on a thread: so many take about a millisecond


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    normalize: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    timeout_s: float | None = None

    def inputs(self) -> list[str | list[int]]:
        """Return the inputs: each a text or a list of token ids.

        Raises:
            RequestError: If there are none, too many, or they are of mixed kinds.
        """
        given: Any = self.input
        if not isinstance(given, list):
            return [given]
        kinds = set(map(type, given))
        if not kinds:
            raise RequestError("input is empty: a text, token ids, or a list of either", param="input")
        if len(kinds) > 1:
            raise RequestError(
                "input is a list of mixed kinds: all texts, all token ids, or all lists of token ids", param="input"
            )
        if kinds == {int}:
            return [given]
        if len(given) > MAX_INPUTS:
            raise RequestError(f"input is a list of {len(given)}: at most {MAX_INPUTS} inputs", param="input")
        return given

    def encode_requests(self, response_id: str, adapter: str = "") -> list[EncodeRequest]:
        """Return what the engine is asked for; with an adapter, what the model it makes would embed."""
        inputs, truncation = self.inputs(), Truncation.of(self.truncate_prompt_tokens, self.truncation_side)
        return [
            EncodeRequest(
                request_id=f"{response_id}-{i}",
                prompt=prompt,
                pooling=None if self.pooling is None else Pooling[self.pooling.upper()],
                is_normalized=self.normalize is not False,
                add_special_tokens=self.add_special_tokens is not False,
                truncation=truncation,
                priority=self.priority or 0,
                name=f"input[{i}]" if len(inputs) > 1 else "input",
                adapter=adapter,
            )
            for i, prompt in enumerate(inputs)
        ]

    def check_dimensions(self, embedding_size: int) -> None:
        """Refuse more dimensions than there are.

        Raises:
            RequestError: Naming the limit.
        """
        if self.dimensions is not None and not 1 <= self.dimensions <= embedding_size:
            raise RequestError(
                f"dimensions is {shown(self.dimensions)}: from 1 to the model's {embedding_size}", param="dimensions"
            )


class EmbeddingData(msgspec.Struct):
    """One input's embedding: numbers, or the base64 of little-endian 32-bit floats."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """What /v1/embeddings answers."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage


async def embeddings(request: Request) -> ASGIApp:
    """POST /v1/embeddings."""
    serving: Serving = request.app.state.serving
    llm = serving.llm
    body = await serving.bodies.read(request, EmbeddingRequest)
    serving.check_model(body.model)
    body.check_dimensions(llm.model.embedding_size)
    name = request_id(request, body.request_id)
    response_id = f"embd-{name}"
    ends_s = deadline_s(request, body.timeout_s)
    requests = body.encode_requests(response_id, serving.adapter(body.model))
    llm.check_admission(min(len(requests), _AT_ONCE))
    processed = await llm.input_processor.process_encode(requests)
    llm.check_admission_of(processed[:_AT_ONCE])  # those that are in the queue at the same time
    jobs = [functools.partial(llm.embed, each, is_admitted=True) for each in processed]
    outputs = await _unless_gone(run_all(jobs, at_once=_AT_ONCE), request.receive, ends_s)
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    identity = serving.identity(response_id, body.model)
    answer = EmbeddingResponse(
        id=response_id, created=identity.created, model=identity.model, data=[],
        usage=EmbeddingUsage(num_tokens, num_tokens),
    )  # fmt: skip
    rows = _cut(np.stack([output.embedding for output in outputs]), body)
    content = await run_near(rows.size <= _INLINE_NUMBERS, _encode, answer, rows, body.encoding_format)
    return Response(content, media_type="application/json", headers={HEADER: name})


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive, ends_s: float | None) -> T:
    """Return what `work` returns; cancel it as soon as the client is gone, or at `ends_s`, time.monotonic().

    Raises:
        ClientGoneError: If it was.
        DeadlineError: If it was too late.
    """
    left_s = None if ends_s is None else ends_s - time.monotonic()
    task, listener = asyncio.ensure_future(work), asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((task, listener), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            if listener.done():
                raise ClientGoneError("the client has closed its connection")
            raise DeadlineError("the embeddings were not made by the deadline that the request set")
        return task.result()
    finally:
        for each in (task, listener):
            each.cancel()


def _cut(rows: NDArray[np.float32], body: EmbeddingRequest) -> NDArray[np.float32]:
    """Return the first `dimensions` numbers of each row, of length 1 again if the whole was."""
    if body.dimensions is None:
        return rows
    rows = rows[:, : body.dimensions]
    if body.normalize is False:
        return rows
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def _encode(answer: EmbeddingResponse, rows: NDArray[np.float32], encoding_format: str | None) -> bytes:
    """Return the response's body."""
    encode = _base64 if encoding_format == "base64" else _floats
    texts = [msgspec.Raw(encode(row)) for row in rows]
    answer.data = [EmbeddingData(index, text) for index, text in enumerate(texts)]  # type: ignore[arg-type]
    return msgspec.json.encode(answer)


def _floats(row: NDArray[np.float32]) -> bytes:
    return msgspec.json.encode(row.tolist())


def _base64(row: NDArray[np.float32]) -> bytes:
    return b'"%b"' % base64.b64encode(row.astype("<f4", copy=False).tobytes())


ENDPOINTS = (
    Endpoint(
        path="/v1/embeddings",
        handler=embeddings,
        summary="Embed texts",
        body=EmbeddingRequest,
        answer=EmbeddingResponse,
    ),
)
