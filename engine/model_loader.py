"""From a local Hugging Face directory to a model in evaluation mode, and every way in which that can fail.

Knows transformers, but neither the cache nor the batch.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import ATTENTION_NAME
from engine.config import EngineConfig
from engine.errors import EngineConfigError, ModelLoadError, ModelNotFoundError, UnsupportedModelError


def choose_device(name: str) -> torch.device:
    """Return the device that the configuration's `device` means here.

    Raises:
        EngineConfigError: If CUDA is asked for and torch sees none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise EngineConfigError("device is 'cuda' and torch sees no CUDA device: use 'cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def load_config(path: str) -> Any:
    """Return the model's transformers config.

    Raises:
        ModelNotFoundError: If the directory or its config.json is missing.
        ModelLoadError: If the config cannot be read, or names an architecture that transformers does not know.
        UnsupportedModelError: If transformers has no causal language model of this architecture.
    """
    if not (Path(path) / "config.json").is_file():
        what = "holds no config.json" if Path(path).is_dir() else "is no directory"
        raise ModelNotFoundError(f"{path} {what}: name a local Hugging Face model directory")
    try:
        model_config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as exc:  # transformers documents no limit to what it raises on a bad file
        raise ModelLoadError(f"the config of {path} cannot be read: {exc}") from exc
    if type(model_config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"{architecture(model_config)} is no causal language model that transformers knows: serve a decoder model"
        )
    return model_config


def load_model(config: EngineConfig, model_config: Any, device: torch.device) -> Any:
    """Load the weights, set up for the engine's attention.

    Raises:
        ModelLoadError: If weights are missing, damaged or of another shape.
    """
    auto: Any = AutoModelForCausalLM
    try:
        model, loading = auto.from_pretrained(
            config.model,
            config=model_config,
            dtype=config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as exc:  # as in load_config; a damaged safetensors file has an error class of its own
        raise ModelLoadError(f"the weights of {config.model} cannot be loaded: {exc}") from exc
    if loading["missing_keys"]:  # transformers fills them with random numbers and goes on
        missing = sorted(loading["missing_keys"])
        raise ModelLoadError(f"{config.model} lacks {len(missing)} weights ({missing[0]}, ...): download it again")
    return model.eval().to(device)


def choose_max_model_len(wanted: int | None, model_config: Any) -> int:
    """Return the context that requests may use: `wanted`, or as much as the model was made for.

    Raises:
        EngineConfigError: If `wanted` is more than that, or None and the model does not say.
    """
    limits = _context_limits(model_config.get_text_config())
    if wanted is None and not limits:
        raise EngineConfigError("the model's config names no context length: set max_model_len")
    if wanted is None:
        return min(limits)
    if limits and wanted > min(limits):
        raise EngineConfigError(f"max_model_len is {wanted}, this model goes up to {min(limits)}: lower max_model_len")
    return wanted


def _context_limits(text_config: Any) -> list[int]:
    """Return the lengths beyond which the model, or the engine's way of running it, is wrong."""
    limits = [
        getattr(text_config, "max_position_embeddings", None),
        getattr(text_config, "attention_chunk_size", None),  # beyond it layers see only their own chunk: not built
    ]
    ropes = getattr(text_config, "rope_parameters", None) or {}
    for rope in (ropes, *(nested for nested in ropes.values() if isinstance(nested, dict))):
        if rope.get("rope_type") == "longrope":
            # transformers switches the whole batch to the long factors as soon as one request is longer than this.
            limits.append(rope.get("original_max_position_embeddings"))
    return [int(limit) for limit in limits if limit]


def architecture(model_config: Any) -> str:
    """Return the name that messages call this kind of model."""
    return ", ".join(model_config.architectures or [type(model_config).__name__])
