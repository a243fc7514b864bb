"""From a local Hugging Face directory to a model in evaluation mode, and every way in which that can fail.

Knows transformers, but neither the cache nor the batch.
"""

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ringserve.engine.attention.hook import ATTENTION_NAME
from ringserve.engine.config import EngineConfig
from ringserve.engine.errors import ModelLoadError, UnsupportedModelError
from ringserve.engine.weights.checkpoint import check_memory, read_config, weight_files


def load_config(path: str) -> Any:
    """Return the model's transformers config.

    Raises:
        ModelNotFoundError: If the directory or its config.json is missing.
        ModelLoadError: If the config cannot be read, or names an architecture that transformers does not know.
        UnsupportedModelError: If transformers has no causal language model of this architecture.
    """
    has_code = "auto_map" in read_config(path)
    try:
        model_config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as exc:  # transformers documents no limit to what it raises on a bad file
        if has_code:
            raise UnsupportedModelError(
                f"{path} needs code of its own (auto_map in config.json), which is never run: serve a model of an "
                "architecture that transformers has"
            ) from exc
        raise ModelLoadError(f"the config of {path} cannot be read: {exc}") from exc
    if type(model_config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"{architecture(model_config)} is no causal language model that transformers knows: serve a decoder model"
        )
    return model_config


def log_as_engine() -> None:
    """Have transformers write its warnings to the engine's log, and draw its progress bars on terminals alone."""
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_model(config: EngineConfig, model_config: Any, device: torch.device) -> Any:
    """Load the weights, set up for the engine's attention.

    Raises:
        ModelLoadError: If weights are missing, damaged or of another shape.
        UnsupportedModelError: If the model takes no attention function from outside.
        NotEnoughMemoryError: If they are larger than the free memory.
    """
    if not (files := weight_files(config.model)):
        raise ModelLoadError(
            f"{config.model} holds no safetensors weights; pickled ones, such as pytorch_model.bin, can run code and "
            "are never loaded: convert it with save_pretrained()"
        )
    check_memory(config.model, files, device)
    log_as_engine()
    auto: Any = AutoModelForCausalLM
    try:
        model, loading = auto.from_pretrained(
            config.model,
            config=model_config,
            dtype=config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except KeyError as exc:
        if exc.args != (ATTENTION_NAME,):
            raise ModelLoadError(f"the weights of {config.model} cannot be loaded: {exc!r}") from exc
        raise UnsupportedModelError(
            f"{architecture(model_config)} knows only attentions of its own: serve a decoder that uses transformers' "
            "attention interface, such as Llama, Qwen, Mistral, Gemma, Phi or GPT-2"
        ) from exc
    except Exception as exc:  # as in load_config; a damaged safetensors file has an error class of its own
        raise ModelLoadError(f"the weights of {config.model} cannot be loaded: {exc}") from exc
    if loading["missing_keys"]:  # transformers fills them with random numbers and goes on
        missing = sorted(loading["missing_keys"])
        raise ModelLoadError(f"{config.model} lacks {len(missing)} weights ({missing[0]}, ...): download it again")
    return model.eval().to(device)


def context_limits(text_config: Any) -> list[int]:
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
