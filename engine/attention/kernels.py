"""Attention over keys and values that lie in one piece, in torch operations; no batch, no cache.

Everywhere here: query [num_kv_heads, num_rows, group, num_queries, key_dim], where `group` counts the heads that share
a kv head; key [num_kv_heads, num_rows, num_positions, key_dim]; value likewise with value_dim. A bias is added to the
scores, 0 where a query sees a position and -inf where not, in the query's dtype, [num_rows or 1, num_queries, width]:
it is for the last `width` positions, and all see those before. Kv heads come first because the KV cache has them so.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from torch import Tensor

# Fewer keys than this (positions times rows) are too little work to pay for two products' set-up.
_MIN_PRODUCT_KEYS = 1024


@dataclass(slots=True, frozen=True)
class Options:
    """How a layer wants its scores made; what a model does not pass is None."""

    scaling: float | None = None  # None: 1 / sqrt(key_dim)
    sliding_window: int | None = None  # a token sees this many positions, itself included
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [heads], one more score for each head, which takes weight and gives no value

    @property
    def is_plain(self) -> bool:
        """Whether torch's own scaled_dot_product_attention can do it."""
        return self.softcap is None and self.sinks is None

    def scale(self, key_dim: int) -> float:
        """What scores are multiplied by."""
        return key_dim**-0.5 if self.scaling is None else self.scaling


def hide(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias of a mask that is True where a query does not see a position."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def causal_bias(num_queries: int, width: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bias of queries that stand at the last of `width` positions, [1, num_queries, width].

    Args:
        num_queries: At most `width`.
        width: Positions.
        window: A query sees so many of them, its own included; None: all up to its own.
        dtype: The queries'.
        device: Theirs.
    """
    offset = width - num_queries
    sees = torch.ones(num_queries, width, dtype=torch.bool, device=device).tril(offset)
    if window is not None:
        sees = sees.triu(offset + 1 - window)
    return hide(~sees[None], dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Attend; the sliding window of `options` must stand in the bias.

    Returns:
        [num_kv_heads, num_rows, group, num_queries, value_dim], in the query's dtype.
    """
    if not options.is_plain:
        return _by_scores(query, key, value, bias, options)
    scale = options.scale(query.shape[-1])
    if _products_are_faster(query, key):
        return _by_products(query, key, value, bias, scale)
    return _by_torch(query, key, value, bias, scale)


def _products_are_faster(query: Tensor, key: Tensor) -> bool:
    """Whether two matrix products beat torch's flash kernel: in bf16 on a CPU (Zen 4, torch 2.13)."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return key.shape[1] * key.shape[2] >= _MIN_PRODUCT_KEYS or query.shape[3] > 1


def _by_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    heads, rows, group, queries, _ = query.shape
    scores = torch.matmul(query.reshape(heads, rows, group * queries, -1), key.transpose(-1, -2))
    if bias is None:
        scores.mul_(scale)
    elif bias.shape[-1] == scores.shape[-1] and queries == 1:
        scores = torch.add(bias, scores, alpha=scale)
    else:
        scores.mul_(scale).view(heads, rows, group, queries, -1)[..., -bias.shape[-1] :].add_(bias.unsqueeze(1))
    return torch.matmul(scores.softmax(-1), value).view(heads, rows, group, queries, -1)


def _by_torch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    group, queries = query.shape[2:4]
    if bias is not None:
        bias = F.pad(bias, (key.shape[2] - bias.shape[-1], 0))
    if queries == 1:  # the heads of a group stand as queries of their kv head, so nothing is repeated
        out = F.scaled_dot_product_attention(query.squeeze(3), key, value, bias, scale=scale)
        return out.unsqueeze(3)
    if bias is not None:
        bias = bias.unsqueeze(1)
    heads_behind = query.transpose(0, 1).flatten(1, 2), key.transpose(0, 1), value.transpose(0, 1)
    out = F.scaled_dot_product_attention(*heads_behind, bias, scale=scale, enable_gqa=group > 1)
    return out.view(len(out), -1, *query.shape[2:4], out.shape[-1]).transpose(0, 1)


def _by_scores(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Score by score, for what scaled_dot_product_attention has no argument for; softmax in fp32."""
    heads, _, group, _, key_dim = query.shape
    scores = (query @ key.unsqueeze(2).transpose(-1, -2)).float() * options.scale(key_dim)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if bias is not None:
        scores[..., -bias.shape[-1] :] += bias.unsqueeze(1)
    if options.sinks is not None:
        sinks = options.sinks.float().view(heads, 1, group, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(query.dtype) @ value.unsqueeze(2)
