"""Keys and values of every computed token, by layer and block: the tensors. block_pool.py knows whose they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringserve.engine.errors import EngineConfigError, NotEnoughMemoryError
from ringserve.engine.memory import free_bytes
from ringserve.engine.transfer import send

_MEMORY_SHARE = 0.5  # of what is free once the weights are there; activations and other processes need the rest


@dataclass(slots=True, frozen=True)
class LayerShape:
    """What one layer keeps of one token, as seen in a forward of the model: layers may differ."""

    num_kv_heads: int
    key_dim: int  # numbers of one head's key
    value_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes for one token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """One tensor of keys and one of values a layer, [num_kv_heads, num_blocks, block_size, key_dim or value_dim].

    Heads come first, so that a gather of blocks gives each head's history in one piece, which is what a batched matrix
    product wants: with tokens first the products of a decode step are much slower on CPUs.
    """

    def __init__(
        self, shapes: Mapping[int, LayerShape], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size, self._device = num_blocks, block_size, device
        self._keys = {
            layer: _zeros((shape.num_kv_heads, num_blocks, block_size, shape.key_dim), shape.dtype, device)
            for layer, shape in shapes.items()
        }
        self._values = {
            layer: _zeros((shape.num_kv_heads, num_blocks, block_size, shape.value_dim), shape.dtype, device)
            for layer, shape in shapes.items()
        }

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values, [num_kv_heads, num_blocks, block_size, key_dim or value_dim]."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Put this step's keys and values into their slots.

        Args:
            layer: Whose.
            slot_mapping: [num_tokens] int64, block_id * block_size + offset, no duplicates.
            key: [num_tokens, num_kv_heads, key_dim].
            value: [num_tokens, num_kv_heads, value_dim].
        """
        self._keys[layer].flatten(1, 2).index_copy_(1, slot_mapping, key.transpose(0, 1))
        self._values[layer].flatten(1, 2).index_copy_(1, slot_mapping, value.transpose(0, 1))

    def clear(self, layer: int, block_ids: Tensor) -> None:
        """Fill one layer's blocks, [num_blocks] int64, with zeros."""
        self._keys[layer].index_fill_(1, block_ids, 0.0)
        self._values[layer].index_fill_(1, block_ids, 0.0)

    def gather(self, layer: int, block_tables: Tensor) -> tuple[Tensor, Tensor]:
        """Copy out the keys and values of whole blocks.

        Args:
            layer: Whose.
            block_tables: [num_rows, length] int32 or int64.

        Returns:
            Keys and values, [num_kv_heads, num_rows, length * block_size, key_dim or value_dim].
        """
        blocks = block_tables.flatten()
        keys, values = self._keys[layer].index_select(1, blocks), self._values[layer].index_select(1, blocks)
        rows = (len(keys), len(block_tables), -1)
        return keys.view(*rows, keys.shape[-1]), values.view(*rows, values.shape[-1])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of every layer, (source, destination) each; no destination is a source."""
        (sent,) = send((np.array(pairs),), self._device)
        sources, destinations = sent.long().T
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[:, destinations] = tensor[:, sources]


def begun_blocks(slot_mapping: NDArray[np.int64], block_size: int, device: torch.device) -> Tensor | None:
    """Return the blocks of which a step writes the first slot and not the last, None if there are none.

    What is behind the written slots is from whoever had the block before, and may be infinite or NaN. Attention that
    reads whole blocks has to clear them: what a mask hides is still multiplied by 0.
    """
    blocks, offsets = np.divmod(slot_mapping, block_size)
    begun = np.setdiff1d(blocks[offsets == 0], blocks[offsets == block_size - 1])
    return torch.from_numpy(begun).to(device) if len(begun) else None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because what a mask hides is still multiplied by 0, and 0 * NaN is NaN.

    On CPUs they come from calloc: memory becomes real only when it is written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = np.zeros(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)


def choose_num_blocks(
    wanted_tokens: int | None,
    *,
    block_size: int,
    token_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    device: torch.device,
) -> int:
    """Return how many blocks the cache is to have, the padding block included.

    That is room for `wanted_tokens`, or for what half of the free memory holds; never more than all seats can use.

    Raises:
        EngineConfigError: If `wanted_tokens` has no room for one request of max_model_len tokens.
        NotEnoughMemoryError: If the memory has none.
    """
    blocks_a_request = -(-max_model_len // block_size)
    usable = blocks_a_request * max_num_seqs
    if wanted_tokens is not None:
        num_blocks = min(usable, -(-wanted_tokens // block_size))
        if num_blocks < blocks_a_request:
            raise EngineConfigError(
                f"kv_cache_tokens is {wanted_tokens}, one request may have {max_model_len} (max_model_len): "
                "raise the one or lower the other"
            )
        return 1 + num_blocks
    free = free_bytes(device)
    num_blocks = min(usable, int(free * _MEMORY_SHARE) // (token_bytes * block_size))
    if num_blocks < blocks_a_request:
        raise NotEnoughMemoryError(
            f"a request of {max_model_len} tokens (max_model_len) needs {_mib(max_model_len * token_bytes)} "
            f"of KV cache ({token_bytes} bytes a token), and half of the free memory is {_mib(free * _MEMORY_SHARE)}: "
            "lower max_model_len, free memory, or set kv_cache_tokens"
        )
    return 1 + num_blocks


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
