"""Attention over the paged cache by torch's own flash attention, where this torch has it for block tables.

Written from torch 2.13's source; it has not been run on a GPU yet. What is known of it: blocks must have a multiple of
256 tokens; fp16 and bf16 alone; no softcap, no sinks; with several sequences and its own choice of splits it gave wrong
rows (pytorch issue 194167), so that is always one.
"""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor

from ringserve.engine.attention.base import Attention
from ringserve.engine.attention.kernels import Options
from ringserve.engine.attention.kv_cache import KVCache
from ringserve.engine.attention.model_inputs import PagedInputs
from ringserve.engine.attention.step import StepAttention

BLOCK_MULTIPLE = 256  # tokens
_EVERYTHING = (-1, -1)  # as a window: what a single query at the end sees; (-1, 0) would leave the decode's fast path


def is_paged() -> bool:
    """Whether this torch has varlen_attn, and that takes block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"block_table", "seqused_k", "num_splits", "window_size"} <= set(inspect.signature(varlen_attn).parameters)


class VarlenAttention:
    """An `engine.attention.base.Attention`. Layers with softcap or sinks go through the reference."""

    def __init__(self, inputs: PagedInputs, cache: KVCache) -> None:
        self._inputs, self._cache = inputs, cache
        device = inputs.slot_mapping.device
        num_decodes = inputs.num_decodes
        self._decode_starts = torch.arange(num_decodes + 1, dtype=torch.int32, device=device)
        counts, contexts = inputs.chunk_spans[:, 1], inputs.chunk_spans[:, 2]
        self._chunk_starts = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
        self._chunk_lengths = counts + contexts
        chunks = [] if inputs.batch is None else inputs.batch.chunks
        self._longest_chunk = max((chunk.end - chunk.start for chunk in chunks), default=0)
        self._reference: Attention | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Attend as `engine.attention.base.Attention` says."""
        inputs = self._inputs
        if not options.is_plain:
            assert inputs.batch is not None, "the reference cannot be recorded"
            self._reference = self._reference or StepAttention(inputs.batch, self._cache, query.device)
            return self._reference.attend(layer, query, key, value, options)
        self._cache.write(layer, inputs.slot_mapping, key, value)
        # A view: the cache has kv heads first, the kernel wants [num_blocks, block_size, kv_heads, dim] of any strides.
        keys, values = (tensor.permute(1, 2, 0, 3) for tensor in self._cache.layer(layer))
        window = None if options.sliding_window is None else options.sliding_window - 1  # positions before the own
        num_decodes = inputs.num_decodes
        parts = []
        if num_decodes:
            own = _Queries(query[:num_decodes], self._decode_starts, inputs.decode_lengths, inputs.block_tables, 1)
            parts.append(self._call(own, keys, values, _EVERYTHING if window is None else (window, 0), options))
        if self._longest_chunk:
            own = _Queries(
                query[num_decodes:], self._chunk_starts, self._chunk_lengths, inputs.chunk_tables, self._longest_chunk
            )
            parts.append(self._call(own, keys, values, (-1 if window is None else window, 0), options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _call(self, own: "_Queries", keys: Tensor, values: Tensor, window: tuple[int, int], options: Options) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        query, is_grouped = own.query, own.query.shape[1] != keys.shape[2]
        out = varlen_attn(
            query, keys, values, own.starts, None, own.longest, self._inputs.max_length,
            scale=options.scale(query.shape[-1]), window_size=window, enable_gqa=is_grouped,
            seqused_k=own.lengths, block_table=own.block_tables, num_splits=1,
        )  # fmt: skip
        assert isinstance(out, Tensor)  # it can return more, on demand
        return out


class _Queries(NamedTuple):
    """What decodes or chunks ask."""

    query: Tensor  # [num_rows, heads, key_dim]
    starts: Tensor  # [num_sequences + 1] int32, rows
    lengths: Tensor  # [num_sequences] int32, positions
    block_tables: Tensor  # [num_sequences, most blocks] int32
    longest: int  # rows of one sequence
