"""AsyncLLM: requests in, outputs out, over the shared-memory rings. One reader task serves all requests.

The reader holds the engine and the output processor, never the AsyncLLM: one that is dropped ends its engine.
"""

import asyncio
import logging
import struct
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, replace
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
from ringserve.server.generation.engine_calls import EngineCalls
from ringserve.server.generation.engine_client import EngineClient
from ringserve.server.generation.engine_process import EngineProcess
from ringserve.server.generation.input_processor import EncodeRequest, GenerateRequest, InputProcessor, ProcessedRequest
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.generation.output_processor import OutputProcessor
from ringserve.server.generation.outputs import EmbeddingOutput, RequestOutput
from ringserve.server.grammar.structured_output import field_of
from ringserve.server.settings.config import ServeConfig
from ringserve.server.settings.model_path import locate_tokenizer
from ringserve.server.telemetry.counters import RingCounters
from ringserve.server.telemetry.hop_clock import HopClock, HopTimes
from ringserve.server.telemetry.metrics import Metrics
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import PeerDiedError
from ringserve.shm_transport.messages import Data
from ringserve.shm_transport.records import ENGINE_HANDLE, DataContent, Pooling, RecordKind
from ringserve.shm_transport.step_ring import Message, StepRecord
from ringserve.shm_transport.strategies import AdaptiveWaiter

logger = logging.getLogger(__name__)

_RECHECK_S = 1.0  # the longest wait for a record before everything is looked at again
_FLUSH_S = 0.001
_HAND_OVER_S = 0.02
_HANDLE = struct.Struct("<Q")
_RESERVED_METHODS = ("shutdown",)
_FAILURES = (RecordKind.ERROR, RecordKind.REFUSAL)


@dataclass(slots=True)
class Load:
    """Figures of the newest step record."""

    num_running: int = 0
    num_waiting: int = 0


class _Pipe:
    """What the reader task shares with its AsyncLLM: the engine, the outputs, and the flush timer."""

    def __init__(self, engine: EngineProcess, model: ModelInfo, stream_interval: int) -> None:
        self.engine = engine
        self.metrics = Metrics()
        self.outputs = OutputProcessor(
            model.tokenizer, self.abort, stream_interval=stream_interval, metrics=self.metrics
        )
        self.calls = EngineCalls(engine.outbox)
        self.load = Load()
        self.num_coalesced = 0
        self.hop_clock = HopClock()
        self.dead_error: EngineDeadError | None = None
        self.on_death: list[Callable[[], None]] = []
        self.reader: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the reader task in the running loop; does nothing if it runs there."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first, or one after asyncio.run has ended the last and its reader
            self._loop = loop
            self._flush_timer = None
            self.reader = loop.create_task(_read(self), name="ringserve-reader")
            self.engine.watch(loop, self.engine.waiter.wake)

    async def end_reader(self) -> None:
        """End the reader in its loop, so that `close` can leave the loop alone and run on a thread."""
        if self.reader is not None and self._loop is asyncio.get_running_loop():
            self.engine.unwatch(self._loop)
            self._loop = None
            if self._flush_timer is not None:
                self._flush_timer.cancel()
            self.reader.cancel()
            await asyncio.wait((self.reader,))

    def close(self) -> None:
        """End the reader and the engine; blocks for up to two seconds if the engine does not obey."""
        if self._loop is not None and self.reader is not None and not self._loop.is_closed():
            self.engine.unwatch(self._loop)
            self._loop.call_soon_threadsafe(self.reader.cancel)
        self.engine.stop()

    def abort(self, handles: list[int]) -> None:
        """Have the engine drop sequences."""
        self.engine.outbox.abort(handles)
        self.metrics.note_abort(self.engine.outbox.num_aborted)
        self.flush()

    def end(self, collector: RequestOutputCollector) -> None:
        """End a request with what it has, finish reason abort."""
        handles = self.outputs.abort(collector.request_id, collector)
        if handles and self.dead_error is None:
            self.abort(handles)

    def flush(self) -> None:
        """Write what the request ring has room for, and come back in a millisecond for the rest."""
        outbox = self.engine.outbox
        outbox.flush()
        if not outbox.is_empty and self._flush_timer is None and self.dead_error is None:
            self._flush_timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_again)

    def _flush_again(self) -> None:
        self._flush_timer = None
        self.flush()

    def die(self, cause: str) -> None:
        """Fail every request: the engine is gone."""
        if self.dead_error is None:
            self.dead_error = EngineDeadError(f"{cause}: restart the server")
            if not self.engine.is_stopping:
                logger.error("%s; %d requests fail", cause, self.outputs.num_live)
            self.outputs.fail_all(self.dead_error)
            self.calls.fail_all(self.dead_error)
            for callback in self.on_death:
                callback()


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
        self._pipe = _Pipe(engine, model, stream_interval)
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self._is_shut_down = False
        self.is_draining = False  # takes nothing new
        self._finalizer = weakref.finalize(self, self._pipe.close)

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
        return cls(
            engine,
            model,
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_num_queued_tokens=config.max_num_queued_tokens,
            stream_interval=config.stream_interval,
        )

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
        has_died = not self._is_shut_down and self._pipe.engine.death_cause() is not None
        return has_died or self._pipe.dead_error is not None

    @property
    def dead_error(self) -> Exception:
        """The error that requests get once `is_stopped`."""
        cause = None if self._is_shut_down else self._pipe.engine.death_cause()
        return self._pipe.dead_error or EngineDeadError(cause or "the engine is shut down")

    @property
    def load(self) -> Load:
        """Running and waiting sequences, from the newest step record."""
        return self._pipe.load

    def ring_counters(self) -> RingCounters:
        """Return what the step ring has carried until now."""
        pipe, reader, waiter = self._pipe, self._pipe.engine.reader, self._pipe.engine.waiter
        pulse = pipe.engine.pulse()
        return RingCounters(
            num_records=reader.num_records, num_tokens=reader.num_tokens, num_coalesced_records=pipe.num_coalesced,
            num_late_rows=pipe.outputs.num_late_rows, num_stalls=pulse.num_stalls, stall_s=pulse.stall_s,
            num_wakes=waiter.num_wakes, num_spins_hit=waiter.num_spins_hit, num_spins_missed=waiter.num_spins_missed,
        )  # fmt: skip

    def hop_times(self) -> dict[str, HopTimes]:
        """Return how long each hop from the engine's step to the sockets has taken until now."""
        return self._pipe.hop_clock.snapshot()

    @property
    def engine_limits(self) -> dict[str, int]:
        """What the engine said of itself in READY."""
        return self._pipe.engine.limits

    @property
    def metrics(self) -> Metrics:
        """What has been counted until now."""
        return self._pipe.metrics

    @property
    def num_live(self) -> int:
        """Sequences that the front end has not ended."""
        return self._pipe.outputs.num_live

    def start(self) -> None:
        """Start the reader task in the running loop; does nothing if it runs."""
        self._pipe.start()

    def rehearse(self, rehearse: Callable[[], None] | None) -> None:
        """Call this shortly before each step is due; for nothing where the reader does not wait awake (`adaptive`)."""
        if isinstance(self._pipe.engine.waiter, AdaptiveWaiter):
            self._pipe.engine.waiter.rehearse = rehearse

    def call_on_death(self, callback: Callable[[], None]) -> None:
        """Call back, in the loop, once every request has been told that the engine is dead."""
        self._pipe.on_death.append(callback)

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
        num_live = self._pipe.outputs.num_live
        if num_live + num_sequences > self._max_num_queued_reqs:
            self._pipe.metrics.rejections["max_num_queued_reqs"] += 1
            raise OverloadedError(
                f"{num_live} requests are queued or running, {num_sequences} more exceed the limit of "
                f"{self._max_num_queued_reqs} (--max-num-queued-reqs): try again later"
            )
        num_queued = self._pipe.outputs.num_prefill_tokens
        if num_queued and num_queued + num_prompt_tokens > self._max_num_queued_tokens:
            self._pipe.metrics.rejections["max_num_queued_tokens"] += 1
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
        pipe = self._pipe
        collector = RequestOutputCollector(request.request_id, request.prompt_token_ids, params.n, request.kind)
        try:
            indexes = range(request.first_index, request.first_index + params.n)
            states = [pipe.outputs.add(request, index, collector) for index in indexes]
            is_first = pipe.engine.outbox.is_empty  # else a timer flushes, and trying costs as much as all of this
            pipe.engine.outbox.add(request.engine_request([state.handle for state in states]))
            if is_first:
                pipe.flush()
            if request.deadline_s is not None:
                left_s = max(request.deadline_s - time.monotonic(), 0.0)
                collector.deadline = asyncio.get_running_loop().call_later(left_s, pipe.end, collector)
            if not request.pooling:
                pipe.metrics.note_request(params.n, request.max_tokens)
        except BaseException:
            self.release(collector)
            raise
        return collector

    def release(self, collector: RequestOutputCollector) -> None:
        """Abort what is still live of a request whose consumer is done or gone. Never suspends: uncancellable."""
        if collector.deadline is not None:
            collector.deadline.cancel()
        handles = self._pipe.outputs.drop(collector)
        collector.close()
        if handles and self._pipe.dead_error is None:
            self._pipe.abort(handles)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request of these ids with finish reason abort. Never suspends."""
        request_ids = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        handles = [handle for name in request_ids for handle in self._pipe.outputs.abort(name)]
        if handles and self._pipe.dead_error is None:
            self._pipe.abort(handles)

    def abort_requests(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests with finish reason abort (see EngineClient)."""
        outputs = self._pipe.outputs
        names = outputs.request_ids() if request_ids is None else outputs.find(request_ids)
        handles = [handle for name in names for handle in outputs.abort(name)]
        if handles and self._pipe.dead_error is None:
            self._pipe.abort(handles)
        return len(names)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Have the engine carry out a method (see EngineClient)."""
        if method in _RESERVED_METHODS:
            raise RequestError(f"{method} is the server's own to call", param="method")
        if self.is_stopped:
            raise self.dead_error
        self.start()
        reply = self._pipe.calls.send(method, args, kwargs)
        self._pipe.flush()
        return await reply

    def fail_all(self, error: ServerError) -> None:
        """End every request and every call with an error, the requests in the engine too."""
        self._pipe.calls.fail_all(error)
        handles = self._pipe.outputs.fail_all(error)
        if handles and self._pipe.dead_error is None:
            self._pipe.abort(handles)

    async def check_health(self) -> None:
        """Return if all is well (see EngineClient)."""
        if self.is_stopped:
            raise self.dead_error
        if (reason := self._pipe.engine.stuck_reason()) is not None:
            raise EngineDeadError(reason)

    def drain(self) -> None:
        """Refuse new requests from now on; those that run go on."""
        self.is_draining = True

    def kill(self) -> None:
        """End the engine now, whatever runs: for an exit that cannot wait."""
        self._pipe.engine.kill()

    async def shutdown(self) -> None:
        """End the reader and the engine; what still runs gets EngineDeadError."""
        if not self._is_shut_down:
            await self.leave_loop()
            await asyncio.to_thread(self.close)

    async def leave_loop(self) -> None:
        """Do the part of `shutdown` that must run in the loop; what is left is `close`, for any thread."""
        self._is_shut_down = True
        self.fail_all(EngineDeadError("the engine is shut down"))
        await self._pipe.end_reader()

    def close(self) -> None:
        """End the engine; blocks for up to two seconds if it does not obey."""
        self._finalizer()

    def _check_open(self) -> None:
        if self._is_shut_down or self._pipe.dead_error is not None:
            raise self.dead_error
        if self.is_draining:
            raise ShuttingDownError("the server is shutting down: ask another one, or again later")


async def _read(pipe: _Pipe) -> None:
    """The reader task: for ever, take what is there, then wait."""
    try:
        while True:
            await _drain(pipe)
            if pipe.engine.has_died:
                await pipe.engine.waiter.wait(_HAND_OVER_S)  # the thread may hold a token that it is handing over
                await _drain(pipe)  # what it posted between the first look and its death
                raise PeerDiedError(pipe.engine.death_cause())
            pipe.flush()
            await pipe.engine.waiter.wait(_RECHECK_S)
    except asyncio.CancelledError:
        raise
    except PeerDiedError as exc:
        pipe.die(str(exc))
    except Exception as exc:
        logger.exception("the reader task failed")
        pipe.die(f"the step ring cannot be read: {exc}")


async def _drain(pipe: _Pipe) -> None:
    """Process what is posted now. The records of one drain, but for the last, are behind: their deltas merge."""
    waiter, reader = pipe.engine.waiter, pipe.engine.reader
    while waiter.try_wait():
        num_behind = reader.consumer.num_pending
        pipe.num_coalesced += num_behind
        await _process(pipe, is_behind=num_behind > 0)
        for left in range(num_behind - 1, -1, -1):
            if waiter.try_wait():
                await _process(pipe, is_behind=left > 0)
        pipe.outputs.flush()
        pipe.flush()


async def _process(pipe: _Pipe, is_behind: bool) -> None:
    record, outputs = pipe.engine.reader.read(), pipe.outputs
    if isinstance(record, StepRecord):
        read_ns = time.monotonic_ns()
        pipe.load.num_running, pipe.load.num_waiting = record.header.num_running, record.header.num_waiting
        num_late_rows, num_late_tokens = outputs.num_late_rows, outputs.num_late_tokens
        pipe.metrics.begin(record, outputs.is_live)
        await outputs.process(record, is_behind)
        text_ns = time.monotonic_ns()
        pipe.metrics.end(record, outputs.num_late_rows - num_late_rows, outputs.num_late_tokens - num_late_tokens)
        if record.handles:  # else it has figures alone, and keeps no rhythm
            pipe.engine.waiter.note(record.header.published_ns)
        await pipe.outputs.yield_to_loop()
        pipe.hop_clock.note(record.header, read_ns, text_ns)
    elif isinstance(record, Message):
        _take_message(pipe, record)


def _take_message(pipe: _Pipe, message: Message) -> None:
    if message.kind == RecordKind.DATA:
        pipe.outputs.keep(Data.decode(message.body))
        return
    if message.kind == RecordKind.REPLY:
        pipe.calls.resolve(message.body)
        return
    if message.kind not in _FAILURES:
        logger.warning("the engine sent an unexpected %s message", message.kind.name)
        return
    handle, text = _HANDLE.unpack_from(message.body)[0], message.body[_HANDLE.size :].decode()
    if handle == ENGINE_HANDLE:
        logger.error("the engine reports: %s", text)
    is_refusal = message.kind == RecordKind.REFUSAL
    error = _refusal(text, pipe.outputs.request_of(handle)) if is_refusal else EngineGenerateError(text)
    siblings = pipe.outputs.fail(handle, error)
    pipe.abort([other for other in siblings if other != handle])


def _refusal(text: str, request: ProcessedRequest | None) -> RequestError:
    """Return what a client is told whose request the engine cannot serve: most often for its grammar."""
    field = field_of(request.params.grammar) if request is not None and request.params.grammar else None
    return RequestError(f"{field}: {text}" if field else text, param=field)
