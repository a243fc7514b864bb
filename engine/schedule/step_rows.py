"""The rows of a step's record: one for each request that got a token."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Finish
from ringserve.shm_transport.step import FirstRowColumns, Step


def fill_rows(
    step: Step,
    requests: Sequence[Request],
    token_ids: NDArray[np.int64],
    finishes: Sequence[Finish],
    num_outputs: Sequence[int],
) -> None:
    """Put a step's columns into it.

    Args:
        step: Without rows.
        requests: Those that got a token.
        token_ids: [len(requests)], theirs.
        finishes: How each goes on.
        num_outputs: How many tokens each has with this one; its output may be longer already by one that is not known.
    """
    step.handles = np.array([request.handle for request in requests], np.uint64)
    step.token_ids = token_ids.astype(np.int32)
    if any(finish.reason for finish in finishes):
        step.finish_reasons = np.array([finish.reason for finish in finishes], np.uint8)
        step.stop_token_ids = np.array([finish.stop_token_id for finish in finishes], np.int32)
    if 1 in num_outputs:
        step.first = _first_rows(requests, np.array(num_outputs) == 1)


def _first_rows(requests: Sequence[Request], is_first: NDArray[np.bool_]) -> FirstRowColumns:
    def column(values: list[int], dtype: type[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        return np.where(is_first, np.array(values, dtype), dtype(0))

    return FirstRowColumns(
        num_cached_tokens=column([request.num_cached_tokens for request in requests], np.uint32),
        queued_ns=column([request.queued_ns for request in requests], np.uint64),
        first_scheduled_ns=column([request.first_scheduled_ns for request in requests], np.uint64),
        num_preemptions=column([request.num_preemptions for request in requests], np.uint32),
    )
