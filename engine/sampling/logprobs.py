"""Logprobs of sampled tokens and of prompts, from the logits as the model gave them: before rules and temperature."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringserve.engine.sampling.top_k import top_k
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.messages import AddRequest, Data
from ringserve.shm_transport.records import DataContent
from ringserve.shm_transport.step import LogprobColumns

_ROWS_AT_ONCE = 64  # of a prompt: temporaries stay at the size of a decode step's


@dataclass(slots=True, frozen=True)
class RawLogits:
    """A copy of the logits of those rows that want logprobs."""

    logits: Tensor  # [num_wanting, vocab_size] fp32
    index_of: dict[int, int]  # row of the batch -> row of `logits`


def select_raw(logits: Tensor, requests: Sequence[Request]) -> RawLogits | None:
    """Copy the rows that want logprobs, or return None if none does."""
    rows = [row for row, request in enumerate(requests) if request.params.num_logprobs >= 0]
    if not rows:
        return None
    return RawLogits(logits[rows], {row: index for index, row in enumerate(rows)})


def logprob_columns(
    raw: RawLogits | None, rows: Sequence[int], requests: Sequence[Request], token_ids: NDArray[np.int64]
) -> LogprobColumns | None:
    """Lay out the logprobs of sampled tokens, one a row.

    Args:
        raw: What `select_raw` kept.
        rows: The batch rows of `requests`, for those that got a token.
        requests: Those requests.
        token_ids: [len(requests)], the sampled tokens.

    Returns:
        Columns over `requests`; entries are the sampled token, then the most likely ones. None if nobody wants any.
    """
    wanting = [index for index, row in enumerate(rows) if raw is not None and row in raw.index_of]
    if raw is None or not wanting:
        return None
    are_all = len(wanting) == len(raw.index_of)  # as ever, unless a row has failed
    logits = raw.logits if are_all else raw.logits[[raw.index_of[rows[index]] for index in wanting]]
    columns = _LogprobRows(logits, token_ids[wanting], max(requests[index].params.num_logprobs for index in wanting))
    num_entries = np.zeros(len(requests), np.uint8)
    ranks = np.zeros(len(requests), np.int32)
    ranks[wanting] = columns.ranks
    num_entries[wanting] = [1 + requests[index].params.num_logprobs for index in wanting]
    lengths = [int(num_entries[index]) for index in wanting]
    return LogprobColumns(
        num_entries=num_entries,
        token_ids=np.concatenate([ids[:n] for ids, n in zip(columns.token_ids, lengths, strict=True)]),
        logprobs=np.concatenate([values[:n] for values, n in zip(columns.logprobs, lengths, strict=True)]),
        sampled_ranks=ranks,
    )


def join_columns(parts: Sequence[tuple[int, LogprobColumns | None]]) -> LogprobColumns | None:
    """Lay out as one what several calls of `logprob_columns` have laid out; None if nobody wants any.

    Args:
        parts: How many rows each is for, and what it was.
    """
    if all(columns is None for _, columns in parts):
        return None
    each = [columns or _no_columns(num_rows) for num_rows, columns in parts]
    return LogprobColumns(
        num_entries=np.concatenate([columns.num_entries for columns in each]),
        token_ids=np.concatenate([columns.token_ids for columns in each]),
        logprobs=np.concatenate([columns.logprobs for columns in each]),
        sampled_ranks=np.concatenate([columns.sampled_ranks for columns in each]),
    )


def _no_columns(num_rows: int) -> LogprobColumns:
    return LogprobColumns(
        num_entries=np.zeros(num_rows, np.uint8),
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        sampled_ranks=np.zeros(num_rows, np.int32),
    )


class PromptLogprobs:
    """The logprobs of one prompt's tokens but the first, filled in as its chunks are computed.

    Attributes:
        token_ids: [num_prompt_tokens - 1, 1 + num_prompt_logprobs] int32, the prompt's own token, then the most likely.
        logprobs: Like `token_ids`, float32.
        ranks: [num_prompt_tokens - 1] int32, of the prompt's own token.
        num_rows: How many rows are filled.
    """

    def __init__(self, params: AddRequest) -> None:
        self._next_ids = params.prompt_token_ids[1:].astype(np.int64)
        shape = (len(self._next_ids), 1 + params.num_prompt_logprobs)
        self.token_ids = np.empty(shape, np.int32)
        self.logprobs = np.empty(shape, np.float32)
        self.ranks = np.empty(len(self._next_ids), np.int32)
        self.num_rows = 0

    def extend(self, logits: Tensor) -> None:
        """Fill in the next rows.

        Args:
            logits: [n, vocab_size] fp32, those of the prompt's tokens from index `num_rows` on.
        """
        for some in torch.split(logits, _ROWS_AT_ONCE):
            start, self.num_rows = self.num_rows, self.num_rows + len(some)
            own = slice(start, self.num_rows)
            rows = _LogprobRows(some, self._next_ids[own], self.token_ids.shape[1] - 1)
            self.token_ids[own], self.logprobs[own], self.ranks[own] = rows.token_ids, rows.logprobs, rows.ranks

    def messages(self, handle: int) -> list[Data]:
        """Return what the server is told; all rows must be filled."""
        return [
            Data(handle=handle, content=DataContent.PROMPT_TOKEN_IDS, array=self.token_ids),
            Data(handle=handle, content=DataContent.PROMPT_LOGPROBS, array=self.logprobs),
            Data(handle=handle, content=DataContent.PROMPT_RANKS, array=self.ranks),
        ]


class _LogprobRows:
    """Sampled token and the `num_top` most likely ones of each row, as [num_rows, 1 + num_top] arrays."""

    def __init__(self, logits: Tensor, sampled: NDArray[np.int64], num_top: int) -> None:
        own_ids = torch.from_numpy(sampled).to(logits.device)[:, None]
        own = logits.gather(1, own_ids)
        top, top_ids = top_k(logits, num_top)
        normalizer = logits.logsumexp(dim=1, keepdim=True)
        self.token_ids = torch.cat((own_ids, top_ids), dim=1).to(torch.int32).cpu().numpy()
        self.logprobs = (torch.cat((own, top), dim=1) - normalizer).cpu().numpy()
        self.ranks = ((logits > own).sum(dim=1) + 1).cpu().numpy()
