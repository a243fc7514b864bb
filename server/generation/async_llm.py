"""AsyncLLM: requests in, outputs out, over the shared-memory rings.

It holds the reader, which holds the engine and never the AsyncLLM: one that is dropped ends its engine.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from typing import Any

from ringserve.server.errors import (
    EngineDeadError,
    EngineGenerateError,
    OverloadedError,
    RequestError,
    ServerError,
    ShuttingDownError,
)
from ringserve.server.generation.collector import RequestOutputCollector
from ringserve.server.generation.engine_client import EngineClient
from ringserve.server.generation.engine_process import EngineProcess
from ringserve.server.generation.input_processor import EncodeRequest, GenerateRequest, InputProcessor, ProcessedRequest
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.generation.outputs import EmbeddingOutput, RequestOutput
from ringserve.server.generation.reader import Load, Reader
from ringserve.server.settings.config import ServeConfig
from ringserve.server.settings.model_path import locate_tokenizer
from ringserve.server.telemetry.counters import RingCounters
from ringserve.server.telemetry.hop_clock import HopTimes
from ringserve.server.telemetry.metrics import Metrics
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.records import DataContent, Pooling
from ringserve.shm_transport.strategies import AdaptiveWaiter

logger = logging.getLogger(__name__)

_RESERVED_METHODS = ("shutdown",)


class AsyncLLM(EngineClient):
    """The engine client over shared memory. May be built outside a running loop; the reader starts with the first use.

    Args:
        engine: A started engine process; AsyncLLM ends it with `shutdown`.
        model: What the front end knows of the model.
        max_num_queued_reqs: Live sequences beyond which a request is refused with OverloadedError.
        max_num_queued_tokens: The same for prompt tokens of requests without a first token; one is always taken.
        stream_interval: Least number of tokens in a delta, but for the first and the last; a request may ask for more.
    """

    def __init__(
        self,
        engine: EngineProcess,
        model: ModelInfo,
        *,
        max_num_queued_reqs: int = 2048,
        max_num_queued_tokens: int = 2**22,
        stream_interval: int = 1,
    ) -> None:
        self.model = model
        self.input_processor = InputProcessor(model)
        self._reader = Reader(engine, model, stream_interval)
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self._is_shut_down = False
        self.is_draining = False  # takes nothing new
        self._finalizer = weakref.finalize(self, self._reader.close)

    @classmethod
    def from_config(cls, config: ServeConfig) -> "AsyncLLM":
        """Start an engine and return its client, once it can serve: after seconds, in which nothing else runs.

        The engine ends with the AsyncLLM, with the process, and with the thread that calls this.

        Raises:
            StartupError: If the model or an option is wrong, or the engine could not load.
        """
        tokenizer = locate_tokenizer(config)
        model = ModelInfo.load(tokenizer, chat_template=config.chat_template)  # its errors come before a long load
        if config.pooling is not None:
            model = replace(model, pooling=Pooling[config.pooling.upper()])
        engine = EngineProcess(config.engine_config(tokenizer), RingConfig(), config.step_timeout, config.wait_strategy)
        limits = engine.limits
        model = model.with_limits(
            max_model_len=limits["max_model_len"],
            vocab_size=limits["vocab_size"],
            embedding_size=limits.get("embedding_size", 0),
        )
        llm = cls(
            engine,
            model,
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_num_queued_tokens=config.max_num_queued_tokens,
            stream_interval=config.stream_interval,
        )
        llm.input_processor.grammars.start()
        return llm

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether it has been shut down, or has failed."""
        return self._is_shut_down or self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine is gone without having been shut down, or the reader has failed."""
        has_died = not self._is_shut_down and self._reader.engine.death_cause() is not None
        return has_died or self._reader.dead_error is not None

    @property
    def dead_error(self) -> Exception:
        """The error that requests get once `is_stopped`."""
        cause = None if self._is_shut_down else self._reader.engine.death_cause()
        return self._reader.dead_error or EngineDeadError(cause or "the engine is shut down")

    @property
    def load(self) -> Load:
        """Running and waiting sequences, from the newest step record."""
        return self._reader.load

    def ring_counters(self) -> RingCounters:
        """Return what the step ring has carried until now."""
        return self._reader.counters()

    def hop_times(self) -> dict[str, HopTimes]:
        """Return how long each hop from the engine's step to the sockets has taken until now."""
        return self._reader.hop_clock.snapshot()

    @property
    def engine_limits(self) -> dict[str, int]:
        """What the engine said of itself in READY."""
        return self._reader.engine.limits

    @property
    def metrics(self) -> Metrics:
        """What has been counted until now."""
        return self._reader.metrics

    @property
    def num_live(self) -> int:
        """Sequences that the front end has not ended."""
        return self._reader.outputs.num_live

    def start(self) -> None:
        """Start the reader task in the running loop; does nothing if it runs."""
        self._reader.start()

    def rehearse(self, rehearse: Callable[[], None] | None) -> None:
        """Call this shortly before each step is due; for nothing where the reader does not wait awake (`adaptive`)."""
        if isinstance(self._reader.engine.waiter, AdaptiveWaiter):
            self._reader.engine.waiter.rehearse = rehearse

    def call_on_death(self, callback: Callable[[], None]) -> None:
        """Call back, in the loop, once every request has been told that the engine is dead."""
        self._reader.on_death.append(callback)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs (see EngineClient)."""
        collector = self.submit(await self.input_processor.process(request))
        try:
            finished = False
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        finally:
            self.release(collector)

    async def encode(self, request: EncodeRequest) -> AsyncGenerator[EmbeddingOutput, None]:
        """Yield a request's embedding (see EngineClient)."""
        (processed,) = await self.input_processor.process_encode([request])
        yield await self.embed(processed)

    async def complete(self, request: ProcessedRequest) -> RequestOutput:
        """Return the final output of a processed FINAL_ONLY request; cancelling aborts it. Errors as `generate`."""
        collector = self.submit(request)
        try:
            return await collector.get()
        finally:
            self.release(collector)

    async def embed(self, request: ProcessedRequest, *, is_admitted: bool = False) -> EmbeddingOutput:
        """Return the embedding that a processed request asks for; cancelling aborts it. Errors as `generate`."""
        collector = self.submit(request, is_admitted=is_admitted)
        try:
            output = await collector.get()
        finally:
            self.release(collector)
        if (embedding := output.arrays.get(DataContent.EMBEDDING)) is None:
            raise EngineGenerateError("the request was aborted before its embedding was made")
        return EmbeddingOutput(output.request_id, output.prompt_token_ids, embedding)

    def check_admission(self, num_sequences: int, num_prompt_tokens: int = 0) -> None:
        """Refuse work that cannot be taken now; the prompts' length counts as far as it is known.

        Raises:
            EngineDeadError: If the engine is gone.
            ShuttingDownError: If what runs is the last.
            OverloadedError: If the queue is full.
            RequestError: If it has no room for so many sequences even when it is empty.
        """
        self._check_open()
        if num_sequences > self._max_num_queued_reqs:
            raise RequestError(
                f"the request asks for {num_sequences} sequences: this server holds at most "
                f"{self._max_num_queued_reqs} (--max-num-queued-reqs)"
            )
        num_live = self._reader.outputs.num_live
        if num_live + num_sequences > self._max_num_queued_reqs:
            self._reader.metrics.rejections["max_num_queued_reqs"] += 1
            raise OverloadedError(
                f"{num_live} requests are queued or running, {num_sequences} more exceed the limit of "
                f"{self._max_num_queued_reqs} (--max-num-queued-reqs): try again later"
            )
        num_queued = self._reader.outputs.num_prefill_tokens
        if num_queued and num_queued + num_prompt_tokens > self._max_num_queued_tokens:
            self._reader.metrics.rejections["max_num_queued_tokens"] += 1
            raise OverloadedError(
                f"{num_queued} prompt tokens are queued, {num_prompt_tokens} more exceed the limit of "
                f"{self._max_num_queued_tokens} (--max-num-queued-tokens): try again later"
            )

    def check_admission_of(self, requests: list[ProcessedRequest]) -> None:
        """Refuse all prompts of one request, or none: see check_admission; its tokens alone are no reason to."""
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.check_admission(sum(request.params.n for request in requests), num_tokens)

    def submit(self, request: ProcessedRequest, *, is_admitted: bool = False) -> RequestOutputCollector:
        """Register a request's n sequences, then send them to the engine, as one. Never suspends.

        Args:
            request: What to generate.
            is_admitted: It is one of those for which check_admission_of has just returned.

        Returns:
            Their collector. The caller must `release` it, however it ends.

        Raises:
            EngineDeadError, ShuttingDownError, OverloadedError: As check_admission.
        """
        params = request.params
        if is_admitted:
            self._check_open()
        else:
            self.check_admission_of([request])
        self.start()
        reader = self._reader
        collector = RequestOutputCollector(request.request_id, request.prompt_token_ids, params.n, request.kind)
        try:
            indexes = range(request.first_index, request.first_index + params.n)
            states = [reader.outputs.add(request, index, collector) for index in indexes]
            is_first = reader.engine.outbox.is_empty  # else a timer flushes, and trying costs as much as all of this
            reader.engine.outbox.add(request.engine_request([state.handle for state in states]))
            if is_first:
                reader.flush()
            if request.deadline_s is not None:
                left_s = max(request.deadline_s - time.monotonic(), 0.0)
                collector.deadline = asyncio.get_running_loop().call_later(left_s, reader.end_request, collector)
            if not request.pooling:
                reader.metrics.note_request(params.n, request.max_tokens)
        except BaseException:
            self.release(collector)
            raise
        return collector

    def release(self, collector: RequestOutputCollector) -> None:
        """Abort what is still live of a request whose consumer is done or gone. Never suspends: uncancellable."""
        if collector.deadline is not None:
            collector.deadline.cancel()
        handles = self._reader.outputs.drop(collector)
        collector.close()
        self._reader.abort(handles)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request of these ids with finish reason abort. Never suspends."""
        request_ids = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        handles = [handle for name in request_ids for handle in self._reader.outputs.abort(name)]
        self._reader.abort(handles)

    def abort_requests(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests with finish reason abort (see EngineClient)."""
        outputs = self._reader.outputs
        names = outputs.request_ids() if request_ids is None else outputs.find(request_ids)
        handles = [handle for name in names for handle in outputs.abort(name)]
        self._reader.abort(handles)
        return len(names)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Have the engine carry out a method (see EngineClient)."""
        if method in _RESERVED_METHODS:
            raise RequestError(f"{method} is the server's own to call", param="method")
        if self.is_stopped:
            raise self.dead_error
        self.start()
        reply = self._reader.calls.send(method, args, kwargs)
        self._reader.flush()
        return await reply

    def fail_all(self, error: ServerError) -> None:
        """End every request and every call with an error, the requests in the engine too."""
        self._reader.calls.fail_all(error)
        handles = self._reader.outputs.fail_all(error)
        self._reader.abort(handles)

    async def check_health(self) -> None:
        """Return if all is well (see EngineClient)."""
        if self.is_stopped:
            raise self.dead_error
        if (reason := self._reader.engine.stuck_reason()) is not None:
            raise EngineDeadError(reason)

    def drain(self) -> None:
        """Refuse new requests from now on; those that run go on."""
        self.is_draining = True

    def kill(self) -> None:
        """End the engine now, whatever runs: for an exit that cannot wait."""
        self._reader.engine.kill()

    async def shutdown(self) -> None:
        """End the reader and the engine; what still runs gets EngineDeadError."""
        if not self._is_shut_down:
            await self.leave_loop()
            await asyncio.to_thread(self.close)

    async def leave_loop(self) -> None:
        """Do the part of `shutdown` that must run in the loop; what is left is `close`, for any thread."""
        self._is_shut_down = True
        self.fail_all(EngineDeadError("the engine is shut down"))
        await self._reader.end()

    def close(self) -> None:
        """End the engine; blocks for up to two seconds if it does not obey."""
        self._finalizer()

    def _check_open(self) -> None:
        if self._is_shut_down or self._reader.dead_error is not None:
            raise self.dead_error
        if self.is_draining:
            raise ShuttingDownError("the server is shutting down: ask another one, or again later")
