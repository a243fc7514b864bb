import json
import pickle
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from ringserve.engine.config import EngineConfig
from ringserve.engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from ringserve.engine.runner.model_loader import context_limits, load_config, load_model


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere is no directory: name a local Hugging Face model"):
        load_config(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["{not json", "{}", '{"model_type": "no_such_model"}'])
def test_a_config_that_cannot_be_read_is_a_load_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_config(str(tmp_path))


def test_a_model_that_generates_nothing_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    with pytest.raises(UnsupportedModelError, match="ViTModel is no causal language model"):
        load_config(str(tmp_path))


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
    assert min(context_limits(config)) == 128


class Exploit:
    """Leaves a file when unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_pickled_weights_are_refused_and_never_loaded(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=64
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(trace)))
    with pytest.raises(ModelLoadError, match="never loaded"):
        load_model(EngineConfig(model=str(tmp_path)), load_config(str(tmp_path)), torch.device("cpu"))
    assert not trace.exists()


def test_a_models_own_code_is_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (tmp_path / "own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    with pytest.raises(UnsupportedModelError, match="never run"):
        load_config(str(tmp_path))
    assert not trace.exists()
