"""Attention over the paged cache by Triton kernels of our own: nothing is gathered, nothing is padded to the longest.

Imported only where Triton is there, which comes with torch for CUDA. Tested without a GPU: in Triton's interpreter
(TRITON_INTERPRET=1) in fp32 and fp16, and by compiling for compute capability 9.0. They have not been run on a GPU yet.

Two kernels share one loop. A decode's history is cut into parts that run at once and are put together by a third
kernel. A chunk's queries go in tiles, the heads that share a kv head beside each other, over context and chunk alike.

Sources: FlashAttention-2, Dao, 2023 (the loop); Flash-Decoding, Dao et al., 2023 (the parts); vLLM's unified Triton
attention (queries and heads in one tile).
"""

# ruff: noqa: N803 - what a kernel is compiled for is in capitals, in every Triton program
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ringserve.engine.attention.kernels import Options
from ringserve.engine.attention.kv_cache import KVCache
from ringserve.engine.attention.model_inputs import PagedInputs
from ringserve.engine.transfer import send

_MIN_SIDE = 16  # of a matrix that tl.dot takes
_TILE_ROWS = 64  # queries times heads of one kv head in a tile of a chunk
_TILE_BYTES = 16 * 1024  # of the keys that a loop's turn loads; some turns are under way at once
_MAX_SPLITS = 16  # parts of a decode's history
_PROCESSORS = 132  # a GPU's, or an estimate of it where there is none


class TritonAttention:
    """An `engine.attention.base.Attention`, for every option and dtype. Without a wait for the device."""

    def __init__(self, inputs: PagedInputs, cache: KVCache) -> None:
        self._inputs, self._cache = inputs, cache
        self._tiles: dict[int, Tensor] = {}  # by queries in a tile, which depend on a layer's heads

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Attend as `engine.attention.base.Attention` says."""
        inputs = self._inputs
        self._cache.write(layer, inputs.slot_mapping, key, value)
        keys, values = self._cache.layer(layer)
        out = query.new_empty(len(query), query.shape[1], values.shape[-1])
        if query.stride(-1) != 1:
            query = query.contiguous()
        if inputs.num_decodes:
            attend_decodes(query, keys, values, inputs.block_tables, inputs.decode_lengths, options, out)
        if len(inputs.chunk_spans):
            queries = max(1, _TILE_ROWS // (query.shape[1] // len(keys)))
            if queries not in self._tiles:
                self._tiles[queries] = _cut(inputs, queries)
            tiles = self._tiles[queries], queries
            attend_chunks(query, keys, values, inputs.chunk_tables, inputs.chunk_spans, tiles, options, out)
        return out


def _cut(inputs: PagedInputs, num_queries: int) -> Tensor:
    """Return each tile's chunk and first query in it, [num_tiles, 2] int32."""
    assert inputs.batch is not None
    tiles = [
        (index, first)
        for index, chunk in enumerate(inputs.batch.chunks)
        for first in range(0, chunk.end - chunk.start, num_queries)
    ]
    return send((np.array(tiles, np.int32),), inputs.slot_mapping.device)[0]


def attend_decodes(
    query: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, lengths: Tensor, options: Options, out: Tensor
) -> None:
    """Let each decode's one token look at its history.

    The number of parts does not depend on the lengths, so a recorded step stays right while they grow.

    Args:
        query: [num_tokens, heads, key_dim], the decodes first; the last dimension contiguous.
        keys: [kv_heads, num_blocks, block_size, key_dim].
        values: Likewise with value_dim.
        block_tables: [num_decodes, most blocks] int32.
        lengths: [num_decodes] int32.
        options: The layer's.
        out: [num_tokens, heads, value_dim], whose first rows are written.
    """
    num_decodes, (_, num_heads, key_dim) = len(lengths), query.shape
    num_kv_heads, _, _, value_dim = values.shape
    group = num_heads // num_kv_heads
    num_splits = choose_num_splits(num_decodes * num_kv_heads, _num_processors(query.device))
    width_v = _side(value_dim)
    partial = query.new_empty(num_decodes, num_heads, num_splits, width_v, dtype=torch.float32)
    states = query.new_empty(num_decodes, num_heads, num_splits, 2, dtype=torch.float32)
    _decode_kernel[(num_decodes, num_kv_heads, num_splits)](
        query, keys, values, block_tables, lengths, partial, states,
        query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3], block_tables.stride(0),
        options.scale(key_dim), options.softcap or 0.0, options.sliding_window or 0,
        GROUP=group, NUM_SPLITS=num_splits, BLOCK_M=_side(group), BLOCK_V=width_v,
        **_constants(keys, values, options),
    )  # fmt: skip
    sinks = options.sinks
    _reduce_kernel[(num_decodes, num_heads)](
        partial, states, states if sinks is None else sinks, out, out.stride(0), out.stride(1),
        HAS_SINKS=sinks is not None, NUM_SPLITS=num_splits, VALUE_DIM=value_dim, BLOCK_V=width_v,
    )  # fmt: skip


def attend_chunks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    spans: Tensor,
    tiles: tuple[Tensor, int],
    options: Options,
    out: Tensor,
) -> None:
    """Let each token of each chunk look at what stands before it and at itself.

    Args:
        query: As for decodes, and so are keys, values, options.
        keys: See there.
        values: See there.
        block_tables: [num_chunks, most blocks] int32.
        spans: [num_chunks, 3] int32: first row, number of rows, tokens before the chunk.
        tiles: [num_tiles, 2] int32: chunk, and first query in it; and how many queries a tile has.
        options: See there.
        out: [num_tokens, heads, value_dim], whose rows of chunks are written.
    """
    num_kv_heads, _, _, value_dim = values.shape
    group = query.shape[1] // num_kv_heads
    starts, num_queries = tiles
    sinks = options.sinks
    _chunk_kernel[(len(starts), num_kv_heads)](
        query, keys, values, block_tables, spans, starts, starts if sinks is None else sinks, out,
        query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3], block_tables.stride(0),
        out.stride(0), out.stride(1),
        options.scale(query.shape[2]), options.softcap or 0.0, options.sliding_window or 0,
        HAS_SINKS=sinks is not None, GROUP=group, NUM_QUERIES=num_queries, BLOCK_M=_side(num_queries * group),
        BLOCK_V=_side(value_dim), **_constants(keys, values, options),
    )  # fmt: skip


def choose_num_splits(num_programs: int, num_processors: int) -> int:
    """Return into how many parts each history is cut, a power of two: enough to keep the processors busy twice over."""
    num_splits = 1
    while num_splits < _MAX_SPLITS and num_splits * num_programs < 2 * num_processors:
        num_splits *= 2
    return num_splits


def _constants(keys: Tensor, values: Tensor, options: Options) -> dict[str, Any]:
    """What both kernels are compiled for."""
    width = _side(keys.shape[-1])
    positions = _TILE_BYTES // (width * keys.element_size())
    return {
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_WINDOW": options.sliding_window is not None,
        "KEY_DIM": keys.shape[-1],
        "VALUE_DIM": values.shape[-1],
        "BLOCK_SIZE": keys.shape[2],
        "BLOCK_K": width,
        "BLOCK_N": min(max(positions, _MIN_SIDE), 64),
    }


def _side(size: int) -> int:
    return max(_MIN_SIDE, int(triton.next_power_of_2(size)))


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _accumulate(
    q, positions, first, last, highest, total, acc, keys, values, table,
    stride_kb, stride_kt, stride_vb, stride_vt, scale, softcap, window,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Take in the keys and values at positions first to last - 1.

    q [BLOCK_M, BLOCK_K] sees a key up to its own position; `highest`, `total` [BLOCK_M] and `acc` [BLOCK_M, BLOCK_V]
    are the softmax's running maximum, sum and weighted values, all fp32; the new ones are returned.
    """
    columns = tl.arange(0, BLOCK_N)
    dims_k = tl.arange(0, BLOCK_K)
    dims_v = tl.arange(0, BLOCK_V)
    for start in range(first, last, BLOCK_N):
        at = start + columns
        is_inside = at < last
        block = tl.load(table + at // BLOCK_SIZE, mask=is_inside, other=0).to(tl.int64)
        offset = at % BLOCK_SIZE
        k = tl.load(
            keys + block[None, :] * stride_kb + offset[None, :] * stride_kt + dims_k[:, None],
            mask=is_inside[None, :] & (dims_k[:, None] < KEY_DIM),
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:  # tanh by its definition, since not every Triton has it
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        is_seen = is_inside[None, :] & (at[None, :] <= positions[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (at[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet: no -inf - -inf
        weights = tl.exp(scores - shift[:, None])
        faded = tl.exp(highest - shift)
        total = total * faded + tl.sum(weights, 1)
        v = tl.load(
            values + block[:, None] * stride_vb + offset[:, None] * stride_vt + dims_v[None, :],
            mask=is_inside[:, None] & (dims_v[None, :] < VALUE_DIM),
            other=0.0,
        )
        acc = acc * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    return highest, total, acc


@triton.jit
def _decode_kernel(
    query, keys, values, block_tables, lengths, partial, states,
    stride_qr, stride_qh, stride_kh, stride_kb, stride_kt, stride_vh, stride_vb, stride_vt, stride_tr,
    scale, softcap, window,
    GROUP: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One part of one decode's history, for the heads of one kv head."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - first, NUM_SPLITS), BLOCK_N) * BLOCK_N
    begin = first + split * part
    end = tl.minimum(begin + part, length)
    heads = tl.arange(0, BLOCK_M)
    dims_k = tl.arange(0, BLOCK_K)
    is_head = heads < GROUP
    q = tl.load(
        query + row * stride_qr + (kv_head * GROUP + heads[:, None]) * stride_qh + dims_k[None, :],
        mask=is_head[:, None] & (dims_k[None, :] < KEY_DIM),
        other=0.0,
    )
    positions = tl.zeros([BLOCK_M], tl.int32) + length - 1
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    highest, total, acc = _accumulate(
        q, positions, begin, end, highest, total, acc,
        keys + kv_head * stride_kh, values + kv_head * stride_vh, block_tables + row * stride_tr,
        stride_kb, stride_kt, stride_vb, stride_vt, scale, softcap, window,
        HAS_SOFTCAP, HAS_WINDOW, KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_K, BLOCK_N, BLOCK_V,
    )  # fmt: skip
    num_heads = tl.num_programs(1) * GROUP
    place = (row * num_heads + kv_head * GROUP + heads) * NUM_SPLITS + split
    tl.store(states + place * 2, highest, mask=is_head)
    tl.store(states + place * 2 + 1, total, mask=is_head)
    dims_v = tl.arange(0, BLOCK_V)
    tl.store(partial + place[:, None] * BLOCK_V + dims_v[None, :], acc, mask=is_head[:, None])


@triton.jit
def _reduce_kernel(
    partial, states, sinks, out, stride_or, stride_oh,
    HAS_SINKS: tl.constexpr, NUM_SPLITS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Put the parts of one decode's head together."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_V)
    place = (row * tl.num_programs(1) + head) * NUM_SPLITS + splits
    highest = tl.load(states + place * 2)  # -inf for a part without positions; the last position is in some part
    totals = tl.load(states + place * 2 + 1)
    acc = tl.load(partial + place[:, None] * BLOCK_V + dims[None, :])
    shift = tl.max(highest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        shift = tl.maximum(shift, sink)
    scales = tl.exp(highest - shift)
    total = tl.sum(totals * scales, 0)
    if HAS_SINKS:
        total += tl.exp(sink - shift)
    result = tl.sum(acc * scales[:, None], 0) / total
    tl.store(out + row * stride_or + head * stride_oh + dims, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def _chunk_kernel(
    query, keys, values, block_tables, spans, tiles, sinks, out,
    stride_qr, stride_qh, stride_kh, stride_kb, stride_kt, stride_vh, stride_vb, stride_vt, stride_tr,
    stride_or, stride_oh, scale, softcap, window,
    HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, NUM_QUERIES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """NUM_QUERIES queries of one chunk, for the heads of one kv head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    chunk = tl.load(tiles + tile * 2).to(tl.int64)
    first_query = tl.load(tiles + tile * 2 + 1)
    start = tl.load(spans + chunk * 3).to(tl.int64)
    count = tl.load(spans + chunk * 3 + 1)
    context = tl.load(spans + chunk * 3 + 2)
    rows = tl.arange(0, BLOCK_M)
    dims_k = tl.arange(0, BLOCK_K)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < NUM_QUERIES * GROUP) & (queries < count)
    q = tl.load(
        query + (start + queries)[:, None] * stride_qr + heads[:, None] * stride_qh + dims_k[None, :],
        mask=is_row[:, None] & (dims_k[None, :] < KEY_DIM),
        other=0.0,
    )
    end = context + tl.minimum(first_query + NUM_QUERIES, count)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context + first_query + 1 - window, 0)
    if HAS_SINKS:
        highest = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32) + 1.0
    else:
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    highest, total, acc = _accumulate(
        q, context + queries, begin, end, highest, total, acc,
        keys + kv_head * stride_kh, values + kv_head * stride_vh, block_tables + chunk * stride_tr,
        stride_kb, stride_kt, stride_vb, stride_vt, scale, softcap, window,
        HAS_SOFTCAP, HAS_WINDOW, KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_K, BLOCK_N, BLOCK_V,
    )  # fmt: skip
    dims_v = tl.arange(0, BLOCK_V)
    tl.store(
        out + (start + queries)[:, None] * stride_or + heads[:, None] * stride_oh + dims_v[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=is_row[:, None] & (dims_v[None, :] < VALUE_DIM),
    )
