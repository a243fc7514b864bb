"""The one-slot mailbox between the reader task and whoever waits for a request's output.

Two kinds of consumer: `get` pulls from the slot; a writer that is attached is pushed to, in the same call, while it is
writable. Deltas that meet a full slot merge, and tokens whose text can wait are held as ids, so memory is bounded by
the pending output, never by a queue of events. Loop thread only.
"""

import asyncio
import io
import logging
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from ringserve.server.errors import EngineGenerateError
from ringserve.server.generation.outputs import CompletionOutput, OutputKind, RequestOutput
from ringserve.shm_transport.records import DataContent

DeltaWriter = Callable[[bytes], bool]  # writes one event, or returns False: not now
# The same, of a token with logprobs: the ids and JSON numbers of its entries.
ScoredWriter = Callable[[bytes, list[int], list[bytes]], bool]

logger = logging.getLogger(__name__)


class OutputWriter(Protocol):
    """What a stream must be, to be pushed to."""

    @property
    def is_writable(self) -> bool:
        """Whether `write` may be called: the transport takes more."""

    def write(self, output: CompletionOutput) -> None:
        """Send one sequence's delta."""

    def delta_writer(self, index: int) -> DeltaWriter | None:
        """Return a short cut for one sequence's deltas, ready as JSON strings; None if there is none yet."""

    def scored_writer(self, index: int) -> ScoredWriter | None:
        """Return the same for deltas of one token each, with logprobs."""

    def fail(self, error: Exception) -> None:
        """Send an error; it comes after everything written before."""


class HeldTokens(Protocol):
    """Where one sequence keeps tokens that nobody can take yet."""

    index: int

    @property
    def has_held(self) -> bool:
        """Whether it keeps any."""

    def take_held(self) -> CompletionOutput:
        """Return a delta of the oldest of them."""


class _Merged(NamedTuple):
    text: io.StringIO
    token_ids: "array[int]"


class RequestOutputCollector:
    """Collects the outputs of a request's n sequences."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], num_sequences: int, kind: OutputKind) -> None:
        self.request_id = request_id
        self.num_cached_tokens = 0
        self.is_prompt_done = False  # a first token has come, or none will
        self.deadline: asyncio.TimerHandle | None = None  # ends the request
        self.arrays: dict[DataContent, NDArray[Any]] = {}  # what the engine sent of it beside tokens
        self.prompt_token_ids = prompt_token_ids
        self._num_unfinished = num_sequences
        self._kind = kind
        self._slot: dict[int, CompletionOutput] = {}
        self._merged: dict[int, _Merged] = {}  # text and tokens of the slot's outputs that were merged
        self._held: dict[int, HeldTokens] = {}  # whose tokens come after what the slot has of the same sequence
        self._error: Exception | None = None
        self._ready: asyncio.Future[None] | None = None
        self._writer: OutputWriter | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be put: every sequence has ended, or the request has failed."""
        return self._num_unfinished == 0 or self._error is not None

    @property
    def has_pending(self) -> bool:
        """Whether something waits, which must leave before anything else does."""
        return bool(self._slot) or bool(self._held)

    def delta_writer(self, index: int) -> DeltaWriter | None:
        """Return the writer's short cut for one sequence, or None."""
        return None if self._writer is None else self._writer.delta_writer(index)

    def scored_writer(self, index: int) -> ScoredWriter | None:
        """Return the writer's short cut for one sequence with logprobs, or None."""
        return None if self._writer is None else self._writer.scored_writer(index)

    def attach(self, writer: OutputWriter) -> None:
        """Push to `writer` from now on, beginning with what the slot holds."""
        self._writer = writer
        self.flush()

    def put(self, output: CompletionOutput, is_behind: bool = False) -> None:
        """Take an output.

        With `is_behind` it waits in the slot for `flush`, to leave as one event with those that come after it.
        """
        if output.finish_reason is not None:
            self._num_unfinished -= 1
        self._held.pop(output.index, None)  # an output has everything before it
        if self._writer is not None and not is_behind and not self.has_pending and self._writer.is_writable:
            self._writer.write(output)
            return
        held = self._slot.get(output.index)
        if held is None or self._kind is not OutputKind.DELTA:
            self._slot[output.index] = output
        else:
            self._merge(held, output)
        if self._writer is None:
            self._wake()

    def hold(self, held: HeldTokens) -> None:
        """Note that a sequence has tokens which can leave, once the consumer takes them."""
        self._held[held.index] = held
        if self._writer is None:
            self._wake()

    def put_error(self, error: Exception) -> None:
        """End the request with an error, delivered after the tokens that came before it. A later one is ignored."""
        if self.is_finished:
            return
        self._error = error
        self.flush()
        self._wake()

    def flush(self) -> None:
        """Push what the slot holds, if a writer is attached and takes it."""
        writer = self._writer
        if writer is None:
            return
        while self.has_pending and writer.is_writable:
            output = self._take(next(iter(self._slot or self._held)))
            if output is not None:
                writer.write(output)
        if self._error is not None and not self.has_pending:
            self._writer = None
            writer.fail(self._error)

    def close(self) -> None:
        """Let go of what knows this collector: the sequences are gone, and cycles wait for the garbage collector."""
        self._held.clear()
        self._writer = None

    def get_nowait(self) -> RequestOutput | None:
        """Return what the slot holds, or None if there is nothing.

        Raises:
            Exception: The error that ended the request, once everything before it is taken.
        """
        is_done = self._num_unfinished == 0
        is_final_only = self._kind is OutputKind.FINAL_ONLY
        if self.has_pending and (is_done or not is_final_only):
            taken = [self._take(index) for index in sorted({*self._slot, *self._held})]
            if outputs := [output for output in taken if output is not None]:
                cached = self.num_cached_tokens
                return RequestOutput(self.request_id, self.prompt_token_ids, outputs, is_done, cached, self.arrays)
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> RequestOutput:
        """Wait for an output; errors as get_nowait."""
        while True:
            output = self.get_nowait()
            if output is not None:
                return output
            self._ready = asyncio.get_running_loop().create_future()
            try:
                await self._ready
            finally:
                self._ready = None

    def _merge(self, held: CompletionOutput, newer: CompletionOutput) -> None:
        """Append a later delta, in linear time and in little more memory than the text that a stopped client misses."""
        merged = self._merged.get(held.index)
        if merged is None:
            merged = self._merged[held.index] = _Merged(io.StringIO(), array("i", held.token_ids))
            merged.text.write(held.text)  # not as its initial value, with which it takes four bytes a character
        merged.text.write(newer.text)
        merged.token_ids.extend(newer.token_ids)
        if held.logprobs is not None and newer.logprobs is not None:
            held.logprobs.extend(newer.logprobs)
        held.finish_reason = newer.finish_reason
        held.stop_reason = newer.stop_reason
        held.num_tokens = newer.num_tokens

    def _take(self, index: int) -> CompletionOutput | None:
        """Return what one sequence has waiting, or the older part of it; None if that fails and ends the request."""
        if index not in self._slot:
            return self._take_held(index)
        output, merged = self._slot.pop(index), self._merged.pop(index, None)
        if merged is not None:
            output.text, output.token_ids = merged.text.getvalue(), merged.token_ids.tolist()
        return output

    def _take_held(self, index: int) -> CompletionOutput | None:
        held = self._held.get(index)
        if held is None:  # another sequence's failure has just ended the request
            return None
        try:
            output = held.take_held()
        except Exception as exc:
            self._held.clear()
            self._error = self._error or output_error(self.request_id, exc)
            return None
        if not held.has_held:
            del self._held[index]
        return output

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


def output_error(request_id: str, exc: Exception) -> EngineGenerateError:
    """Return what ends a request whose output could not be made, and log why. Call it where `exc` is handled."""
    logger.exception("the output of request %s could not be processed", request_id)
    return EngineGenerateError(f"the output of this request could not be processed: {exc}")
