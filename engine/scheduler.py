"""Decides who runs in each step and who is done. Pure Python, no torch; called by the engine's loop thread alone.

Continuous batching: requests join and leave at every step. A step takes one token of each running request and whole
prompts of newly admitted ones, first come first served.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.interface import RequestFailedError
from engine.request import Request
from shm_transport.records import MAX_LOGPROBS, FinishReason

NO_TOKEN = -1  # an eos_token_id that is none, a stop_token_id that says EOS or nothing


class Pool(Protocol):
    """What the scheduler needs of the KV cache."""

    def try_allocate(self, handle: int, capacity: int) -> bool:
        """Reserve room for `capacity` tokens, or return False."""

    def free(self, handle: int) -> None:
        """Take back what the request holds, if anything."""


@dataclass(slots=True, frozen=True)
class Plan:
    """One step's work: decodes take one token each, prefills their whole prompt."""

    decodes: list[Request]
    prefills: list[Request]

    @property
    def requests(self) -> list[Request]:
        """Everyone in the step, in the order of the batch's rows."""
        return self.decodes + self.prefills


class Finish(NamedTuple):
    """How a row ends: `reason` NONE if the request goes on."""

    reason: FinishReason
    stop_token_id: int = NO_TOKEN


_GOES_ON = Finish(FinishReason.NONE)


class Scheduler:
    """A first-come-first-served waiting queue and a fixed number of seats."""

    def __init__(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, vocab_size: int, pool: Pool
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._pool = pool
        # Dicts keep their order and drop from the middle in O(1), which an abort needs.
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Request] = {}

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a seat."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Append a request to the waiting queue.

        Raises:
            RequestFailedError: If it can never run, or its handle is in use.
        """
        reason = self._refusal(request)
        if reason is not None:
            raise RequestFailedError(request.handle, reason)
        self._waiting[request.handle] = request

    def drop(self, handles: Iterable[int]) -> None:
        """Forget requests wherever they are and free what they hold; unknown handles are ignored."""
        for handle in handles:
            if self._waiting.pop(handle, None) is None and self._running.pop(handle, None) is not None:
                self._pool.free(handle)

    def schedule(self, now_ns: int) -> Plan:
        """Choose the step's work and seat those who join; `now_ns` is their first-scheduled stamp."""
        decodes = list(self._running.values())
        prefills: list[Request] = []
        budget = self._max_num_batched_tokens
        for request in self._waiting.values():
            fits = request.num_prompt_tokens <= budget or not prefills
            if not fits or len(decodes) + len(prefills) == self._max_num_seqs or not self._try_reserve(request):
                break  # first come, first served: nobody overtakes the head of the queue
            budget -= request.num_prompt_tokens
            request.first_scheduled_ns = now_ns
            prefills.append(request)
        for request in prefills:
            del self._waiting[request.handle]
            self._running[request.handle] = request
        return Plan(decodes, prefills)

    def commit(self, requests: Sequence[Request], token_ids: Sequence[int]) -> list[Finish]:
        """Append one sampled token to each request and retire those that it ends, freeing what they hold."""
        finishes = []
        for request, token_id in zip(requests, token_ids, strict=True):
            request.num_computed_tokens = request.num_tokens
            request.output_token_ids.append(token_id)
            finish = self._finish(request, token_id)
            if finish.reason:
                self.drop((request.handle,))
            finishes.append(finish)
        return finishes

    def _finish(self, request: Request, token_id: int) -> Finish:
        """On one token EOS beats a stop token, which beats the length."""
        params = request.params
        if token_id == params.eos_token_id:
            return Finish(FinishReason.STOP)
        if token_id in params.stop_token_ids:
            return Finish(FinishReason.STOP, token_id)
        if request.num_output_tokens >= params.max_tokens or request.num_tokens >= self._max_model_len:
            return Finish(FinishReason.LENGTH)
        return _GOES_ON

    def _try_reserve(self, request: Request) -> bool:
        capacity = min(request.num_prompt_tokens + request.params.max_tokens, self._max_model_len)
        return self._pool.try_allocate(request.handle, capacity)

    def _refusal(self, request: Request) -> str | None:
        """Say why a request can never run, or None."""
        params, num_tokens = request.params, request.num_prompt_tokens
        if request.handle in self._waiting or request.handle in self._running:
            return f"handle {request.handle} is in use by a live request"
        if num_tokens == 0:
            return "the prompt is empty: send at least one token"
        if num_tokens >= self._max_model_len:
            return f"the prompt has {num_tokens} tokens, max_model_len is {self._max_model_len}: shorten it"
        lowest, highest = int(params.prompt_token_ids.min()), int(params.prompt_token_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            return f"prompt token ids reach from {lowest} to {highest}, the vocabulary from 0 to {self._vocab_size - 1}"
        if params.max_tokens < 1:
            return "max_tokens is 0: ask for at least one token"
        if params.num_logprobs > min(MAX_LOGPROBS, self._vocab_size):
            return f"num_logprobs is {params.num_logprobs}, the limit is {min(MAX_LOGPROBS, self._vocab_size)}"
        # Comparisons with NaN are false, so NaN is refused too.
        if not (0.0 <= params.temperature < float("inf") and 0.0 < params.top_p <= 1.0 and 0.0 <= params.min_p <= 1.0):
            return (
                f"temperature {params.temperature}, top_p {params.top_p}, min_p {params.min_p}: "
                "they must be in [0, inf), (0, 1] and [0, 1]"
            )
        return None
