"""Sampling that never waits for the device: for steps whose tokens the next step takes before the host has seen them.

For requests without rules and logprobs; engine/sampling/sampler.py has the mathematics and does the others.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ringserve.engine.sampling.sampler import (
    GREEDY_BELOW,
    Filters,
    draw_from_all,
    draw_from_sorted,
    keys_of,
    needs_order,
    top_k_of,
    why_failed,
)
from ringserve.engine.schedule.request import Request
from ringserve.engine.transfer import pinned, send

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class DeviceSamples:
    """What a step's logits gave, on their device."""

    token_ids: Tensor  # [num_rows] int64
    best: Tensor  # [num_rows] fp32, each row's largest logit: not finite if the row has no token
    failures: dict[int, str] = field(default_factory=dict)  # rows whose sampling has raised -> why; their token is any


def sample_on_device(logits: Tensor, requests: Sequence[Request]) -> DeviceSamples:
    """Choose each request's next token.

    Args:
        logits: [len(requests), vocab_size] fp32; kept as they are.
        requests: In the order of the rows. Their outputs may end in tokens that are not known yet.
    """
    try:
        return _sample(logits, requests)
    except Exception:
        logger.exception("sampling failed: the rows are done one by one")
        return _sample_each(logits, requests)


def _sample_each(logits: Tensor, requests: Sequence[Request]) -> DeviceSamples:
    """Sample row by row, so that those that raise fail alone."""
    best, token_ids = logits.max(dim=1)
    failures = {}
    for row, request in enumerate(requests):
        try:
            token_ids[row] = _sample(logits[row : row + 1], [request]).token_ids[0]
        except Exception as exc:  # whatever it was, it is this request's alone
            logger.exception("request %d cannot be sampled", request.handle)
            failures[row] = why_failed(exc)
    return DeviceSamples(token_ids, best, failures)


def _sample(logits: Tensor, requests: Sequence[Request]) -> DeviceSamples:
    best, token_ids = logits.max(dim=1)
    whole: list[int] = []
    filtered: list[int] = []
    for row, request in enumerate(requests):
        if request.params.temperature >= GREEDY_BELOW:
            group = filtered if needs_order(request.params, logits.shape[1]) else whole
            group.append(row)
    for rows, draw in ((whole, draw_from_all), (filtered, draw_from_sorted)):
        if rows:
            (index,) = send((np.array(rows, np.int32),), logits.device)
            index = index.long()
            filters, keys = _columns([requests[row] for row in rows], logits)
            # A row that is not finite draws from zeros: its token is thrown away, but the next step reads its embedding
            # before the host knows, and an index out of bounds would end all work on a GPU for good.
            own = logits[index].masked_fill_(~best[index].isfinite()[:, None], 0.0)
            token_ids.index_copy_(0, index, draw(own, filters, keys))
    return DeviceSamples(token_ids, best)


def _columns(requests: Sequence[Request], logits: Tensor) -> tuple[Filters, Tensor]:
    """Return the rows' parameters and what they draw by, sent in one copy that nobody waits for."""
    params = [request.params for request in requests]
    top_k = [top_k_of(each, logits.shape[1]) for each in params]
    rows = [[p.temperature for p in params], top_k, [p.top_p for p in params], [p.min_p for p in params]]
    columns = np.concatenate((np.array(rows, np.float64), keys_of(requests).view(np.float64)[None]))
    sent = pinned(torch.from_numpy(columns), logits.device).to(logits.device, non_blocking=True)
    filters = Filters(
        temperature=sent[0].float(),
        top_k=sent[1].long(),
        largest_top_k=max(top_k),
        top_p=sent[2],
        log_min_p=sent[3].float().log() if any(p.min_p > 0.0 for p in params) else None,
    )
    return filters, sent[4].view(torch.int64)
