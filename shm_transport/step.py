"""One engine step as the engine hands it to the ring: columns of numbers, one row for each request that moved."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True, frozen=True)
class FirstRowColumns:
    """What is known of a request once, at its first row; rows that are not first hold zeros. All [num_rows]."""

    num_cached_tokens: NDArray[np.uint32]
    queued_ns: NDArray[np.uint64]
    first_scheduled_ns: NDArray[np.uint64]
    num_preemptions: NDArray[np.uint32]


@dataclass(slots=True, kw_only=True, frozen=True)
class LogprobColumns:
    """Logprobs of the step's tokens; rows that asked for none have 0 entries."""

    num_entries: NDArray[np.uint8]  # [num_rows], entries for each of the row's tokens
    token_ids: NDArray[np.int32]  # [sum(num_entries * num_tokens)], the sampled token first, then by falling logprob
    logprobs: NDArray[np.float32]  # like token_ids
    sampled_ranks: NDArray[np.int32]  # [num_tokens], 1 for the most likely token


@dataclass(slots=True, kw_only=True)  # not frozen: that would triple the time to make one, once a step
class Step:
    """What one engine step made. Every column is None where no row needs it.

    A row is one request that got tokens in this step, or ended. Stamps are CLOCK_MONOTONIC nanoseconds.
    """

    handles: NDArray[np.uint64]  # [num_rows]
    token_ids: NDArray[np.int32]  # [num_tokens], row by row
    num_tokens: NDArray[np.uint32] | None = None  # [num_rows]; None: one token in each row
    finish_reasons: NDArray[np.uint8] | None = None  # [num_rows], FinishReason
    stop_token_ids: NDArray[np.int32] | None = None  # [num_rows], -1: none, or EOS
    first: FirstRowColumns | None = None
    logprobs: LogprobColumns | None = None
    scheduled_ns: int = 0
    forward_done_ns: int = 0
    num_prefill_tokens: int = 0  # of prompts, that the step computed
    num_running: int = 0  # requests that hold a seat after this step
    num_waiting: int = 0
    num_blocks_used: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0  # since the engine started

    @property
    def is_plain(self) -> bool:
        """Whether handles and token_ids are its only columns, as in most steps."""
        return self.num_tokens is None and self.finish_reasons is None and self.first is None and self.logprobs is None
