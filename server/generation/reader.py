"""The reader task: takes what the engine posts to its outputs, calls and counters; and the one door for aborts.

One task serves all requests. Loop thread only, but for `close`.
"""

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from ringserve.server.errors import EngineDeadError, EngineGenerateError, RequestError
from ringserve.server.generation.collector import RequestOutputCollector
from ringserve.server.generation.engine_calls import EngineCalls
from ringserve.server.generation.engine_process import EngineProcess
from ringserve.server.generation.input_processor import ProcessedRequest
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.generation.output_processor import OutputProcessor
from ringserve.server.grammar.structured_output import field_of
from ringserve.server.telemetry.counters import RingCounters
from ringserve.server.telemetry.hop_clock import HopClock
from ringserve.server.telemetry.metrics import Metrics
from ringserve.shm_transport.errors import PeerDiedError
from ringserve.shm_transport.messages import Data
from ringserve.shm_transport.records import ENGINE_HANDLE, RecordKind
from ringserve.shm_transport.step_ring import Message, StepRecord

logger = logging.getLogger(__name__)

_RECHECK_S = 1.0  # the longest wait for a record before everything is looked at again
_FLUSH_S = 0.001
_HAND_OVER_S = 0.02
_HANDLE = struct.Struct("<Q")
_FAILURES = (RecordKind.ERROR, RecordKind.REFUSAL)


@dataclass(slots=True)
class Load:
    """Figures of the newest step record."""

    num_running: int = 0
    num_waiting: int = 0


class Reader:
    """The reader task, with all that it shares with its AsyncLLM. It never refers to that, so one can be dropped.

    Args:
        engine: Whose step ring is read.
        model: For the tokenizer of its outputs.
        stream_interval: Least number of tokens in a delta.

    Attributes:
        dead_error: What requests get once the engine is gone or the step ring cannot be read; None while all is well.
        on_death: Called in the loop, once every request has been told.
    """

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
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the reader task in the running loop; does nothing if it runs there."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first, or one after asyncio.run has ended the last and its reader
            self._loop = loop
            self._flush_timer = None
            self._task = loop.create_task(self._read(), name="ringserve-reader")
            self.engine.watch(loop, self.engine.waiter.wake)

    async def end(self) -> None:
        """End the reader in its loop, so that `close` can leave the loop alone and run on a thread."""
        if self._task is not None and self._loop is asyncio.get_running_loop():
            self.engine.unwatch(self._loop)
            self._loop = None
            if self._flush_timer is not None:
                self._flush_timer.cancel()
            self._task.cancel()
            await asyncio.wait((self._task,))

    def close(self) -> None:
        """End the reader and the engine; blocks for up to two seconds if the engine does not obey."""
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            self.engine.unwatch(self._loop)
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.engine.stop()

    def abort(self, handles: list[int]) -> None:
        """Have the engine drop sequences; does nothing once it is dead."""
        if not handles or self.dead_error is not None:
            return
        self.engine.outbox.abort(handles)
        self.metrics.note_abort(self.engine.outbox.num_aborted)
        self.flush()

    def end_request(self, collector: RequestOutputCollector) -> None:
        """End a request with what it has, finish reason abort."""
        self.abort(self.outputs.abort(collector.request_id, collector))

    def counters(self) -> RingCounters:
        """Return what the step ring has carried until now."""
        reader, waiter, pulse = self.engine.reader, self.engine.waiter, self.engine.pulse()
        return RingCounters(
            num_records=reader.num_records, num_tokens=reader.num_tokens, num_coalesced_records=self.num_coalesced,
            num_late_rows=self.outputs.num_late_rows, num_stalls=pulse.num_stalls, stall_s=pulse.stall_s,
            num_wakes=waiter.num_wakes, num_spins_hit=waiter.num_spins_hit, num_spins_missed=waiter.num_spins_missed,
        )  # fmt: skip

    def flush(self) -> None:
        """Write what the request ring has room for, and come back in a millisecond for the rest."""
        outbox = self.engine.outbox
        outbox.flush()
        if not outbox.is_empty and self._flush_timer is None and self.dead_error is None:
            self._flush_timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_again)

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

    def _flush_again(self) -> None:
        self._flush_timer = None
        self.flush()

    async def _read(self) -> None:
        """The reader task: for ever, take what is there, then wait."""
        try:
            while True:
                await self._drain()
                if self.engine.has_died:
                    await self.engine.waiter.wait(_HAND_OVER_S)  # the thread may hold a token that it is handing over
                    await self._drain()  # what it posted between the first look and its death
                    raise PeerDiedError(self.engine.death_cause())
                self.flush()
                await self.engine.waiter.wait(_RECHECK_S)
        except asyncio.CancelledError:
            raise
        except PeerDiedError as exc:
            self.die(str(exc))
        except Exception as exc:
            logger.exception("the reader task failed")
            self.die(f"the step ring cannot be read: {exc}")

    async def _drain(self) -> None:
        """Process what is posted now. The records of one drain, but for the last, are behind: their deltas merge."""
        waiter, reader = self.engine.waiter, self.engine.reader
        while waiter.try_wait():
            num_behind = reader.consumer.num_pending
            self.num_coalesced += num_behind
            await self._process(is_behind=num_behind > 0)
            for left in range(num_behind - 1, -1, -1):
                if waiter.try_wait():
                    await self._process(is_behind=left > 0)
            self.outputs.flush()
            self.flush()

    async def _process(self, is_behind: bool) -> None:
        record, outputs = self.engine.reader.read(), self.outputs
        if isinstance(record, StepRecord):
            read_ns = time.monotonic_ns()
            self.load.num_running, self.load.num_waiting = record.header.num_running, record.header.num_waiting
            num_late_rows, num_late_tokens = outputs.num_late_rows, outputs.num_late_tokens
            self.metrics.begin(record, outputs.is_live)
            await outputs.process(record, is_behind)
            text_ns = time.monotonic_ns()
            self.metrics.end(record, outputs.num_late_rows - num_late_rows, outputs.num_late_tokens - num_late_tokens)
            if record.handles:  # else it has figures alone, and keeps no rhythm
                self.engine.waiter.note(record.header.published_ns)
            await self.outputs.yield_to_loop()
            self.hop_clock.note(record.header, read_ns, text_ns)
        elif isinstance(record, Message):
            self._take_message(record)

    def _take_message(self, message: Message) -> None:
        if message.kind == RecordKind.DATA:
            self.outputs.keep(Data.decode(message.body))
            return
        if message.kind == RecordKind.REPLY:
            self.calls.resolve(message.body)
            return
        if message.kind not in _FAILURES:
            logger.warning("the engine sent an unexpected %s message", message.kind.name)
            return
        handle, text = _HANDLE.unpack_from(message.body)[0], message.body[_HANDLE.size :].decode()
        if handle == ENGINE_HANDLE:
            logger.error("the engine reports: %s", text)
        is_refusal = message.kind == RecordKind.REFUSAL
        error = _refusal(text, self.outputs.request_of(handle)) if is_refusal else EngineGenerateError(text)
        siblings = self.outputs.fail(handle, error)
        self.abort([other for other in siblings if other != handle])


def _refusal(text: str, request: ProcessedRequest | None) -> RequestError:
    """Return what a client is told whose request the engine cannot serve: most often for its grammar."""
    field = field_of(request.params.grammar) if request is not None and request.params.grammar else None
    return RequestError(f"{field}: {text}" if field else text, param=field)
