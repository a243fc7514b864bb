"""Repetition, frequency and presence penalties: what a request's own tokens cost it.

A request's counts are on the host and grow by one token a step; a step sends those of its rows to the logits' device,
where all rows are penalized at once. They hold the distinct tokens alone: penalties over whole rows of counts would
pass each row's logits several times.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringserve.shm_transport.messages import AddRequest


class PenaltyCounts:
    """The distinct tokens of a request's prompt and output, and how often each is in the output.

    Args:
        prompt_token_ids: [num_prompt_tokens]; empty if the prompt does not matter.
    """

    __slots__ = ("_counts", "_num_counted", "_place_of", "_token_ids")

    def __init__(self, prompt_token_ids: NDArray[np.int32]) -> None:
        self._token_ids = np.unique(prompt_token_ids).astype(np.int64)
        self._counts = np.zeros(len(self._token_ids), np.float32)
        self._place_of = {token_id: place for place, token_id in enumerate(self._token_ids.tolist())}
        self._num_counted = 0  # output tokens

    def __len__(self) -> int:
        return len(self._place_of)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens, in no order, [len(self)]."""
        return self._token_ids[: len(self)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `token_ids` is in the output; 0 for those of the prompt alone."""
        return self._counts[: len(self)]

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Count those at the end of the whole output that are new since the last call."""
        for token_id in output_token_ids[self._num_counted :]:
            place = self._place_of.setdefault(token_id, len(self._place_of))
            if place == len(self._token_ids):
                self._grow()
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self._num_counted = len(output_token_ids)

    def _grow(self) -> None:
        room = max(64, len(self._token_ids))
        self._token_ids = np.concatenate((self._token_ids, np.zeros(room, np.int64)))
        self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))


class PenalizedRow(NamedTuple):
    """One row of logits and what is penalized in it."""

    row: int
    counts: PenaltyCounts
    params: AddRequest


def has_penalties(params: AddRequest) -> bool:
    """Whether the request has any penalty."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def new_counts(params: AddRequest) -> PenaltyCounts:
    """Return the counts of a request without output; the prompt counts only for the repetition penalty."""
    prompt = params.prompt_token_ids
    return PenaltyCounts(prompt if params.repetition_penalty != 1.0 else prompt[:0])


def penalize_(logits: Tensor, rows: Sequence[PenalizedRow]) -> None:
    """Apply the three penalties in place.

    Args:
        logits: [num_rows, vocab_size] fp32, contiguous.
        rows: Distinct rows, their counts caught up.

    Source: repetition: CTRL, Keskar et al., 2019; frequency and presence: OpenAI's API.
    """
    lengths = [len(row.counts) for row in rows]
    places = np.concatenate([row.counts.token_ids + row.row * logits.shape[1] for row in rows])
    counts = np.concatenate([row.counts.counts for row in rows])
    each = np.array([_penalties(row.params) for row in rows], np.float32)
    index, count, row_of = (
        torch.from_numpy(array).to(logits.device)
        for array in (places, counts, np.repeat(np.arange(len(rows)), lengths))
    )
    repetition, frequency, presence = torch.from_numpy(each).to(logits.device)[row_of].unbind(1)
    values = logits.view(-1)[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= count * frequency
    values -= count.clamp(max=1.0) * presence
    logits.view(-1)[index] = values


def _penalties(params: AddRequest) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty
