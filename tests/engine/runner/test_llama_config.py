from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config, SmolLM3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ringserve.engine.runner.llama_config import UnsuitedError, parse_llama_config

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def saved(**changes: Any) -> dict[str, Any]:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32, num_hidden_layers=3, **changes)
    return config.to_dict()


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, LLAMA3_ROPE])
def test_scaled_rotary_frequencies_are_transformers(rope: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32, rope_parameters=rope)
    wanted, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(parse_llama_config(config.to_dict()).inverse_frequencies, wanted)


def test_the_spellings_of_transformers_4_mean_the_same() -> None:
    old = saved() | {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}}
    del old["rope_parameters"]
    new = saved(rope_parameters=LLAMA3_ROPE)
    frequencies = [parse_llama_config(config).inverse_frequencies for config in (old, new)]
    assert torch.equal(*frequencies)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma2"}, "model type 'gemma2' is none of llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "type 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_parameters": None}, "no rope_theta"),
        ({"rms_norm_eps": ...}, "no rms_norm_eps"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"head_dim": "x"}, "cannot be read"),
        ({"rope_parameters": "x"}, "cannot be read"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": None}}, "cannot be read"),
    ],
)
def test_what_the_fused_forward_does_not_do_is_named(change: dict[str, Any], reason: str) -> None:
    config = {name: value for name, value in (saved() | change).items() if value is not ...}
    with pytest.raises(UnsuitedError, match=reason):
        parse_llama_config(config)


def test_as_many_key_and_value_heads_as_heads_may_be_written_as_null() -> None:
    assert parse_llama_config(saved() | {"num_key_value_heads": None}).num_kv_heads == 4


def test_windows_and_rotary_embeddings_go_by_layer() -> None:
    settings: dict[str, Any] = {"num_hidden_layers": 3, "sliding_window": 8, "use_sliding_window": True}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    smollm = parse_llama_config(SmolLM3Config(**settings, layer_types=kinds, no_rope_layers=[1, 0, 1]).to_dict())
    assert smollm.has_rope == [True, False, True]
    assert smollm.sliding_windows == [None, 8, None]
    off = Qwen3Config(**settings | {"use_sliding_window": False}, layer_types=["full_attention"] * 3)
    qwen = parse_llama_config(off.to_dict())
    assert qwen.sliding_windows == [None] * 3
    assert qwen.has_qk_norm
