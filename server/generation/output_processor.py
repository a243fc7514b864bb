"""From rows of a step record to text in collectors: detokenize, stop strings, finish. The one loop over the rows.

Most rows take the short way: a plain token of a stream whose client keeps up is a table look-up and a write, and one of
an answer that is wanted whole, or of a client that does not keep up, is put aside as its id. Everything else goes
through `advance`.

Loop thread only. A failure in one request's output ends that request, never the reader.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from ringserve.server.errors import EngineGenerateError
from ringserve.server.generation.collector import DeltaWriter, RequestOutputCollector, ScoredWriter, output_error
from ringserve.server.generation.input_processor import ProcessedRequest
from ringserve.server.generation.outputs import CompletionOutput, OutputKind, TokenLogprobs
from ringserve.server.generation.scored_rows import ScoredRows
from ringserve.server.telemetry.finished_sequence import FinishedSequence, FirstToken
from ringserve.server.telemetry.metrics import Metrics
from ringserve.server.text.detokenizer import Detokenizer
from ringserve.server.text.stop_strings import StopStringChecker
from ringserve.server.text.tokenizer import Tokenizer
from ringserve.shm_transport.messages import Data
from ringserve.shm_transport.records import GRAMMAR_END, DataContent, FinishReason
from ringserve.shm_transport.step_ring import FirstRows, Logprobs, StepRecord

_MAX_TOKEN_ID = 2**31 - 1  # a row with another id is not held: it fails in its own time
_HELD_SLICE = 4096  # tokens that one delta takes from those held, about a transport's buffer
CHUNK_ROWS = 64  # rows between two yields to the event loop, counted across records
CHUNK_TOKENS = 4096  # the same for tokens that were held and become text in the rows that end their sequences
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
_STOP = int(FinishReason.STOP)


class RequestState:
    """One live sequence: its text so far, and where its output goes."""

    __slots__ = (
        "_can_hold", "_checker", "_detokenizer", "_due_at", "_interval", "_kind", "_logprobs", "_num_shown",
        "_num_undecoded", "_texts", "_token_ids", "_waits_for_end", "_write_delta", "_write_scored", "collector",
        "first", "handle", "index", "is_live", "params", "request",
    )  # fmt: skip

    def __init__(
        self,
        handle: int,
        request: ProcessedRequest,
        index: int,
        collector: RequestOutputCollector,
        detokenizer: Detokenizer,
        stream_interval: int,
    ) -> None:
        params = request.params
        self.handle = handle
        self.index = index
        self.collector = collector
        self.request = request
        self.params = params
        self.is_live = True
        self.first: FirstToken | None = None
        self._kind = request.kind
        self._detokenizer = detokenizer
        self._token_ids = array("i")
        self._texts: list[str] = []
        self._checker: StopStringChecker | None = None
        if params.stop and not params.grammar:  # cut, what follows a grammar would follow it no more
            include, min_tokens = params.include_stop_str_in_output, params.min_tokens
            self._checker = StopStringChecker(params.stop, include_stop_str=include, min_tokens=min_tokens)
        self._interval = max(params.stream_interval, stream_interval) if request.kind is OutputKind.DELTA else 1
        self._due_at = 1  # tokens with which the next delta leaves
        self._num_undecoded = 0  # of the last tokens, whose text nobody has asked for yet
        self._num_shown = 0  # tokens that have left in deltas
        self._logprobs = None if params.logprobs is None else TokenLogprobs(params.logprobs + 1, [], [], [])
        is_plain = self._checker is None and self._logprobs is None
        self._can_hold = is_plain and request.kind is not OutputKind.CUMULATIVE
        self._waits_for_end = is_plain and request.kind is OutputKind.FINAL_ONLY
        self._write_delta: DeltaWriter | None = None
        self._write_scored: ScoredWriter | None = None

    def try_push(self, token_id: int) -> bool:
        """Take a token that does not end the sequence the short way; False, and nothing done, where there is none."""
        if self._waits_for_end:
            self._token_ids.append(token_id)
            self._num_undecoded += 1
            return True
        write = self._write_delta
        if write is None or self.collector.has_pending:
            return self.try_hold((token_id,), is_behind=False)
        ready = self._detokenizer.ready(token_id)
        if ready is None or (self._checker is not None and not self._checker.ignores(ready[0])) or not write(ready[1]):
            return False
        self._token_ids.append(token_id)
        return True

    def try_push_scored(self, token_id: int, scored: ScoredRows, row: int) -> bool:
        """Do what try_push does, for a stream with logprobs, which are in one row."""
        write = self._write_scored
        if write is None or self.collector.has_pending:
            return False
        ready = self._detokenizer.ready(token_id)
        if ready is None:
            return False
        start = scored.columns.starts[row]
        end = start + scored.columns.num_entries[row]
        if not write(ready[1], scored.columns.token_ids[start:end], scored.numbers[start:end]):
            return False
        self._token_ids.append(token_id)
        return True

    def try_hold(self, token_ids: Sequence[int], *, is_behind: bool) -> bool:
        """Keep tokens that need not be text yet: four bytes each; False, and nothing done, where they must be now.

        They leave with the end, with the token that is due, or when the collector's consumer takes more.
        """
        if not self._can_hold or (token_ids and (min(token_ids) < 0 or max(token_ids) > _MAX_TOKEN_ID)):
            return False
        is_due = len(self._token_ids) + len(token_ids) >= self._due_at
        if is_due and not is_behind and not self.collector.has_pending and not self._waits_for_end:
            return False
        self._token_ids.extend(token_ids)
        self._num_undecoded += len(token_ids)
        if is_due and not self._waits_for_end:
            self.collector.hold(self)
        return True

    def take_held(self) -> CompletionOutput:
        """Return a delta of the held tokens, or of as many as do not keep the loop long. There must be some."""
        start = len(self._token_ids) - self._num_undecoded
        token_ids = self._token_ids[start : start + _HELD_SLICE].tolist()
        self._num_undecoded -= len(token_ids)
        self._due_at = start + len(token_ids)
        output = self._output(self._text_of(token_ids, ends_by_token=False)[0], token_ids, None, None)
        assert output is not None  # it was due
        return output

    @property
    def num_held(self) -> int:
        """Tokens that are held."""
        return self._num_undecoded

    @property
    def has_held(self) -> bool:
        """Whether tokens are held."""
        return self._num_undecoded > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of output until now."""
        return len(self._token_ids)

    def find_short_way(self) -> None:
        """Look whether the collector's consumer takes ready deltas by now."""
        if self._kind is not OutputKind.DELTA or self._interval > 1:
            return
        if self._logprobs is None:
            self._write_delta = self._write_delta or self.collector.delta_writer(self.index)
        elif self._checker is None:
            self._write_scored = self._write_scored or self.collector.scored_writer(self.index)

    def advance(
        self, token_ids: list[int], finish: int, stop_token_id: int, logprobs: TokenLogprobs | None = None
    ) -> CompletionOutput | None:
        """Take one row's tokens, and their logprobs if the request asked for them.

        Returns:
            What the consumer should see now by the request's OutputKind; None if nothing.
        """
        new_ids, num_held = token_ids, self._num_undecoded
        if num_held:
            token_ids = self._token_ids[-num_held:].tolist() + token_ids
        text, num_taken, stop = self._text_of(token_ids, finish == _STOP and stop_token_id != GRAMMAR_END)
        if logprobs is not None and self._logprobs is not None:
            self._logprobs.extend(logprobs if stop is None else logprobs.first(num_taken))
        if stop is not None:
            token_ids = new_ids[:num_taken]  # what waits for a stop string is never held
            self._token_ids.extend(token_ids)
            return self._output(text, token_ids, "stop", stop)
        self._token_ids.extend(new_ids)
        self._num_undecoded = 0
        if not finish:
            return self._output(text, token_ids, None, None)
        if self._checker is not None:
            text += self._checker.flush()
        reason = stop_token_id if finish == _STOP and stop_token_id >= 0 else None
        return self._output(text, token_ids, _NAMES[FinishReason(finish)], reason)

    def abort(self) -> CompletionOutput | None:
        """Return the last output of a sequence that ends here: its held-back text, finish reason abort."""
        return self.advance([], FinishReason.ABORT, -1)

    def _text_of(self, token_ids: list[int], ends_by_token: bool) -> tuple[str, int, str | None]:
        """Return the tokens' text that may be sent, how many tokens count, and the stop string that ended them."""
        # The text of the token that made the engine stop is no part of the output, special or not.
        silent = len(token_ids) - 1 if ends_by_token and not self.params.include_stop_str_in_output else -1
        decode, checker = self._detokenizer.decode, self._checker
        if checker is None:
            return "".join(["" if i == silent else decode(token_id) for i, token_id in enumerate(token_ids)]), 0, None
        sent, num_before = "", len(self._token_ids)
        for i, token_id in enumerate(token_ids):
            piece = "" if i == silent else decode(token_id)
            released, stop = checker.push(piece, num_before + i + 1)
            sent += released
            if stop is not None:
                return sent, i + 1, stop
        return sent, len(token_ids), None

    def _output(
        self, text: str, token_ids: list[int], finish_reason: str | None, stop_reason: str | int | None
    ) -> CompletionOutput | None:
        num_tokens = len(self._token_ids) - self._num_undecoded
        if self._kind is OutputKind.DELTA:
            if self._interval > 1:
                self._texts.append(text)
                if num_tokens < self._due_at and finish_reason is None:
                    return None
                text, self._texts = "".join(self._texts), []
                token_ids, self._num_shown = self._token_ids[self._num_shown : num_tokens].tolist(), num_tokens
                self._due_at = num_tokens + self._interval
            logprobs = self._take_logprobs()
            return CompletionOutput(self.index, text, token_ids, finish_reason, stop_reason, num_tokens, logprobs)
        self._texts.append(text)
        if self._kind is OutputKind.FINAL_ONLY and finish_reason is None:
            return None
        self._texts = ["".join(self._texts)]
        logprobs = None if self._logprobs is None else self._logprobs.first(num_tokens)
        return CompletionOutput(
            self.index, self._texts[0], self._token_ids.tolist(), finish_reason, stop_reason, num_tokens, logprobs
        )

    def _take_logprobs(self) -> TokenLogprobs | None:
        """Return the logprobs that have not left in a delta yet."""
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = TokenLogprobs(logprobs.width, [], [], [])
        return logprobs


class PromptOnlyState(RequestState):
    """A sequence of max_tokens 0: the engine samples one token, since it must, and nobody sees it."""

    __slots__ = ()

    def advance(self, token_ids: list[int], finish: int, *_: object) -> CompletionOutput | None:  # noqa: ARG002
        """Return the end of the sequence, without tokens."""
        return super().advance([], FinishReason.ABORT if finish == FinishReason.ABORT else FinishReason.LENGTH, -1)


class OutputProcessor:
    """The live sequences, by handle, and what the engine's records mean for them.

    Args:
        tokenizer: Makes the detokenizers.
        abort_in_engine: Called with the handles of sequences that ended here while the engine still runs them.
        stream_interval: Least number of tokens in a delta, but for the first and the last.
        metrics: Is told of sequences that begin and end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        abort_in_engine: Callable[[list[int]], None],
        *,
        stream_interval: int = 1,
        metrics: Metrics | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics or Metrics()
        self._stream_interval = stream_interval
        self._abort_in_engine = abort_in_engine
        self._states: list[RequestState | None] = []
        self._generations: list[int] = []
        self._free_slots: list[int] = []
        self._by_request_id: dict[str, list[RequestState]] = {}
        self._held: list[RequestOutputCollector] = []  # have outputs that wait for the end of the drain
        self._rows_since_yield = self._tokens_since_yield = 0
        self._resolved: tuple[list[int], list[RequestState | None]] = ([], [])  # a record's handles, and whose they are
        self.num_prefill_tokens = 0  # of prompts without a first token
        self.num_late_rows = 0  # of sequences that had ended before
        self.num_late_tokens = 0

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._states) - len(self._free_slots)

    def is_live(self, handle: int) -> bool:
        """Whether a handle's sequence has not ended."""
        return self._state_of(handle) is not None

    def add(self, request: ProcessedRequest, index: int, collector: RequestOutputCollector) -> RequestState:
        """Register one sequence; its handle goes to the engine."""
        detokenizer = self._tokenizer.detokenizer(
            request.prompt_token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
            shown=request.params.shown_special_tokens,
        )
        slot = self._take_slot()
        handle = self._generations[slot] << _SLOT_BITS | slot
        kind = PromptOnlyState if request.params.max_tokens == 0 else RequestState
        state = kind(handle, request, index, collector, detokenizer, self._stream_interval)
        self._states[slot] = state
        self._by_request_id.setdefault(collector.request_id, []).append(state)
        if index == request.first_index:  # the n sequences have one prompt
            self.num_prefill_tokens += len(request.prompt_token_ids)
        return state

    def abort(self, request_id: str, collector: RequestOutputCollector | None = None) -> list[int]:
        """End every sequence of a request id, or of one request, with finish reason abort; return their handles."""
        states = [s for s in self._by_request_id.get(request_id, ()) if collector in (None, s.collector)]
        for state in states:
            self._forget(state, "abort")
            output = state.abort()
            if output is not None:
                state.collector.put(output)
        return [state.handle for state in states]

    def request_ids(self) -> list[str]:
        """Return the ids of all live requests."""
        return list(self._by_request_id)

    def find(self, names: Iterable[str]) -> list[str]:
        """Return the ids of the live requests that have one of these, with or without the prefix before its hyphen."""
        wanted = set(names)
        return [each for each in self._by_request_id if not wanted.isdisjoint((each, each.partition("-")[2]))]

    def drop(self, collector: RequestOutputCollector, reason: str = "abort") -> list[int]:
        """Forget the live sequences of one request, whose consumer is gone, or which failed; return their handles."""
        states = [s for s in self._by_request_id.get(collector.request_id, ()) if s.collector is collector]
        for state in states:
            self._forget(state, reason)
        return [state.handle for state in states]

    def keep(self, data: Data) -> None:
        """Keep an array with its request, which an embedding ends; one of a request that is gone is dropped."""
        state = self._state_of(data.handle)
        if state is None:
            return
        state.collector.arrays[data.content] = data.array
        if data.content == DataContent.EMBEDDING:
            self._metrics.note_prompt(len(state.request.prompt_token_ids), 0, was_looked_for=False)
            self._forget(state, "stop")
            state.collector.put(CompletionOutput(state.index, "", [], "stop"))

    def request_of(self, handle: int) -> ProcessedRequest | None:
        """Return the request that a sequence belongs to; None if it has ended."""
        state = self._state_of(handle)
        return None if state is None else state.request

    def fail(self, handle: int, error: Exception) -> list[int]:
        """End the whole request that a sequence belongs to with an error; return its live handles."""
        state = self._state_of(handle)
        if state is None:
            return []
        handles = self.drop(state.collector, "error")
        state.collector.put_error(error)
        return handles

    def fail_all(self, error: Exception) -> list[int]:
        """End every request with an error; return all live handles."""
        states = [state for state in self._states if state is not None]
        for state in states:
            self._forget(state, "error")
        for state in states:
            state.collector.put_error(error)
        return [state.handle for state in states]

    async def process(self, record: StepRecord, is_behind: bool) -> None:
        """Turn one record's rows into outputs, yielding to the loop each CHUNK_ROWS rows or CHUNK_TOKENS held tokens.

        Args:
            record: One STEP record.
            is_behind: More records wait: deltas stay in their slots until `flush`, and leave as one event.
        """
        states, start = self._resolve(record.handles), 0
        scored = None if record.logprobs is None else ScoredRows(record.logprobs)
        if record.first is not None:
            self._note_first(states, record.first, record.header.published_ns)
        while start < len(states):
            end = min(start + CHUNK_ROWS - self._rows_since_yield, len(states))
            before, start = start, self._process_rows(states, record, scored, range(start, end), is_behind)
            self._rows_since_yield += start - before
            if self._rows_since_yield >= CHUNK_ROWS or self._tokens_since_yield >= CHUNK_TOKENS:
                await self.yield_to_loop()

    async def yield_to_loop(self) -> None:
        """Let everyone else run: once a step, and each CHUNK_ROWS rows."""
        self._rows_since_yield = self._tokens_since_yield = 0
        await asyncio.sleep(0)

    def flush(self) -> None:
        """Push what waited in slots while the reader was behind."""
        held, self._held = self._held, []
        for collector in held:
            collector.flush()

    def _resolve(self, handles: list[int]) -> list[RequestState | None]:
        """Return the sequences of a record's rows. Most records have the rows, and the very list, of the one before."""
        if handles is not self._resolved[0]:
            self._resolved = (handles, [self._state_of(handle) for handle in handles])
        return self._resolved[1]

    def _process_rows(
        self,
        states: list[RequestState | None],
        record: StepRecord,
        scored: ScoredRows | None,
        rows: range,
        is_behind: bool,
    ) -> int:
        """Process rows, until it is the others' turn; return the next one."""
        token_ids, finishes = record.token_ids, record.finish_reasons
        may_push = not is_behind and record.num_tokens is None
        for row in rows:
            state = states[row]
            if state is None or not state.is_live:
                self.num_late_rows += 1
                self.num_late_tokens += 1 if record.num_tokens is None else record.num_tokens[row]
                continue
            try:
                if may_push and (finishes is None or not finishes[row]):
                    if scored is not None and state.try_push_scored(token_ids[row], scored, row):
                        continue
                    if state.try_push(token_ids[row]):
                        continue
                self._process_row(state, record, row, is_behind)
            except Exception as exc:
                self._fail_row(state, exc)
            if self._tokens_since_yield >= CHUNK_TOKENS:
                return row + 1
        return rows.stop

    def _process_row(self, state: RequestState, record: StepRecord, row: int, is_behind: bool) -> None:
        token_ids, finish, stop_token_id = _row(record, row)
        if finish == FinishReason.ERROR:
            raise EngineGenerateError("the engine failed this request")
        if not finish and state.try_hold(token_ids, is_behind=is_behind):
            if is_behind:
                self._held.append(state.collector)
            return
        self._tokens_since_yield += state.num_held
        logprobs = None if record.logprobs is None else _row_logprobs(record.logprobs, record, row)
        output = state.advance(token_ids, finish, stop_token_id, logprobs)
        if output is None:
            return
        if output.finish_reason is not None:
            self._forget(state, output.finish_reason)
            if not finish:  # a stop string, which the engine cannot see
                self._abort_in_engine([state.handle])
        state.collector.put(output, is_behind)
        if is_behind:
            self._held.append(state.collector)
        state.find_short_way()

    def _fail_row(self, state: RequestState, exc: Exception) -> None:
        is_told = isinstance(exc, EngineGenerateError)
        error = exc if is_told else output_error(state.collector.request_id, exc)
        handles = self.drop(state.collector, "error")
        self._abort_in_engine(handles)
        state.collector.put_error(error)

    def _state_of(self, handle: int) -> RequestState | None:
        slot = handle & _SLOT_MASK
        state = self._states[slot] if slot < len(self._states) else None
        return state if state is not None and state.handle == handle else None

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._states.append(None)
        self._generations.append(1)
        return len(self._states) - 1

    def _note_first(self, states: list[RequestState | None], first: FirstRows, published_ns: int) -> None:
        """Keep what first rows tell of their sequences and prompts, whichever way their tokens take."""
        now_ns = time.monotonic_ns()
        for row, queued_ns in enumerate(first.queued_ns):
            state = states[row]
            if not queued_ns or state is None or not state.is_live:
                continue
            num_cached = first.num_cached_tokens[row]
            state.first = FirstToken(queued_ns, first.first_scheduled_ns[row], published_ns, now_ns, num_cached)
            self._metrics.note_first(now_ns - state.request.arrival_ns)
            collector = state.collector
            if not collector.is_prompt_done:
                collector.num_cached_tokens = num_cached
                self._end_prefill(collector)
                was_looked_for = state.params.prompt_logprobs is None
                self._metrics.note_prompt(len(collector.prompt_token_ids), num_cached, was_looked_for=was_looked_for)

    def _end_prefill(self, collector: RequestOutputCollector) -> None:
        collector.is_prompt_done = True
        self.num_prefill_tokens -= len(collector.prompt_token_ids)

    def _forget(self, state: RequestState, reason: str) -> None:
        state.is_live = False
        slot = state.handle & _SLOT_MASK
        self._states[slot] = None
        self._generations[slot] = (self._generations[slot] + 1) % 2**31
        self._free_slots.append(slot)
        siblings = self._by_request_id[state.collector.request_id]
        siblings.remove(state)
        if not siblings:
            del self._by_request_id[state.collector.request_id]
        num_left = sum(sibling.collector is state.collector for sibling in siblings)
        if not num_left and not state.collector.is_prompt_done:
            self._end_prefill(state.collector)
        self._metrics.note_end(state.handle, _finished(state, reason, num_left, self._metrics.published_ns))


def _row(record: StepRecord, row: int) -> tuple[list[int], int, int]:
    """Return one row's token ids, finish reason and stop token id."""
    if record.num_tokens is None:
        token_ids = [record.token_ids[row]]
    else:
        assert record.token_offsets is not None
        start = record.token_offsets[row]
        token_ids = record.token_ids[start : start + record.num_tokens[row]]
    if record.finish_reasons is None:
        return token_ids, 0, -1
    assert record.stop_token_ids is not None
    return token_ids, record.finish_reasons[row], record.stop_token_ids[row]


def _row_logprobs(columns: Logprobs, record: StepRecord, row: int) -> TokenLogprobs | None:
    """Return one row's logprobs; None if its request asked for none."""
    width = columns.num_entries[row]
    if not width:
        return None
    first, count = row, 1
    if record.num_tokens is not None:
        assert record.token_offsets is not None
        first, count = record.token_offsets[row], record.num_tokens[row]
    start = columns.starts[row]
    end = start + width * count
    entries = cast("list[float | None]", columns.logprobs[start:end])
    return TokenLogprobs(width, columns.token_ids[start:end], entries, columns.sampled_ranks[first : first + count])


def _finished(state: RequestState, reason: str, num_siblings_left: int, last_published_ns: int) -> FinishedSequence:
    request, params = state.request, state.params
    return FinishedSequence(
        request_id=request.request_id, index=state.index, num_siblings_left=num_siblings_left, finish_reason=reason,
        prompt_token_ids=request.prompt_token_ids, num_tokens=state.num_tokens, n=params.n,
        max_tokens=request.max_tokens, temperature=params.temperature, top_p=params.top_p,
        arrival_ns=request.arrival_ns, ended_ns=time.monotonic_ns(), last_published_ns=last_published_ns,
        first=state.first, trace_headers=request.trace_headers,
    )  # fmt: skip
