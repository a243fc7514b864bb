"""Keys and values of every computed token, by layer and slot: the tensors. slot_pool.py knows whose they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import EngineConfigError
from engine.slot_pool import PADDING_SLOT

_MEMORY_SHARE = 0.5  # of what is free once the weights are there; activations and other processes need the rest


@dataclass(slots=True, frozen=True)
class LayerShape:
    """What one layer keeps of one token, as seen in a forward of the model: layers may differ."""

    key: tuple[int, int]  # num_kv_heads, head_dim
    value: tuple[int, int]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes for one token."""
        return (self.key[0] * self.key[1] + self.value[0] * self.value[1]) * self.dtype.itemsize


class KVCache:
    """One tensor of keys and one of values a layer, [num_slots + 1, num_kv_heads, head_dim], token-major.

    Token-major, so that a gather copies whole rows. On CPUs memory becomes real only when it is written.
    """

    def __init__(self, shapes: Mapping[int, LayerShape], num_slots: int, device: torch.device) -> None:
        def make(shape: LayerShape, row: tuple[int, int]) -> Tensor:
            tensor = torch.empty((num_slots + 1, *row), dtype=shape.dtype, device=device)
            tensor[PADDING_SLOT] = 0  # a masked NaN would still be a NaN: its weight is 0, and 0 * NaN is NaN
            return tensor

        self._keys = {layer: make(shape, shape.key) for layer, shape in shapes.items()}
        self._values = {layer: make(shape, shape.value) for layer, shape in shapes.items()}

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Put this step's keys and values, [num_tokens, num_kv_heads, head_dim], into their slots [num_tokens]."""
        self._keys[layer].index_copy_(0, slot_mapping, key)
        self._values[layer].index_copy_(0, slot_mapping, value)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy out the keys and values of slots [num_rows, length], as [num_rows, num_kv_heads, length, head_dim]."""
        keys, values = self._keys[layer], self._values[layer]
        flat = slots.flatten()
        return (
            keys.index_select(0, flat).view(*slots.shape, *keys.shape[1:]).transpose(1, 2),
            values.index_select(0, flat).view(*slots.shape, *values.shape[1:]).transpose(1, 2),
        )


def choose_num_slots(
    wanted: int | None, *, token_bytes: int, max_model_len: int, max_num_seqs: int, device: torch.device
) -> int:
    """Return how many tokens the cache is to hold: `wanted`, or what half of the free memory allows.

    Raises:
        EngineConfigError: If not even one request of max_model_len tokens would fit.
    """
    usable = max_model_len * max_num_seqs
    affordable = int(_free_bytes(device) * _MEMORY_SHARE) // token_bytes if wanted is None else wanted
    num_slots = min(usable, affordable)
    if num_slots < max_model_len:
        raise EngineConfigError(
            f"the KV cache holds {num_slots} tokens ({token_bytes} bytes each), max_model_len is {max_model_len}: "
            "lower max_model_len, or raise kv_cache_tokens"
        )
    return num_slots


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EngineConfigError("/proc/meminfo does not say how much memory is free: set kv_cache_tokens")
