"""What the fused runner needs to know of a model of the Llama family, read from its config.json.

A config that says anything which the fused forward does not do gives an UnsuitedError, with the reason; so does one
that is silent where the architectures' defaults differ. No transformers here.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FAMILY = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_WINDOWS_BY_LAYER = ("qwen2", "qwen3", "smollm3")


class UnsuitedError(Exception):
    """The fused forward does not do this model; the message says why. Never leaves the package."""


@dataclass(slots=True, frozen=True)
class LlamaConfig:
    """Sizes and switches of one model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    inverse_frequencies: Tensor  # [head_dim / 2] fp32, of the rotary embedding
    has_rope: list[bool]  # by layer
    sliding_windows: list[int | None]  # by layer
    has_qk_norm: bool
    ties_embeddings: bool


def parse_llama_config(config: dict[str, Any]) -> LlamaConfig:
    """Read a config.json.

    Raises:
        UnsuitedError: If the fused forward does not do what it says.
    """
    kind = config.get("model_type")
    if kind not in FAMILY:
        raise UnsuitedError(f"model type {kind!r} is none of {', '.join(FAMILY)}")
    if config.get("hidden_act") != "silu":
        raise UnsuitedError(f"hidden_act is {config.get('hidden_act')!r}")
    for name in ("quantization_config", "attention_chunk_size"):
        if config.get(name):
            raise UnsuitedError(f"its config has {name}")
    if config.get("num_key_value_heads", 0) is None:  # so transformers reads it, too
        config = config | {"num_key_value_heads": config.get("num_attention_heads")}
    try:
        num_layers, num_heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
        head_dim = config.get("head_dim") or _size(config, "hidden_size") // num_heads
        if kind == "qwen3" and "head_dim" not in config:
            raise UnsuitedError("its config has no head_dim")
        return LlamaConfig(
            architecture=", ".join(config.get("architectures") or [kind]),
            vocab_size=_size(config, "vocab_size"),
            hidden_size=_size(config, "hidden_size"),
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads"),
            head_dim=head_dim,
            max_position_embeddings=_size(config, "max_position_embeddings"),
            norm_eps=config["rms_norm_eps"],
            inverse_frequencies=_inverse_frequencies(config, head_dim),
            has_rope=_has_rope(config, num_layers),
            sliding_windows=_sliding_windows(config, num_layers),
            has_qk_norm=kind == "qwen3",
            ties_embeddings=config.get("tie_word_embeddings", kind == "smollm3"),
        )
    except KeyError as exc:
        raise UnsuitedError(f"its config has no {exc.args[0]}") from exc
    except (TypeError, ValueError, AttributeError, RuntimeError) as exc:  # transformers says it better, and is next
        raise UnsuitedError(f"its config cannot be read: {exc}") from exc


def _size(config: dict[str, Any], name: str) -> int:
    size = config[name]
    if type(size) is not int or size < 1:
        raise UnsuitedError(f"{name} is {size!r}")
    return size


def _inverse_frequencies(config: dict[str, Any], head_dim: int) -> Tensor:
    """Radians a position for each pair of a head's numbers; transformers 5 calls `rope_parameters` what 4 had apart."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise UnsuitedError("its config has no rope_theta")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsuitedError("its rotary embedding is partial")
    inverse: Tensor = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    match scaling.get("rope_type", scaling.get("type", "default")):
        case "default":
            return inverse
        case "linear":
            return inverse / float(scaling["factor"])
        case "llama3":
            return _llama3_frequencies(inverse, scaling)
        case other:
            raise UnsuitedError(f"its rotary embedding is of type {other!r}")


def _llama3_frequencies(inverse: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones stay, those between are mixed (Llama 3.1)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)  # within the original context
    share: Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    mixed: Tensor = (1 - share) * inverse / factor + share * inverse
    return mixed


def _has_rope(config: dict[str, Any], num_layers: int) -> list[bool]:
    if config["model_type"] != "smollm3":
        return [True] * num_layers
    return [bool(each) for each in _by_layer(config["no_rope_layers"], num_layers)]  # 1 where a layer has it


def _sliding_windows(config: dict[str, Any], num_layers: int) -> list[int | None]:
    if config["model_type"] == "llama":
        return [None] * num_layers
    window = config["sliding_window"]
    if window is None or (config["model_type"] in _WINDOWS_BY_LAYER and not config.get("use_sliding_window", False)):
        return [None] * num_layers
    if config["model_type"] == "mistral":
        return [window] * num_layers
    kinds = _by_layer(config["layer_types"], num_layers)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _by_layer(values: list[Any], num_layers: int) -> list[Any]:
    if len(values) != num_layers:
        raise UnsuitedError(f"its config describes {len(values)} layers and has {num_layers}")
    return values
