import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine.errors import EngineConfigError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from engine.model_loader import choose_device, choose_max_model_len, load_config
from engine.runner import ModelRunner

TinyModels = Callable[[str], Any]


@pytest.fixture
def llama_copy(tiny_model: TinyModels, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(tiny_model("llama").path, path)
    return path


def _runner(tiny_model: TinyModels, path: Path) -> ModelRunner:
    return ModelRunner(tiny_model("llama").config(model=str(path)))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere is no directory: name a local Hugging Face model"):
        load_config(str(tmp_path / "nowhere"))


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("text", ["{not json", "{}", '{"model_type": "no_such_model"}'])
def test_a_config_that_cannot_be_read_is_a_load_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_config(str(tmp_path))


def test_a_model_that_generates_nothing_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    with pytest.raises(UnsupportedModelError, match="ViTModel is no causal language model"):
        load_config(str(tmp_path))


def test_missing_weight_files_are_a_load_error(llama_copy: Path, tiny_model: TinyModels) -> None:
    (llama_copy / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"weights of .* cannot be loaded"):
        _runner(tiny_model, llama_copy)


def test_damaged_weights_are_a_load_error(llama_copy: Path, tiny_model: TinyModels) -> None:
    (llama_copy / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        _runner(tiny_model, llama_copy)


def test_missing_weights_are_not_replaced_by_random_ones(llama_copy: Path, tiny_model: TinyModels) -> None:
    weights = load_file(llama_copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights \(model\.layers\.1\.mlp\.up_proj\.weight"):
        _runner(tiny_model, llama_copy)


def test_weights_of_another_shape_are_a_load_error(llama_copy: Path, tiny_model: TinyModels) -> None:
    weights = load_file(llama_copy / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(16)
    save_file(weights, llama_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        _runner(tiny_model, llama_copy)


def test_the_context_is_the_models_and_may_only_be_lowered() -> None:
    config = LlamaConfig(max_position_embeddings=512)
    assert choose_max_model_len(None, config) == 512
    assert choose_max_model_len(100, config) == 100
    with pytest.raises(EngineConfigError, match="max_model_len is 513, this model goes up to 512: lower"):
        choose_max_model_len(513, config)


def test_the_context_ends_where_one_request_would_change_its_mates_rope() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 128,
    }
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=512, rope_parameters=rope
    )
    assert choose_max_model_len(None, config) == 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_an_error_with_the_remedy() -> None:
    assert choose_device("auto").type == "cpu"
    with pytest.raises(EngineConfigError, match="use 'cpu' or 'auto'"):
        choose_device("cuda")
