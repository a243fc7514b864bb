"""Arrays from the host to where the model runs, without waiting for what the device was told before."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(arrays: tuple[NDArray[np.integer], ...], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to `device` as int32, in one copy that is not waited for; they keep their shapes.

    The pinned memory comes from torch's cache of it, which gives none away again before its copy is done.
    """
    flat = np.concatenate([array.ravel() for array in arrays], dtype=np.int32, casting="same_kind")
    staged = pinned(torch.from_numpy(flat), device)
    parts = staged.to(device, non_blocking=True).split_with_sizes([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy that a GPU can fetch by itself; the tensor where `device` is none."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
