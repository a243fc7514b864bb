import pytest
import torch

from engine.errors import EngineConfigError
from engine.kv_cache import KVCache, LayerShape, choose_num_slots

CPU = torch.device("cpu")


def test_gather_returns_what_was_written_by_layer_and_slot() -> None:
    shapes = {0: LayerShape((2, 4), (2, 4), torch.float32), 1: LayerShape((1, 3), (1, 5), torch.float16)}
    cache = KVCache(shapes, 6, CPU)
    for layer, shape in shapes.items():
        keys = torch.randn(3, *shape.key).to(shape.dtype)
        values = torch.randn(3, *shape.value).to(shape.dtype)
        cache.write(layer, torch.tensor([5, 1, 6]), keys, values)
        got_keys, got_values = cache.gather(layer, torch.tensor([[6, 5], [1, 0]]))
        assert got_keys.shape == (2, shape.key[0], 2, shape.key[1])
        assert got_values.shape == (2, shape.value[0], 2, shape.value[1])
        assert torch.equal(got_keys[0, :, 0], keys[2])
        assert torch.equal(got_values[0, :, 1], values[0])
        assert torch.equal(got_keys[1, :, 0], keys[1])
        assert not got_keys[1, :, 1].any()  # padding is finite


def test_the_cache_is_never_larger_than_all_seats_can_use() -> None:
    settings = {"token_bytes": 1024, "max_model_len": 100, "max_num_seqs": 4, "device": CPU}
    assert choose_num_slots(None, **settings) == 400  # type: ignore[arg-type]
    assert choose_num_slots(150, **settings) == 150  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "token_bytes"), [(99, 1), (None, 2**40)])
def test_a_cache_that_cannot_hold_one_full_request_is_refused(wanted: int | None, token_bytes: int) -> None:
    with pytest.raises(EngineConfigError, match="lower max_model_len, or raise kv_cache_tokens"):
        choose_num_slots(wanted, token_bytes=token_bytes, max_model_len=100, max_num_seqs=4, device=CPU)
