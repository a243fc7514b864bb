"""One step's attention over the paged KV cache: every token looks at its own request.

The reference backend, in torch operations: right on every device and for every option, fast on CPUs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringserve.engine.attention.kernels import Options, attend, causal_bias, hide
from ringserve.engine.attention.kv_cache import KVCache, LayerShape, begun_blocks
from ringserve.engine.schedule.batch import Batch, ChunkSpan

# Rows of a chunk that attend at once. No row looks at keys behind the last of them, so half of the work falls away.
_CHUNK_ROWS = 128
_MAX_PADDING = 64  # blocks of padding in a group of decodes that are not worth a group more


@dataclass(slots=True, frozen=True)
class _DecodeGroup:
    """Decodes whose histories are of about the same length, gathered and padded to the longest of them."""

    rows: Tensor | None  # [num_rows] int64, which of the batch's; None: all of them
    block_tables: Tensor  # [num_rows, longest]
    lengths: NDArray[np.int64]  # [num_rows], positions that count


class StepAttention:
    """An `engine.attention.base.Attention`."""

    def __init__(self, batch: Batch, cache: KVCache | None, device: torch.device) -> None:
        self.shapes: dict[int, LayerShape] = {}  # of the layers that have run
        self._device = device
        self._cache = cache  # None: nothing is kept, for chunks without context
        self._num_decodes = batch.num_decodes
        self._slot_mapping = torch.from_numpy(batch.slot_mapping).to(device)
        self._begun = None if cache is None else begun_blocks(batch.slot_mapping, cache.block_size, device)
        self._groups = _decode_groups(batch, device) if batch.num_decodes else []
        self._chunks = batch.chunks
        self._chunk_tables = [torch.from_numpy(chunk.block_table).to(device)[None] for chunk in batch.chunks]
        self._biases: dict[tuple[int | None, ...], Tensor | None] = {}  # the same for every layer of one kind

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Attend as `engine.attention.base.Attention` says."""
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.dtype)
        if self._cache is not None:
            if self._begun is not None:
                self._cache.clear(layer, self._begun)
            self._cache.write(layer, self._slot_mapping, key, value)
        grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
        parts = []
        if self._num_decodes:
            parts.append(self._decodes(layer, grouped[: self._num_decodes], options))
        for index, chunk in enumerate(self._chunks):
            own = slice(chunk.start, chunk.end)
            if chunk.num_context:
                assert self._cache is not None
                keys, values = self._cache.gather(layer, self._chunk_tables[index])
            else:
                keys = key[own].transpose(0, 1).contiguous().unsqueeze(1)
                values = value[own].transpose(0, 1).contiguous().unsqueeze(1)
            parts += self._chunk(grouped[own], keys, values, chunk, options)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decodes(self, layer: int, query: Tensor, options: Options) -> Tensor:
        """Return [num_decodes, heads, value_dim] for a query of [num_decodes, kv_heads, group, key_dim]."""
        assert self._cache is not None
        parts = []
        for index, group in enumerate(self._groups):
            own = query if group.rows is None else query.index_select(0, group.rows)
            keys, values = self._cache.gather(layer, group.block_tables)
            if len(group.lengths) == 1:  # several rows cut to length would be copied once more, for they have gaps then
                keys, values = keys[:, :, : group.lengths[0]], values[:, :, : group.lengths[0]]
            bias = self._decode_bias(index, keys.shape[2], options.sliding_window, query.dtype)
            out = attend(own.transpose(0, 1).unsqueeze(3), keys, values, bias, options)
            parts.append(out.squeeze(3).transpose(0, 1).flatten(1, 2))
        if len(parts) == 1:
            return parts[0]
        out = torch.empty_like(torch.cat(parts))
        for group, part in zip(self._groups, parts, strict=True):
            out[group.rows] = part
        return out

    def _decode_bias(self, index: int, width: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[num_rows, 1, width], or None where every position counts."""
        kind = (index, window)
        if kind not in self._biases:
            lengths = self._groups[index].lengths
            positions = np.arange(width)
            hidden = positions >= lengths[:, None]
            if window is not None:
                hidden |= positions < lengths[:, None] - window
            bias = hide(torch.from_numpy(hidden[:, None]).to(self._device), dtype) if hidden.any() else None
            self._biases[kind] = bias
        return self._biases[kind]

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkSpan, options: Options) -> list[Tensor]:
        """Return parts of [rows, heads, value_dim] for a query of [num_tokens, kv_heads, group, key_dim]."""
        parts = []
        window = options.sliding_window
        for start in range(0, len(query), _CHUNK_ROWS):
            rows = query[start : start + _CHUNK_ROWS]
            end = chunk.num_context + start + len(rows)  # the positions that these rows see
            first = 0 if window is None else max(0, end - len(rows) + 1 - window)
            bias = self._chunk_bias(len(rows), end - first, window, query.dtype)
            out = attend(
                rows.permute(1, 2, 0, 3).unsqueeze(1), keys[:, :, first:end], values[:, :, first:end], bias, options
            )
            parts.append(out.squeeze(1).permute(2, 0, 1, 3).flatten(1, 2))
        return parts

    def _chunk_bias(self, num_rows: int, num_positions: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[1, num_rows, width] for the last `width` positions; None where a single row sees all."""
        width = num_rows if window is None else num_positions
        kind = (-1, num_rows, width, window)
        if kind not in self._biases:
            sees_all = num_rows == 1 and window is None
            self._biases[kind] = None if sees_all else causal_bias(num_rows, width, window, dtype, self._device)
        return self._biases[kind]


def _decode_groups(batch: Batch, device: torch.device) -> list[_DecodeGroup]:
    """Split the decodes where padding them to the longest would be much more work than they are."""
    tables, lengths = torch.from_numpy(batch.block_tables).to(device), batch.decode_lengths
    sizes = np.count_nonzero(batch.block_tables, axis=1)  # no request holds block 0
    parts = _split(np.arange(len(sizes)), sizes)
    if len(parts) == 1:
        return [_DecodeGroup(None, tables, lengths)]
    groups = []
    for rows in parts:
        index = torch.from_numpy(rows).to(device)
        groups.append(_DecodeGroup(index, tables[index, : int(sizes[rows].max())], lengths[rows]))
    return groups


def _split(rows: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Halve the longest until no part is padded by more than half of its blocks, or by no more than _MAX_PADDING."""
    own = sizes[rows]
    longest = int(own.max())
    padding = longest * len(own) - int(own.sum())
    if padding <= max(_MAX_PADDING, int(own.sum()) // 2):
        return [rows]
    is_short = own <= longest // 2
    if not is_short.any():
        return [rows]
    return _split(rows[is_short], sizes) + _split(rows[~is_short], sizes)
