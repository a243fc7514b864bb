from typing import Any

import numpy as np
import pytest
import torch

from ringserve.engine.attention import kv_cache
from ringserve.engine.attention.kv_cache import KVCache, LayerShape, choose_num_blocks
from ringserve.engine.errors import EngineConfigError, NotEnoughMemoryError

CPU = torch.device("cpu")
SHAPES = {0: LayerShape(2, 4, 4, torch.float32), 1: LayerShape(1, 3, 5, torch.bfloat16)}
SIZES: dict[str, Any] = {"block_size": 8, "token_bytes": 1024, "max_model_len": 100, "max_num_seqs": 4, "device": CPU}


@pytest.mark.parametrize("layer", SHAPES)
def test_gather_returns_what_was_written_by_layer_and_block(layer: int) -> None:
    shape = SHAPES[layer]
    cache = KVCache(SHAPES, 6, 2, CPU)
    keys = torch.randn(3, shape.num_kv_heads, shape.key_dim).to(shape.dtype)
    values = torch.randn(3, shape.num_kv_heads, shape.value_dim).to(shape.dtype)
    cache.write(layer, torch.tensor([10, 11, 4]), keys, values)
    found_keys, found_values = cache.gather(layer, torch.tensor([[5, 2], [2, 0]], dtype=torch.int32))
    assert found_keys.shape == (shape.num_kv_heads, 2, 4, shape.key_dim)
    assert found_values.shape == (shape.num_kv_heads, 2, 4, shape.value_dim)
    for row, position, token in ((0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 2)):
        assert torch.equal(found_keys[:, row, position], keys[token])
        assert torch.equal(found_values[:, row, position], values[token])
    assert not found_keys[:, 1, 1:].any()  # what nobody wrote is finite


def test_begun_blocks_are_those_that_a_step_writes_from_their_start_and_not_to_their_end() -> None:
    slots = np.array([4, 5, 6, 7, 8, 9, 17, 20, 30, 31], np.int64)  # block 1 whole, 2 and 5 begun, 4 and 7 gone on with
    begun = kv_cache.begun_blocks(slots, 4, CPU)
    assert begun is not None
    assert begun.tolist() == [2, 5]
    assert kv_cache.begun_blocks(np.array([17, 4, 5, 6, 7], np.int64), 4, CPU) is None


def test_cleared_blocks_are_zero_in_their_layer_alone() -> None:
    cache = KVCache(SHAPES, 6, 2, CPU)
    for layer in SHAPES:
        for tensor in cache.layer(layer):
            tensor.fill_(float("nan"))
    cache.clear(0, torch.tensor([3]))
    for tensor in cache.layer(0):
        assert not tensor[:, 3].any()
        assert tensor[:, [0, 1, 2, 4, 5]].isnan().all()
    assert all(tensor.isnan().all() for tensor in cache.layer(1))


def test_copied_blocks_are_the_same_in_every_layer() -> None:
    cache = KVCache(SHAPES, 6, 2, CPU)
    for layer, shape in SHAPES.items():
        keys = torch.randn(2, shape.num_kv_heads, shape.key_dim).to(shape.dtype)
        cache.write(
            layer, torch.tensor([6, 7]), keys, torch.randn(2, shape.num_kv_heads, shape.value_dim).to(shape.dtype)
        )
    cache.copy_blocks([(3, 1), (3, 5)])
    for layer in SHAPES:
        for tensor in cache.gather(layer, torch.tensor([[3], [1], [5]])):
            assert tensor[:, 0].any()
            assert torch.equal(tensor[:, 0], tensor[:, 1])
            assert torch.equal(tensor[:, 0], tensor[:, 2])


def test_the_cache_is_never_larger_than_all_seats_can_use_and_has_a_block_for_padding() -> None:
    assert choose_num_blocks(None, **SIZES) == 1 + 4 * 13
    assert choose_num_blocks(150, **SIZES) == 1 + 19


def test_a_wanted_size_without_room_for_one_full_request_is_refused() -> None:
    with pytest.raises(EngineConfigError, match=r"kv_cache_tokens is 96, one request may have 100 \(max_model_len\)"):
        choose_num_blocks(96, **SIZES)


def test_too_little_memory_names_what_is_needed_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_bytes", lambda _device: 6 * 2**20)
    with pytest.raises(
        NotEnoughMemoryError, match=r"needs 98 MiB .* half of the free memory is 3 MiB: lower max_model"
    ):
        choose_num_blocks(None, **SIZES | {"token_bytes": 2**20, "max_model_len": 98})
