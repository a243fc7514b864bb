"""The attention function that every model is run through: a flat batch of requests in, the KV cache behind it.

transformers calls it once a layer with the tokens of all requests in one row, [1, heads, num_tokens, head_dim]. What
the model cannot pass on, the batch and the cache, stands in a context variable for the length of one forward.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.batch import Batch
from engine.kv_cache import KVCache, LayerShape

ATTENTION_NAME = "ringserve"


@dataclass(slots=True, frozen=True)
class Options:
    """How a layer wants its scores made; what a model does not pass is None."""

    scaling: float | None
    sliding_window: int | None  # a token sees this many positions, itself included
    softcap: float | None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None  # [heads], one more score for each head, which takes weight and gives no value

    @property
    def is_plain(self) -> bool:
        """Whether torch's own scaled_dot_product_attention can do it."""
        return self.softcap is None and self.sinks is None


class StepAttention:
    """One forward's attention: writes each layer's keys and values, then lets every token look at its own request."""

    def __init__(self, batch: Batch, cache: KVCache | None, device: torch.device) -> None:
        self.shapes: dict[int, LayerShape] = {}  # of the layers that have run
        self._device = device
        self._cache = cache  # None: nothing is kept, for a batch without decodes
        self._prefill_bounds = batch.prefill_bounds
        self._slot_mapping = torch.from_numpy(batch.slot_mapping).to(device)
        self._decode_slots = torch.from_numpy(batch.decode_slots).to(device)
        self._decode_lengths = torch.from_numpy(batch.decode_lengths).to(device)
        self._shortest, self._longest = min(batch.decode_lengths, default=0), batch.decode_slots.shape[1]
        self._masks: dict[tuple[str, int, int | None], Tensor | None] = {}  # the same for every layer of one kind

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Return [1, num_tokens, heads, head_dim] for tensors of [1, heads or kv_heads, num_tokens, head_dim]."""
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.shapes[layer] = LayerShape(_row_shape(keys), _row_shape(values), keys.dtype)
        if self._cache is not None:
            self._cache.write(layer, self._slot_mapping, keys, values)
        parts = []
        if len(self._decode_slots):
            parts.append(self._attend_decodes(layer, query[:, :, : len(self._decode_slots)], options))
        for start, end in self._prefill_bounds:
            mask = self._prefill_mask(end - start, options)
            own = slice(start, end)
            parts.append(attention(query[:, :, own], key[:, :, own], value[:, :, own], mask, options))
        return torch.cat(parts, dim=2).transpose(1, 2)

    def _attend_decodes(self, layer: int, query: Tensor, options: Options) -> Tensor:
        """All decodes at once: their histories gathered and padded to the longest."""
        assert self._cache is not None
        keys, values = self._cache.gather(layer, self._decode_slots)
        return attention(query.transpose(0, 2), keys, values, self._decode_mask(options), options).transpose(0, 2)

    def _decode_mask(self, options: Options) -> Tensor | None:
        """[num_decodes, 1, 1, longest], True where a position counts; None where all do."""
        window = options.sliding_window
        kind = ("decode", self._longest, window)
        if kind not in self._masks:
            self._masks[kind] = self._make_decode_mask(window)
        return self._masks[kind]

    def _make_decode_mask(self, window: int | None) -> Tensor | None:
        if self._shortest == self._longest and (window is None or window >= self._longest):
            return None
        positions = torch.arange(self._longest, device=self._device)
        lengths = self._decode_lengths[:, None]
        mask = positions < lengths
        if window is not None:
            mask &= positions >= lengths - window
        return mask[:, None, None, :]

    def _prefill_mask(self, length: int, options: Options) -> Tensor | None:
        """[length, length], True where a token (row) sees a position (column); None where that is plainly causal."""
        window = options.sliding_window
        if window is not None and window >= length:
            window = None
        kind = ("prefill", length, window)
        if kind not in self._masks:
            self._masks[kind] = None if window is None else causal_mask(length, length, window, self._device)
        return self._masks[kind]


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Attend with grouped heads.

    Args:
        query: [num_rows, heads, num_queries, head_dim]; kv_heads divides heads.
        key: [num_rows, kv_heads, num_positions, head_dim].
        value: Like `key`, with a head_dim of its own.
        mask: Boolean, broadcasts to [num_rows, 1, num_queries, num_positions]. None: causal, the last query at the last
            position, so that a single query sees everything.
        options: The layer's.

    Returns:
        [num_rows, heads, num_queries, value's head_dim], in the query's dtype.
    """
    if not options.is_plain:
        return _reference_attention(query, key, value, mask, options)
    if query.shape[2] > 1:
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=options.scaling, enable_gqa=is_grouped
        )
    # One query: the heads of a group stand as queries of their kv head, so nothing is repeated.
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=options.scaling)
    return out.flatten(1, 2).unsqueeze(2)


def _reference_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Score by score, for what scaled_dot_product_attention has no argument for; softmax in fp32."""
    num_queries, num_positions = query.shape[2], key.shape[2]
    grouped = query.reshape(len(query), key.shape[1], -1, num_queries, query.shape[-1])  # dimension 2: the group
    scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).float() * scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is None:
        mask = causal_mask(num_queries, num_positions, num_positions, query.device)
    mask = mask.unsqueeze(2) if mask.ndim == 4 else mask
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(query.dtype) @ value.unsqueeze(2)).flatten(1, 2)


def causal_mask(num_queries: int, num_positions: int, window: int, device: torch.device) -> Tensor:
    """[num_queries, num_positions], True where a query sees a position: its own and the `window` - 1 before it."""
    offset = num_positions - num_queries  # the last query stands at the last position
    mask = torch.ones(num_queries, num_positions, dtype=torch.bool, device=device)
    return mask.tril(offset).triu(offset + 1 - window)


def _row_shape(rows: Tensor) -> tuple[int, int]:
    return rows.shape[1], rows.shape[2]


step_attention: ContextVar[StepAttention] = ContextVar("step_attention")  # of the forward that this thread is in


def _registered_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls; `_mask` is None, since no mask function goes by our name."""
    options = Options(*(kwargs.get(name) for name in ("scaling", "sliding_window", "softcap", "s_aux")))
    return step_attention.get().attend(int(module.layer_idx), query, key, value, options), None  # type: ignore[arg-type]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _registered_attention)
