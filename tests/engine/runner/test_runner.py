import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ringserve.engine.attention.hook import ATTENTION_NAME
from ringserve.engine.attention.kv_cache import KVCache
from ringserve.engine.errors import EngineConfigError, ModelLoadError, UnsupportedModelError
from ringserve.engine.runner import make_runner
from ringserve.engine.runner.fused import FusedModel
from ringserve.engine.runner.hf import HfModel
from ringserve.engine.runner.paged import PagedRunner
from ringserve.engine.runner.placement import choose_device, choose_max_model_len
from ringserve.engine.schedule.batch import Batch, ChunkSpan

TinyModels = Callable[[str], Any]
RUNNERS = ("fused", "hf")


def load(tiny_model: TinyModels, name: str = "llama", **settings: Any) -> PagedRunner:
    runner = make_runner(tiny_model(name).config(**settings))
    assert isinstance(runner, PagedRunner)
    return runner


def prefill(last_rows: list[int]) -> Batch:
    ids = np.arange(5)
    none = np.empty(0, np.int64)
    chunk = ChunkSpan(0, 5, 0, np.array([1], np.int32))
    tables = np.empty((0, 0), np.int32)
    return Batch(ids, ids, ids + 32, tables, none, np.array(last_rows, np.int64), [chunk])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_those_of_the_last_rows_in_fp32(dtype: torch.dtype, runner: str, tiny_model: TinyModels) -> None:
    loaded = load(tiny_model, runner=runner, dtype=str(dtype).removeprefix("torch."))
    assert loaded.dtype == dtype
    logits = loaded.forward(prefill([4, 1, 4]))
    assert (logits.shape, logits.dtype) == ((3, 300), torch.float32)
    assert torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], logits[1])
    assert loaded.forward(prefill([])).shape == (0, 300)


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", FusedModel), ("smollm3", FusedModel), ("gemma2", HfModel), ("gpt2", HfModel)]
)
def test_the_llama_family_is_fused_and_others_are_run_by_transformers(
    name: str, kind: type, tiny_model: TinyModels
) -> None:
    assert isinstance(load(tiny_model, name).model, kind)


def test_a_runner_that_cannot_do_the_model_is_refused(tiny_model: TinyModels) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"runner is 'fused', which does not do .*model type 'gpt2' is none"
    ):
        load(tiny_model, "gpt2", runner="fused")


def test_a_fused_model_with_wrong_logits_is_run_by_transformers(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FusedModel, "_rotation", lambda _self, positions: torch.ones(len(positions), 1, 4) + 0j)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(tiny_model).model, HfModel)
    assert "the fused runner gives wrong logits for this model" in caplog.text
    with pytest.raises(UnsupportedModelError, match="gives other logits"):
        load(tiny_model, runner="fused")


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_dtype_is_the_checkpoints_unless_another_is_asked_for(runner: str, dtype: str, tiny_model: TinyModels) -> None:
    loaded = load(tiny_model, "qwen2", dtype=dtype, runner=runner)
    assert loaded.dtype == (torch.float32 if dtype == "auto" else getattr(torch, dtype))


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "doge"])
def test_an_architecture_with_its_own_attention_or_masks_is_refused_at_load(name: str, tiny_model: TinyModels) -> None:
    with pytest.raises(UnsupportedModelError, match=r"(Bloom|GPTNeo|Doge)ForCausalLM .*serve a decoder"):
        load(tiny_model, name, max_model_len=64)


def test_a_window_of_which_the_attention_is_not_told_limits_the_context(tiny_model: TinyModels) -> None:
    assert load(tiny_model, "phimoe").max_model_len == 40
    assert load(tiny_model, "phimoe", max_model_len=30).max_model_len == 30
    with pytest.raises(EngineConfigError, match="max_model_len is 41, this model goes up to 40"):
        load(tiny_model, "phimoe", max_model_len=41)
    assert load(tiny_model, "gemma2").max_model_len > 40


def test_a_model_that_looks_ahead_is_refused_at_load(tiny_model: TinyModels) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Bert\w+ gives other logits in a batch than alone"):
        load(tiny_model, "bert", max_model_len=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_attention_that_forgets_its_history_is_refused_at_load(
    runner: str, dtype: str, tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = KVCache.gather
    monkeypatch.setattr(KVCache, "gather", lambda self, layer, tables: gather(self, layer, tables * 0))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM gives other logits"):
        load(tiny_model, dtype=dtype, runner=runner)


@pytest.mark.parametrize("quantization", ["auto", "none", "int4"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_quantization_passes_the_check(runner: str, quantization: str, tiny_model: TinyModels) -> None:
    loaded = load(tiny_model, dtype="bfloat16", runner=runner, quantization=quantization)
    assert loaded.forward(prefill([4])).isfinite().all()


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_check_leaves_room_for_a_short_context(runner: str, tiny_model: TinyModels) -> None:
    loaded = load(tiny_model, max_model_len=4, max_num_seqs=1, runner=runner)
    assert (loaded.max_model_len, loaded.num_blocks, loaded.block_size) == (4, 2, 32)


def test_a_deterministic_model_with_experts_is_warned_of(
    tiny_model: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    load(tiny_model, "gemma2", deterministic=True)
    assert "experts" not in caplog.text
    load(tiny_model, "mixtral", deterministic=True)
    assert "MixtralForCausalLM has experts: for these --deterministic does not hold" in caplog.text


def test_the_registered_attention_is_all_that_transformers_is_told(tiny_model: TinyModels) -> None:
    model = load(tiny_model, runner="hf").model
    assert isinstance(model, HfModel)
    assert model._model.config._attn_implementation == ATTENTION_NAME


@pytest.fixture
def llama_copy(tiny_model: TinyModels, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(tiny_model("llama").path, path)
    return path


@pytest.mark.parametrize("runner", ["auto", "hf"])
class TestBrokenWeights:
    """However it is run, a broken directory is a ModelLoadError."""

    def test_missing_files(self, runner: str, llama_copy: Path, tiny_model: TinyModels) -> None:
        (llama_copy / "model.safetensors").unlink()
        with pytest.raises(ModelLoadError, match="holds no safetensors weights"):
            load(tiny_model, model=str(llama_copy), runner=runner)

    def test_damaged_file(self, runner: str, llama_copy: Path, tiny_model: TinyModels) -> None:
        (llama_copy / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
        with pytest.raises(ModelLoadError, match=r"cannot be (loaded|read)"):
            load(tiny_model, model=str(llama_copy), runner=runner)

    def test_missing_weight_is_not_replaced_by_a_random_one(
        self, runner: str, llama_copy: Path, tiny_model: TinyModels
    ) -> None:
        weights = load_file(llama_copy / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, llama_copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            load(tiny_model, model=str(llama_copy), runner=runner)

    def test_another_shape(self, runner: str, llama_copy: Path, tiny_model: TinyModels) -> None:
        weights = load_file(llama_copy / "model.safetensors")
        weights["model.norm.weight"] = torch.ones(16)
        save_file(weights, llama_copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=r"cannot be loaded|is \[16\], its config"):
            load(tiny_model, model=str(llama_copy), runner=runner)


def test_the_context_is_the_models_and_may_only_be_lowered() -> None:
    assert choose_max_model_len(None, [512, 600]) == 512
    assert choose_max_model_len(100, [512]) == 100
    assert choose_max_model_len(100, []) == 100
    with pytest.raises(EngineConfigError, match="max_model_len is 513, this model goes up to 512: lower"):
        choose_max_model_len(513, [512])
    with pytest.raises(EngineConfigError, match="names no context length: set max_model_len"):
        choose_max_model_len(None, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_an_error_with_the_remedy() -> None:
    assert choose_device("auto").type == "cpu"
    with pytest.raises(EngineConfigError, match="use 'cpu' or 'auto'"):
        choose_device("cuda")
