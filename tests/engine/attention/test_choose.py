import logging

import pytest
import torch
from torch import Tensor

from ringserve.engine.attention import choose
from ringserve.engine.attention.base import Attention
from ringserve.engine.attention.choose import (
    REFERENCE,
    Backend,
    choose_backend,
    make_batch,
    options_to_check,
    relative_error,
)
from ringserve.engine.attention.kernels import Options
from ringserve.engine.attention.kv_cache import KVCache, LayerShape
from ringserve.engine.attention.model_inputs import PagedInputs

CPU = torch.device("cpu")
SHAPE = LayerShape(2, 16, 8, torch.float32)


class Broken:
    """The reference, but for a thousandth."""

    def __init__(self, inputs: PagedInputs, cache: KVCache) -> None:
        self._inner = REFERENCE.make(inputs, cache)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        return self._inner.attend(layer, query, key, value, options) + 1e-3


def raising(_inputs: PagedInputs, _cache: KVCache) -> Attention:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reference_agrees_with_itself_in_fp32_within_the_tolerances(dtype: torch.dtype) -> None:
    shape = LayerShape(2, 16, 8, dtype)
    for options in options_to_check(6, CPU):
        assert relative_error(REFERENCE, shape, 3, options, 32, CPU) < 1


def test_the_first_candidate_that_agrees_is_taken_and_the_others_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = REFERENCE._replace(name="good")
    found = [Backend("broken", Broken, True), Backend("raising", raising, True), good, Backend("later", raising, True)]
    monkeypatch.setattr(choose, "candidates", lambda _block_size: iter(found))
    with caplog.at_level(logging.INFO):
        assert choose_backend([SHAPE, SHAPE], 32, CPU) is good
    messages = [record.getMessage() for record in caplog.records]
    assert "attention by broken is wrong here, by 10 times the tolerance" in messages[0]
    assert "raising cannot be used: RuntimeError: no kernel image" in messages[1]
    assert len(messages) == 3


def test_without_one_that_agrees_it_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "candidates", lambda _block_size: iter([Backend("broken", Broken, True)]))
    assert choose_backend([SHAPE], 32, CPU) is REFERENCE


@pytest.mark.parametrize("block_size", [4, 32, 256])
def test_the_batch_that_is_run_gives_every_token_a_slot_of_its_own(block_size: int) -> None:
    batch, num_blocks = make_batch(block_size)
    assert len(set(batch.slot_mapping.tolist())) == len(batch.positions) == batch.chunks[-1].end
    assert block_size <= batch.slot_mapping.min()
    assert batch.slot_mapping.max() < num_blocks * block_size
