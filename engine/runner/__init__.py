"""The model runners: `make_runner` picks the one that runs a model.

`fused` is the own forward for the Llama family, taken where it gives transformers' logits; `hf` runs any decoder whose
attention goes through transformers' attention interface, and refuses the others. There is no slow fallback for those: a
model that silently ran twenty times slower would be a worse surprise than one that is refused by name.
"""

import logging
from functools import partial

import torch

from ringserve.engine.config import EngineConfig
from ringserve.engine.errors import UnsupportedModelError
from ringserve.engine.runner.base import Runner
from ringserve.engine.runner.check_cache import load_or_make
from ringserve.engine.runner.fused import FusedModel
from ringserve.engine.runner.llama_config import LlamaConfig, UnsuitedError, parse_llama_config
from ringserve.engine.runner.paged import PagedRunner
from ringserve.engine.runner.placement import choose_device, choose_max_model_len
from ringserve.engine.runner.self_check import BLOCK_SIZE, NUM_BLOCKS, NUM_CHECKED, check, check_sequences
from ringserve.engine.weights.adapters import Adapters, load_adapter
from ringserve.engine.weights.checkpoint import Checkpoint, checkpoint_dtype, read_config, weight_files
from ringserve.engine.weights.linear import LinearFactory

__all__ = ["Runner", "make_runner"]

logger = logging.getLogger(__name__)


def make_runner(config: EngineConfig) -> PagedRunner:
    """Load the model.

    Raises:
        EngineError: If it cannot be loaded, does not fit, or fails the check against transformers' own forward.
    """
    torch.set_num_threads(config.resolve_num_threads())
    device = choose_device(config.device)
    runner = None if config.runner == "hf" else _try_fused(config, device)
    runner = runner or _make_hf(config, device)
    runner.make_cache_for(config)
    return runner


def _try_fused(config: EngineConfig, device: torch.device) -> PagedRunner | None:
    """Return None where the model is for `hf`.

    Raises:
        EngineError: If the model is broken, or `fused` is asked for and does not do it.
    """
    try:
        return _make_fused(config, device)
    except UnsuitedError as exc:
        if config.runner == "fused":
            raise UnsupportedModelError(
                f"runner is 'fused', which does not do {config.model} ({exc}): use 'auto'"
            ) from exc
        logger.info("%s is run by transformers' code: %s", config.model, exc)
    except UnsupportedModelError as exc:
        if config.runner == "fused":
            raise
        logger.warning("the fused runner gives wrong logits for this model, transformers' code runs it: %s", exc)
    return None


def _make_fused(config: EngineConfig, device: torch.device) -> PagedRunner:
    raw = read_config(config.model)
    llama = parse_llama_config(raw)
    dtype = checkpoint_dtype(raw) if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype is None:
        raise UnsuitedError("its config names no dtype")
    if not weight_files(config.model):
        raise UnsuitedError("its weights are in no safetensors file")
    max_model_len = choose_max_model_len(config.max_model_len, [llama.max_position_embeddings])
    sequences = check_sequences(llama.vocab_size, max_model_len)
    reference = load_or_make(config.model, dtype, sequences, lambda: _plain_logits(config, sequences))
    load = partial(_load_fused, config, llama, dtype, device)
    runner = PagedRunner(
        load(_load_adapters(config, dtype, device)), load=load, max_model_len=max_model_len, device=device,
        is_deterministic=config.deterministic,
    )  # fmt: skip
    _check(runner, config, sequences, reference)
    return runner


def _load_fused(
    config: EngineConfig, llama: LlamaConfig, dtype: torch.dtype, device: torch.device, adapters: Adapters
) -> FusedModel:
    checkpoint = Checkpoint(config.model, dtype=dtype, device=device)
    factory = LinearFactory(dtype, device, config.quantization, is_deterministic=config.deterministic)
    try:
        model = FusedModel(llama, checkpoint, factory, adapters, dtype, device)
        adapters.check_all_used()
        return model
    finally:
        checkpoint.close()
        logger.info("%d of %d linear layers are 4-bit for few rows", factory.num_int4, factory.num_made)


def _load_adapters(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Adapters:
    loaded = {number: load_adapter(*adapter) for number, adapter in enumerate(config.adapters.items(), 1)}
    factory = LinearFactory(dtype, device, "none", is_deterministic=config.deterministic)
    return Adapters(loaded, factory, dtype, device, is_open=config.runtime_adapters)


def _make_hf(config: EngineConfig, device: torch.device) -> PagedRunner:
    from ringserve.engine.runner.hf import HfModel
    from ringserve.engine.runner.model_loader import (  # transformers comes with these
        context_limits,
        load_config,
        load_model,
    )

    model_config = load_config(config.model)
    limits = context_limits(model_config.get_text_config())
    max_model_len = choose_max_model_len(config.max_model_len, limits)

    def load_plain(adapters: Adapters | None) -> HfModel:
        loaded = load_model(config, model_config, device)
        return HfModel(loaded, adapters or _load_adapters(config, loaded.dtype, device), device)

    def swap(model: HfModel) -> HfModel:
        factory = LinearFactory(model.dtype, device, config.quantization, is_deterministic=config.deterministic)
        model.swap_linears(factory)
        model.adapters.check_all_used()
        if config.deterministic and model.has_experts:
            logger.warning("%s has experts: for these --deterministic does not hold", model.architecture)
        return model

    model = load_plain(None)
    if model.hidden_window is not None:
        max_model_len = choose_max_model_len(config.max_model_len, [*limits, model.hidden_window])
    sequences = check_sequences(model.vocab_size, max_model_len)
    reference = torch.stack([model.plain_logits(tokens)[-NUM_CHECKED:] for tokens in sequences])
    runner = PagedRunner(
        swap(model), load=lambda adapters: swap(load_plain(adapters)), max_model_len=max_model_len, device=device,
        is_deterministic=config.deterministic,
    )  # fmt: skip
    _check(runner, config, sequences, reference)
    return runner


def _check(runner: PagedRunner, config: EngineConfig, sequences: list[list[int]], reference: torch.Tensor) -> None:
    # Forced int4 rounds as much as it has to, so it is the layers for more rows that are checked then.
    copies = 4 if config.quantization == "int4" else 1
    runner.make_cache(NUM_BLOCKS, BLOCK_SIZE)
    check(runner, runner.model.architecture, sequences, reference.to(runner.device), copies=copies)


def _plain_logits(config: EngineConfig, sequences: list[list[int]]) -> torch.Tensor:
    """Run transformers' own model once, on the CPU: on any other device it might meet the engine's memory."""
    from ringserve.engine.runner.hf import plain_logits
    from ringserve.engine.runner.model_loader import load_config, load_model

    model = load_model(config, load_config(config.model), torch.device("cpu"))
    return torch.stack([plain_logits(model, tokens)[-NUM_CHECKED:] for tokens in sequences])
