"""Memory that nothing refers to, back to the system: a process that sleeps should look as small as it is."""

import ctypes
import gc

import torch


def give_memory_back(device: torch.device) -> None:
    """Collect what is left of large objects and empty the allocators' stores. Takes up to some 100 ms."""
    gc.unfreeze()  # else a cycle among what was there when the loop began would never be found
    gc.collect()
    gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
