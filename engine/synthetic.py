"""An engine without a model: the same rings, loop and finish rules, tokens from a fixed text or a test's script.

Front-end tests and benchmarks run on it. It never imports torch. Pacing is free-running (as fast as the ring takes
steps), a set step time, or lockstep: step k+1 only once a load client has counted every event of step k in a shared
u64, so that the server cannot merge tokens and every event is one token. Every row counts as an event: in lockstep the
text should have no token that is half a character.
"""

import json
import mmap
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringserve.engine.interface import MemoryPart, Refusal, RequestFailedError
from ringserve.shm_transport.messages import AddRequest, Data
from ringserve.shm_transport.records import DataContent, FinishReason, Pooling
from ringserve.shm_transport.step import FirstRowColumns, LogprobColumns, Step

_TEXT = Path(__file__).with_name("synthetic_text.txt")
_LOCKSTEP_POLL_S = 20e-6
_MAX_SLEEP_S = 0.1  # the loop looks at its inbox at least this often


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    """What the synthetic engine emits, and when."""

    tokenizer: str = ""  # tokenizer.json that encodes the fixed text; not needed with a script
    script: str = ""  # JSON file: a list of token ids that each request emits from its first on, again and again
    step_time_s: float = 0.0  # 0: free-running
    tokens_per_step: int = 1  # for each request
    prefill_time_s: float = 0.0  # from a request's seat to its first token
    lockstep: str = ""  # file of one u64: events that have arrived at the clients
    fail_after: int = -1  # every request fails once it has this many tokens; -1: none does
    max_num_seqs: int = 1024
    max_model_len: int = 8192
    vocab_size: int = 0  # 0: one more than the largest id emitted
    embedding_size: int = 64


@dataclass(slots=True)
class _Seat:
    handle: int
    request: AddRequest  # shared with its forks
    queued_ns: int
    scheduled_ns: int = 0
    num_tokens: int = 0


class SyntheticEngine:
    """An Engine (engine/interface.py) that repeats `tokens`."""

    def __init__(self, config: SyntheticConfig) -> None:
        self._config = config
        self._tokens = _load_tokens(config)
        self._waiting: deque[_Seat] = deque()
        self._running: dict[int, _Seat] = {}
        self._failures: list[RequestFailedError] = []
        self._data: list[Data] = []
        self._next_step_s = 0.0
        self._num_events = 0
        self._arrived = _map_counter(config.lockstep) if config.lockstep else None

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._running or self._waiting)

    def add(self, request: AddRequest) -> None:
        """Queue a request and its forks."""
        num_kept = len(request.prompt_token_ids) + (not request.pooling)
        if num_kept > self._config.max_model_len:
            raise RequestFailedError(
                request.handle,
                f"the prompt has {len(request.prompt_token_ids)} tokens, max_model_len is {self._config.max_model_len}",
            )
        if request.grammar:
            reason = Refusal("the synthetic engine's text follows no grammar: send none")
            raise RequestFailedError(request.handle, reason)
        handles = (request.handle, *(fork.handle for fork in request.forks))
        self._waiting += [_Seat(handle, request, time.monotonic_ns()) for handle in handles]

    def abort(self, handles: Iterable[int]) -> None:
        """Drop requests."""
        dropped = set(handles)
        for handle in dropped:
            self._running.pop(handle, None)
        self._waiting = deque(seat for seat in self._waiting if seat.handle not in dropped)

    def step(self) -> Step | None:
        """Emit the next tokens of every seat whose prefill is over; None while no step is due."""
        if not self._is_due():
            return None
        scheduled_ns = time.monotonic_ns()
        num_admitted = self._admit(scheduled_ns)
        prefilled_ns = scheduled_ns - int(self._config.prefill_time_s * 1e9)
        seats = [seat for seat in self._running.values() if seat.scheduled_ns <= prefilled_ns]
        if not seats:
            time.sleep(_LOCKSTEP_POLL_S)
            return self._emit([], scheduled_ns) if num_admitted else None
        seats = [seat for seat in seats if not self._fail(seat) and not self._embed(seat)]
        return self._emit(seats, scheduled_ns)

    def after_step(self) -> None:
        """Do nothing: there is nothing to settle."""

    def finish(self) -> Step | None:
        """Return None: a step is done once it is handed out."""
        return None

    def reset_prefix_cache(self, *, preempts: bool) -> bool:  # noqa: ARG002  # the interface's
        """Return True: there is no cache."""
        return True

    def release(self, part: MemoryPart) -> None:
        """Do nothing: there is no model."""

    def restore(self, part: MemoryPart) -> None:
        """Do nothing."""

    @property
    def adapters(self) -> None:
        """There are none."""

    def idle_step(self) -> Step:
        """Return the figures of now."""
        return self._emit([], time.monotonic_ns())

    def take_data(self) -> list[Data]:
        """Return the last step's embeddings; there are no prompt logprobs here."""
        data, self._data = self._data, []
        return data

    def take_failures(self) -> list[RequestFailedError]:
        """Return the requests that `fail_after` has ended."""
        failures, self._failures = self._failures, []
        return failures

    def stats(self) -> dict[str, int]:
        """Return nothing: its steps cost nothing worth counting."""
        return {}

    def limits(self) -> dict[str, int]:
        """Return READY's figures."""
        vocab_size = self._config.vocab_size or max(self._tokens) + 1
        return {
            "max_model_len": self._config.max_model_len, "vocab_size": vocab_size,
            "embedding_size": self._config.embedding_size, "num_blocks": 0,
        }  # fmt: skip

    def _is_due(self) -> bool:
        if self._arrived is not None and int(self._arrived[0]) < self._num_events:
            time.sleep(_LOCKSTEP_POLL_S)
            return False
        time.sleep(min(max(self._next_step_s - time.monotonic(), 0.0), _MAX_SLEEP_S))
        late_s = time.monotonic() - self._next_step_s
        if late_s < 0:
            return False
        step_time_s = self._config.step_time_s
        self._next_step_s += step_time_s if late_s < step_time_s else late_s + step_time_s  # never to catch up
        return True

    def _admit(self, now_ns: int) -> int:
        """Seat those who wait; return how many."""
        num_running = len(self._running)
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            seat = self._waiting.popleft()
            seat.scheduled_ns = now_ns
            self._running[seat.handle] = seat
        return len(self._running) - num_running

    def _fail(self, seat: _Seat) -> bool:
        if seat.num_tokens != self._config.fail_after:
            return False
        del self._running[seat.handle]
        message = f"the synthetic engine fails each request after {seat.num_tokens} tokens"
        self._failures.append(RequestFailedError(seat.handle, message))
        return True

    def _embed(self, seat: _Seat) -> bool:
        """Make the embedding of a request that wants one, and end it."""
        request = seat.request
        if request.pooling == Pooling.NONE:
            return False
        del self._running[seat.handle]
        embedding = _embedding(request, self._config.embedding_size)
        self._data.append(Data(handle=seat.handle, content=DataContent.EMBEDDING, array=embedding))
        return True

    def _emit(self, seats: list[_Seat], scheduled_ns: int) -> Step:
        first = _first_columns(seats)
        rows = [self._advance(seat) for seat in seats]
        for seat, (_, reason, _) in zip(seats, rows, strict=True):
            if reason:
                del self._running[seat.handle]
        self._num_events += len(rows)
        token_ids = [token for tokens, _, _ in rows for token in tokens]
        counts = np.array([len(tokens) for tokens, _, _ in rows], np.uint32)
        is_finished = any(reason for _, reason, _ in rows)
        return Step(
            handles=np.array([seat.handle for seat in seats], np.uint64),
            token_ids=np.array(token_ids, np.int32),
            num_tokens=None if (counts == 1).all() else counts,
            finish_reasons=np.array([reason for _, reason, _ in rows], np.uint8) if is_finished else None,
            stop_token_ids=np.array([stop for _, _, stop in rows], np.int32) if is_finished else None,
            first=first,
            logprobs=_logprobs(seats, counts, token_ids),
            scheduled_ns=scheduled_ns,
            forward_done_ns=time.monotonic_ns(),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
        )

    def _advance(self, seat: _Seat) -> tuple[list[int], FinishReason, int]:
        """Return a seat's next tokens, up to and including one that ends it, the reason, and the stop token id."""
        tokens: list[int] = []
        while len(tokens) < self._config.tokens_per_step:
            token = self._tokens[seat.num_tokens % len(self._tokens)]
            tokens.append(token)
            seat.num_tokens += 1
            reason, stop = _finish(seat, token, self._config.max_model_len)
            if reason:
                return tokens, reason, stop
        return tokens, FinishReason.NONE, -1


def _finish(seat: _Seat, token: int, max_model_len: int) -> tuple[FinishReason, int]:
    request = seat.request
    if seat.num_tokens > request.min_tokens:
        if token == request.eos_token_id:
            return FinishReason.STOP, -1
        if token in request.stop_token_ids:
            return FinishReason.STOP, token
    is_full = len(request.prompt_token_ids) + seat.num_tokens >= max_model_len
    if seat.num_tokens >= request.max_tokens or is_full:
        return FinishReason.LENGTH, -1
    return FinishReason.NONE, -1


def _embedding(request: AddRequest, size: int) -> np.ndarray:
    """Return a made-up embedding, [size] f4: a function of the token ids that are pooled."""
    token_ids = request.prompt_token_ids if request.pooling == Pooling.MEAN else request.prompt_token_ids[-1:]
    states = np.cos(np.outer(token_ids + 1.0, np.arange(1, size + 1)))
    embedding = states.mean(axis=0)
    length = np.linalg.norm(embedding) if request.is_normalized else 1.0
    return np.asarray(embedding / length, np.float32)


def _first_columns(seats: list[_Seat]) -> FirstRowColumns | None:
    if all(seat.num_tokens for seat in seats):
        return None
    is_first = [seat.num_tokens == 0 for seat in seats]
    zeros = np.zeros(len(seats), np.uint32)
    return FirstRowColumns(
        num_cached_tokens=zeros,
        queued_ns=np.array([seat.queued_ns for seat in seats], np.uint64) * is_first,
        first_scheduled_ns=np.array([seat.scheduled_ns for seat in seats], np.uint64) * is_first,
        num_preemptions=zeros,
    )


def _logprobs(seats: list[_Seat], counts: np.ndarray, token_ids: list[int]) -> LogprobColumns | None:
    """Made-up logprobs of the right shape: the sampled token is the most likely, its neighbours in the table follow."""
    entries = np.array([seat.request.num_logprobs + 1 for seat in seats], np.uint8)
    if not entries.any():
        return None
    each = np.repeat(entries, counts).tolist()
    ids = [max(token - k, 0) for token, n in zip(token_ids, each, strict=True) for k in range(n)]
    logprobs = [-0.25 * (k + 1) for n in each for k in range(n)]
    return LogprobColumns(
        num_entries=entries,
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        sampled_ranks=np.ones(len(token_ids), np.int32),
    )


def _load_tokens(config: SyntheticConfig) -> list[int]:
    if config.script:
        tokens = _read_script(config.script)
    else:
        from tokenizers import Tokenizer  # only here: a scripted engine starts without it

        tokens = Tokenizer.from_file(config.tokenizer).encode(_TEXT.read_text("utf-8"), add_special_tokens=False).ids
    if not tokens or not all(isinstance(token, int) and 0 <= token < 2**31 for token in tokens):
        raise ValueError(f"the script {config.script!r} must be a non-empty JSON list of token ids from 0 to 2**31 - 1")
    return list(tokens)


def _read_script(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except ValueError as exc:
        raise ValueError(f"the script {path!r} is not JSON: {exc}") from exc


def _map_counter(path: str) -> np.ndarray:
    if Path(path).stat().st_size < 8:
        raise ValueError(
            f"the lockstep file {path!r} has {Path(path).stat().st_size} bytes: it must hold one u64, 8 bytes"
        )
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 8), "<u8", 1)
