"""What a request forbids, prefers and penalizes among tokens: edits of its row of logits, before the temperature.

Order: allowed, bad and too early end tokens; logit_bias; penalties. A request's rules are made when it is first
sampled and stay with it, so preemption costs nothing of them; a row without any costs one look a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringserve.engine.sampling.penalties import PenalizedRow, PenaltyCounts, has_penalties, new_counts, penalize_
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.messages import AddRequest

Ids = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class LogitRules:
    """One request's rules. Token ids outside of the vocabulary are left out."""

    allowed: Ids | None  # None: all
    bad: Ids
    early_ends: Ids  # EOS and stop tokens, forbidden before min_tokens
    biased: Ids
    biases: NDArray[np.float32]  # of `biased`
    counts: PenaltyCounts | None

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> "LogitRules":
        """Make the rules of a request without output."""
        params, matcher = request.params, request.matcher
        # Beside a grammar stop tokens that are text may have to come early: they end nothing then.
        ends = matcher.ends if matcher is not None else (params.eos_token_id, *params.stop_token_ids)
        bias = [(token_id, value) for token_id, value in params.logit_bias if 0 <= token_id < vocab_size]
        return cls(
            allowed=_known(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None,
            bad=_known(params.bad_token_ids, vocab_size),
            early_ends=_known(ends if params.min_tokens > 0 else (), vocab_size),
            biased=np.array([token_id for token_id, _ in bias], np.int64),
            biases=np.array([value for _, value in bias], np.float32),
            counts=new_counts(params) if has_penalties(params) else None,
        )


_NO_IDS: Ids = np.empty(0, np.int64)
NO_RULES = LogitRules(None, _NO_IDS, _NO_IDS, _NO_IDS, np.empty(0, np.float32), None)


class RuledRow(NamedTuple):
    """One row of logits that has rules."""

    row: int
    request: Request
    rules: LogitRules


def apply_rules_(logits: Tensor, requests: Sequence[Request]) -> None:
    """Edit the rows of those requests that have rules, in place.

    Args:
        logits: [len(requests), vocab_size] fp32, contiguous.
        requests: In the order of the rows.
    """
    ruled = [
        RuledRow(row, request, rules)
        for row, request in enumerate(requests)
        if (rules := request.logit_rules or _make_rules(request, logits.shape[1])) is not NO_RULES
    ]
    if ruled:
        _keep_allowed_(logits, ruled)
        _forbid_(logits, ruled)
        _bias_(logits, ruled)
        _penalize_(logits, ruled)


def _make_rules(request: Request, vocab_size: int) -> LogitRules:
    rules = request.logit_rules = LogitRules.of(request, vocab_size) if has_rules(request.params) else NO_RULES
    return rules


def has_rules(params: AddRequest) -> bool:
    """Whether a request has any rule."""
    has_lists = bool(params.allowed_token_ids or params.bad_token_ids or params.logit_bias)
    return params.min_tokens > 0 or has_lists or has_penalties(params)


def _known(token_ids: Iterable[int], vocab_size: int) -> Ids:
    return np.array([token_id for token_id in token_ids if 0 <= token_id < vocab_size], np.int64)


def _keep_allowed_(logits: Tensor, ruled: Sequence[RuledRow]) -> None:
    parts = [(row, rules.allowed) for row, _, rules in ruled if rules.allowed is not None]
    if not parts:
        return
    places = _places(logits, parts)
    kept = logits.view(-1)[places]
    logits[[row for row, _ in parts]] = float("-inf")
    logits.view(-1)[places] = kept


def _forbid_(logits: Tensor, ruled: Sequence[RuledRow]) -> None:
    parts = [(row, rules.bad) for row, _, rules in ruled if len(rules.bad)]
    parts += [
        (row, rules.early_ends)
        for row, request, rules in ruled
        if len(rules.early_ends) and request.num_output_tokens < request.params.min_tokens
    ]
    if parts:
        logits.view(-1)[_places(logits, parts)] = float("-inf")


def _bias_(logits: Tensor, ruled: Sequence[RuledRow]) -> None:
    parts = [(row, rules.biased) for row, _, rules in ruled if len(rules.biased)]
    if parts:
        values = np.concatenate([rules.biases for _, _, rules in ruled])
        logits.view(-1).index_add_(0, _places(logits, parts), torch.from_numpy(values).to(logits.device))


def _penalize_(logits: Tensor, ruled: Sequence[RuledRow]) -> None:
    rows = []
    for row, request, rules in ruled:
        if rules.counts is not None:
            rules.counts.catch_up(request.output_token_ids)
            rows.append(PenalizedRow(row, rules.counts, request.params))
    if rows:
        penalize_(logits, rows)


def _places(logits: Tensor, parts: Sequence[tuple[int, Ids]]) -> Tensor:
    """Return where (row, token ids) pairs lie in the flat logits."""
    places = np.concatenate([token_ids + row * logits.shape[1] for row, token_ids in parts])
    return torch.from_numpy(places).to(logits.device)
