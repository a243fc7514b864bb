"""Which device a model runs on and how long its requests may be."""

from collections.abc import Sequence

import torch

from ringserve.engine.errors import EngineConfigError


def choose_device(name: str) -> torch.device:
    """Return the device that the configuration's `device` means here.

    Raises:
        EngineConfigError: If CUDA is asked for and torch sees none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise EngineConfigError("device is 'cuda' and torch sees no CUDA device: use 'cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def choose_max_model_len(wanted: int | None, limits: Sequence[int]) -> int:
    """Return the context that requests may use: `wanted`, or as much as the model was made for.

    Args:
        wanted: Tokens, prompt and output together.
        limits: Lengths beyond which the model, or the engine's way of running it, is wrong.

    Raises:
        EngineConfigError: If `wanted` is more than that, or None and the model does not say.
    """
    if wanted is None and not limits:
        raise EngineConfigError("the model's config names no context length: set max_model_len")
    if wanted is None:
        return min(limits)
    if limits and wanted > min(limits):
        raise EngineConfigError(f"max_model_len is {wanted}, this model goes up to {min(limits)}: lower max_model_len")
    return wanted
