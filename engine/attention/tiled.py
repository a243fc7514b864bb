"""Attention that gives a token the same bits in any batch and however its prompt is cut: for --deterministic.

Each token stands in the tile of its block: always block_size rows, over the positions up to the end of that block. So
the shapes that a kernel sees depend on the token's own position alone. Slow: a decode pays for block_size rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ringserve.engine.attention.kernels import Options, attend, causal_bias
from ringserve.engine.attention.kv_cache import KVCache, begun_blocks
from ringserve.engine.schedule.batch import Batch


class _Tile(NamedTuple):
    start: int  # first row in the batch
    end: int  # row behind the last
    offset: int  # of the first row in its block
    block_table: Tensor  # [1, num_blocks], up to and with that block


class TiledAttention:
    """An `engine.attention.base.Attention`."""

    def __init__(self, batch: Batch, cache: KVCache, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._slot_mapping = torch.from_numpy(batch.slot_mapping).to(device)
        self._begun = begun_blocks(batch.slot_mapping, cache.block_size, device)
        self._tiles = _tiles(batch, cache.block_size, device)
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Attend as `engine.attention.base.Attention` says."""
        if self._begun is not None:
            self._cache.clear(layer, self._begun)
        self._cache.write(layer, self._slot_mapping, key, value)
        grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
        return torch.cat([self._attend_tile(layer, grouped, tile, options) for tile in self._tiles])

    def _attend_tile(self, layer: int, query: Tensor, tile: _Tile, options: Options) -> Tensor:
        keys, values = self._cache.gather(layer, tile.block_table)
        rows = query.new_zeros(self._cache.block_size, *query.shape[1:])
        own = slice(tile.offset, tile.offset + tile.end - tile.start)
        rows[own] = query[tile.start : tile.end]
        bias = self._bias(keys.shape[2], options.sliding_window, query.dtype)
        out = attend(rows.permute(1, 2, 0, 3).unsqueeze(1), keys, values, bias, options)
        return out.squeeze(1).permute(2, 0, 1, 3)[own].flatten(1, 2)

    def _bias(self, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """[1, block_size, length], for rows that stand at the last positions."""
        if (length, window) not in self._biases:
            self._biases[length, window] = causal_bias(self._cache.block_size, length, window, dtype, self._device)
        return self._biases[length, window]


def _tiles(batch: Batch, block_size: int, device: torch.device) -> list[_Tile]:
    """Cut the batch where a request or a block ends, in order of the rows."""
    tiles = []
    spans = [
        (row, row + 1, int(length) - 1, batch.block_tables[row]) for row, length in enumerate(batch.decode_lengths)
    ]
    spans += [(chunk.start, chunk.end, chunk.num_context, chunk.block_table) for chunk in batch.chunks]
    for start, end, position, block_table in spans:
        table = torch.from_numpy(block_table).to(device)[None]
        while start < end:
            block, offset = divmod(position, block_size)
            num_rows = min(block_size - offset, end - start)
            tiles.append(_Tile(start, start + num_rows, offset, table[:, : block + 1]))
            start, position = start + num_rows, position + num_rows
    return tiles
