import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from engine.model_loader import context_limits, load_config


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
