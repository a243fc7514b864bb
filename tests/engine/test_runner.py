from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.errors import UnsupportedModelError
from engine.runner import ModelRunner

TinyModels = Callable[[str], Any]


def test_logits_are_those_of_the_last_rows_in_fp32(tiny_model: TinyModels) -> None:
    runner = ModelRunner(tiny_model("llama").config(dtype="bfloat16"))
    assert runner.dtype == torch.bfloat16
    ids, slots = np.arange(5), np.arange(1, 6)
    none = np.empty(0, np.int64)
    logits = runner.forward(Batch(ids, ids, slots, none.reshape(0, 0), none, [(0, 5)], np.array([4])))
    assert (logits.shape, logits.dtype) == ((1, 300), torch.float32)


def test_a_step_that_samples_nothing_gives_no_rows(tiny_model: TinyModels) -> None:
    runner = ModelRunner(tiny_model("llama").config())
    ids, slots = np.arange(5), np.arange(1, 6)
    none = np.empty(0, np.int64)
    logits = runner.forward(Batch(ids, ids, slots, none.reshape(0, 0), none, [(0, 5)], none))
    assert logits.shape == (0, 300)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_dtype_is_the_checkpoints_unless_another_is_asked_for(dtype: str, tiny_model: TinyModels) -> None:
    runner = ModelRunner(tiny_model("qwen2").config(dtype=dtype))
    assert runner.dtype == (torch.float32 if dtype == "auto" else getattr(torch, dtype))


def test_an_architecture_with_its_own_attention_is_refused_at_load(tiny_model: TinyModels) -> None:
    with pytest.raises(UnsupportedModelError, match=r"BloomForCausalLM .*serve a decoder"):
        ModelRunner(tiny_model("bloom").config(max_model_len=64))


def test_a_model_that_looks_ahead_is_refused_at_load(tiny_model: TinyModels, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Bert\w+ gives other logits in a batch than alone"):
        ModelRunner(tiny_model("bert").config(max_model_len=64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_attention_that_forgets_its_history_is_refused_at_load(
    dtype: str, tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kv_cache import KVCache

    gather = KVCache.gather
    monkeypatch.setattr(KVCache, "gather", lambda self, layer, slots: gather(self, layer, slots * 0))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM gives other logits"):
        ModelRunner(tiny_model("llama").config(dtype=dtype))


def test_the_check_leaves_room_for_a_short_context(tiny_model: TinyModels) -> None:
    runner = ModelRunner(tiny_model("gpt2").config(max_model_len=4, max_num_seqs=1))
    assert (runner.max_model_len, runner.num_slots) == (4, 4)
