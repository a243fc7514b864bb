"""From logits to one token a request. Rows are split once, so that greedy ones pay nothing for the others.

Order for a row: a copy for its logprobs, rules (logit_rules.py), its grammar (grammar_mask.py), temperature,
min_p, top_k, top_p, draw. The draw is a function of the request's seed and output index, so nobody's tokens depend on
batch mates. All but the greedy path on CPUs is torch, on the device of the logits.

A row whose sampling raises takes the others' with it: `sample_each` then does them again, one by one.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from numpy.typing import NDArray
from torch import Tensor

from ringserve.engine.interface import Refusal
from ringserve.engine.sampling.grammar_mask import apply_grammars_
from ringserve.engine.sampling.logit_rules import apply_rules_
from ringserve.engine.sampling.logprobs import join_columns, logprob_columns, select_raw
from ringserve.engine.sampling.rng import draw_keys, race
from ringserve.engine.sampling.top_k import top_k
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.messages import AddRequest
from ringserve.shm_transport.step import LogprobColumns

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5  # temperature
NOT_FINITE = "the model's logits are not finite: the weights or the dtype overflow"
_SHORTLIST = 128  # candidates looked at first: sorting a whole vocabulary takes far longer
_WIDEN = 8
_MARGIN = 8  # sorted candidates for each that top_k keeps
_BLOCK = 256  # columns whose sum is drawn from first


@dataclass(slots=True, frozen=True)
class Samples:
    """What a step's logits gave. Requests that failed are in `failures` alone."""

    requests: list[Request]
    token_ids: NDArray[np.int64]  # [len(requests)]
    logprobs: LogprobColumns | None
    failures: dict[int, str]  # handle -> why


@dataclass(slots=True, frozen=True)
class Filters:
    """Sampling parameters of some rows as columns, [num_rows] each, on the logits' device."""

    temperature: Tensor  # fp32
    top_k: Tensor  # int64, vocab_size where off
    largest_top_k: int
    top_p: Tensor  # fp64
    log_min_p: Tensor | None  # fp32, -inf where off; None where no row has it

    @classmethod
    def of(cls, params: Sequence[AddRequest], vocab_size: int, device: torch.device) -> "Filters":
        """Collect the columns from the requests' parameters."""
        top_k = [top_k_of(each, vocab_size) for each in params]
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            largest_top_k=max(top_k),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            log_min_p=min_p.log() if any(p.min_p > 0.0 for p in params) else None,
        )

    def take(self, rows: Tensor) -> "Filters":
        """Return the columns of some rows."""
        log_min_p = None if self.log_min_p is None else self.log_min_p[rows]
        return Filters(self.temperature[rows], self.top_k[rows], self.largest_top_k, self.top_p[rows], log_min_p)


def sample(logits: Tensor, requests: Sequence[Request]) -> Samples:
    """Choose each request's next token.

    Args:
        logits: [len(requests), vocab_size] fp32; overwritten.
        requests: In the order of the rows.
    """
    raw = select_raw(logits, requests)
    apply_rules_(logits, requests)
    lost = apply_grammars_(logits, requests)
    token_ids, best = _greedy(logits)
    is_finite = np.isfinite(best)
    _draw_rows(logits, requests, token_ids, is_finite)
    rows = is_finite.nonzero()[0].tolist()
    kept = [requests[row] for row in rows]
    failed = (~is_finite).nonzero()[0].tolist()
    failures = {requests[row].handle: _why(best[row], requests[row]) for row in failed} | lost
    return Samples(kept, token_ids[rows], logprob_columns(raw, rows, kept, token_ids[rows]), failures)


def sample_each(logits: Tensor, requests: Sequence[Request]) -> Samples:
    """Do what `sample` does when that has raised: row by row, so that those that raise fail alone.

    The others get what they would have got, for a draw depends on the request alone.

    Args:
        logits: [len(requests), vocab_size] fp32, as the model gives them: not what `sample` has left; overwritten.
        requests: In the order of the rows.
    """
    samples = []
    for row, request in enumerate(requests):
        request.logit_rules = None  # it may have stopped in the middle of its counts: they are made again
        try:
            samples.append(sample(logits[row : row + 1], [request]))
        except Exception as exc:  # whatever it was, it is this request's alone
            logger.exception("request %d cannot be sampled", request.handle)
            samples.append(Samples([], np.empty(0, np.int64), None, {request.handle: why_failed(exc)}))
    return Samples(
        requests=[request for each in samples for request in each.requests],
        token_ids=np.concatenate([each.token_ids for each in samples]),
        logprobs=join_columns([(len(each.requests), each.logprobs) for each in samples]),
        failures={handle: why for each in samples for handle, why in each.failures.items()},
    )


def why_failed(reason: Exception) -> str:
    """Say what a request is told whose sampling has raised."""
    return f"sampling failed: {reason}"


def _why(best: float, request: Request) -> str:
    """Say why a row whose largest logit is `best`, which is no number, has no token."""
    params, num_tokens = request.params, request.num_output_tokens
    rules = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_token_ids,
        "min_tokens": num_tokens < params.min_tokens,
    }
    names = [name for name, is_set in rules.items() if is_set]
    if best != float("-inf") or not names:
        return NOT_FINITE
    candidates = "all" if request.matcher is None else "those that the grammar has there"
    return Refusal(
        f"no token is left after the first {num_tokens}: of {candidates}, {' and '.join(names)} let none come: change "
        f"{names[0]}, or leave it out"
    )


def _greedy(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return each row's most likely token, the lowest id among equals, and its logit; both [num_rows].

    A NaN anywhere in a row, or an infinity, is its maximum: no other look at the row is needed. Numpy's argmax is far
    faster than torch's on CPUs.
    """
    if logits.device.type == "cpu":
        numbers = logits.numpy()
        token_ids = numbers.argmax(axis=1)
        return token_ids, numbers[np.arange(len(numbers)), token_ids]
    best = logits.argmax(dim=1)
    return best.cpu().numpy(), logits.gather(1, best[:, None]).squeeze(1).cpu().numpy()


def _draw_rows(
    logits: Tensor, requests: Sequence[Request], token_ids: NDArray[np.int64], is_finite: NDArray[np.bool_]
) -> None:
    """Replace the greedy choice by a draw in the rows that want one."""
    whole: list[int] = []
    filtered: list[int] = []
    for row, request in enumerate(requests):
        if request.params.temperature >= GREEDY_BELOW and is_finite[row]:
            group = filtered if needs_order(request.params, logits.shape[1]) else whole
            group.append(row)
    for rows, draw in ((whole, draw_from_all), (filtered, draw_from_shortlist)):
        if rows:
            chosen = [requests[row] for row in rows]
            filters = Filters.of([request.params for request in chosen], logits.shape[1], logits.device)
            keys = torch.from_numpy(keys_of(chosen)).to(logits.device)
            own = logits if len(rows) == len(requests) else logits[rows]
            token_ids[rows] = draw(own, filters, keys).cpu().numpy()


def top_k_of(params: AddRequest, vocab_size: int) -> int:
    """Return how many tokens top_k leaves, `vocab_size` where it is off."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def needs_order(params: AddRequest, vocab_size: int) -> bool:
    """Whether a request draws from its most likely tokens, which have to be found first."""
    return params.top_p < 1.0 or top_k_of(params, vocab_size) < vocab_size


def keys_of(requests: Sequence[Request]) -> NDArray[np.int64]:
    """Return what each request draws its next token by, [len(requests)]."""
    seeds = np.array([request.seed for request in requests], np.uint64)
    return draw_keys(seeds, np.array([request.num_output_tokens for request in requests], np.int64))


def scale_(logits: Tensor, filters: Filters, best: Tensor | None = None) -> Tensor:
    """Apply temperature and min_p in place: 0 for a row's most likely token, -inf for those left out.

    Args:
        logits: [num_rows, num_columns].
        filters: Of the same rows.
        best: [num_rows, 1], the rows' largest logits, if they are known.
    """
    best = logits.amax(dim=1, keepdim=True) if best is None else best
    logits.sub_(best).div_(filters.temperature[:, None])
    if filters.log_min_p is not None:
        logits.masked_fill_(logits < filters.log_min_p[:, None], float("-inf"))
    return logits


def draw_from_all(logits: Tensor, filters: Filters, keys: Tensor) -> Tensor:
    """Draw one token a row from everything that is left, [num_rows]; overwrites `logits`.

    In two levels, a block of columns and then a column of that block: a number for each token of a vocabulary would
    take many times as long.
    """
    blocks = _blocks(scale_(logits, filters).exp_())  # 32 new rows would take as long as their exp
    sums = blocks.sum(dim=2).double()  # in single precision: wrong by a millionth, and far faster
    num_blocks = sums.shape[1]
    block = race(sums, keys, torch.arange(-num_blocks, 0, device=logits.device))
    weights = blocks[torch.arange(len(blocks), device=logits.device), block].double()
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    return columns.gather(1, race(weights, keys, columns)[:, None]).squeeze(1)


def draw_from_shortlist(logits: Tensor, filters: Filters, keys: Tensor) -> Tensor:
    """Draw one token a row from what top_k and top_p leave, [num_rows]."""
    drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows, token_ids, weights in shortlists(logits, filters):
        places = race(weights, keys[rows], token_ids)
        drawn[rows] = token_ids.gather(1, places[:, None]).squeeze(1)
    return drawn


def draw_from_sorted(logits: Tensor, filters: Filters, keys: Tensor) -> Tensor:
    """Draw what `draw_from_shortlist` draws from a sorted list that is long enough from the start, [num_rows].

    A GPU sorts so fast that looking at what a shorter one holds would take longer: the host would have to wait.
    Overwrites `logits`.
    """
    scaled = scale_(logits, filters)
    can_cut = filters.largest_top_k * _MARGIN <= scaled.shape[1]  # equals at the end of top_k stand in the list too
    size = filters.largest_top_k * _MARGIN if can_cut else scaled.shape[1]
    values, token_ids = _largest(scaled, size)
    places = race(_weigh(values, _masses(scaled, filters), filters), keys, token_ids)
    return token_ids.gather(1, places[:, None]).squeeze(1)


def shortlists(logits: Tensor, filters: Filters) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Find each row's candidates under top_k and top_p, the most likely first, the lowest id first among equals.

    A list is first weighed against the least and the most that the tokens outside of it can weigh. Only where that
    leaves open what top_p keeps, the whole vocabulary is summed up, which takes several times as long.

    Yields:
        Groups of rows: their numbers [n], candidates [n, size] and weights [n, size] fp64, 0 for what is left out. A
        row comes in the first group whose size provably holds all that it keeps.
    """
    num_rows, vocab_size = logits.shape
    rows, size = torch.arange(num_rows, device=logits.device), min(_SHORTLIST, vocab_size)
    while len(rows):
        left = logits if len(rows) == num_rows else logits[rows]
        own = filters.take(rows)
        values, token_ids = _largest(left, size)
        scaled = scale_(values, own, values[:, :1].clone())
        weights, is_open = _weigh_in_bounds(scaled, own)
        if is_open.any():
            exact = _weigh(scaled, _masses(scale_(left.clone(), own), own), own)
            weights = torch.where(is_open[:, None], exact, weights)
            is_open &= own.top_k < vocab_size  # of these it takes a part of that sum, which the list does not show
        is_settled = ~is_open & _holds_all(scaled, weights, vocab_size)
        yield rows[is_settled], token_ids[is_settled], weights[is_settled]
        rows = rows[~is_settled]
        size = min(size * _WIDEN, vocab_size)


def _masses(scaled: Tensor, filters: Filters) -> Tensor:
    """Return each row's weight in all, [num_rows] fp64; zeros where no row's top_k lets it need that."""
    if filters.largest_top_k <= _SHORTLIST:
        return torch.zeros(len(scaled), dtype=torch.float64, device=scaled.device)
    return _blocks(scaled.exp()).sum(dim=2).sum(dim=1, dtype=torch.float64)


def _largest(scaled: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest values of each row and their columns, falling, the lowest column first among equals."""
    if size == scaled.shape[1]:
        values, columns = scaled.sort(dim=1, descending=True, stable=True)
        return values, columns
    columns = top_k(scaled, size)[1].sort(dim=1).values
    values, order = scaled.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _weigh(scaled: Tensor, mass: Tensor, filters: Filters) -> Tensor:
    """Weights of sorted values: top_k cuts by place, then top_p by the mass that goes before, of what top_k left."""
    weights = _weights_of_top_k(scaled, filters)
    total = torch.where(filters.top_k <= scaled.shape[1], weights.sum(dim=1), mass)
    return weights * _is_kept(weights, total, filters)


def _weigh_in_bounds(scaled: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Weigh as `_weigh` does, without the mass; and say for which rows that would have to be known, [num_rows] bool."""
    weights = _weights_of_top_k(scaled, filters)
    least = weights.sum(dim=1)
    most = least + weights[:, -1] * (filters.top_k - scaled.shape[1]).clamp_(min=0)
    is_kept = _is_kept(weights, least, filters)
    is_open = is_kept.sum(dim=1) != _is_kept(weights, most, filters).sum(dim=1)
    return weights * is_kept, is_open


def _weights_of_top_k(scaled: Tensor, filters: Filters) -> Tensor:
    places = torch.arange(scaled.shape[1], device=scaled.device)
    return scaled.exp().double() * (places < filters.top_k[:, None])


def _is_kept(weights: Tensor, total: Tensor, filters: Filters) -> Tensor:
    """Whether top_p keeps a token, by what those before it weigh; a row's first tokens are kept."""
    before = weights.cumsum(dim=1) - weights
    return (before < (filters.top_p * total)[:, None]) | (filters.top_p >= 1.0)[:, None]


def _holds_all(scaled: Tensor, weights: Tensor, vocab_size: int) -> Tensor:
    """Whether nothing outside of a row's list can belong to its candidates, [num_rows] bool.

    So it is if the last one kept is larger than the last one listed: then not even an equal stands outside.
    """
    if scaled.shape[1] == vocab_size:
        return torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
    num_kept = (weights > 0).sum(dim=1).clamp_(min=1)
    last_kept = scaled.gather(1, (num_kept - 1)[:, None]).squeeze(1)
    return last_kept > scaled[:, -1]


def _blocks(weights: Tensor) -> Tensor:
    """Return the columns in blocks, zeros behind the last one, [num_rows, num_blocks, _BLOCK]."""
    num_rows, num_columns = weights.shape
    num_missing = -num_columns % _BLOCK
    whole = F.pad(weights, (0, num_missing)) if num_missing else weights  # pad copies in any case
    return whole.view(num_rows, (num_columns + num_missing) // _BLOCK, _BLOCK)
