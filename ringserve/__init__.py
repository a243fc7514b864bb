"""ringserve as a library: the names in `__all__`. Each is imported with its first use: the command line stays quick."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringserve.server.generation.async_llm import AsyncLLM
    from ringserve.server.generation.input_processor import EncodeRequest, GenerateRequest
    from ringserve.server.generation.outputs import OutputKind
    from ringserve.server.generation.sampling_params import SamplingParams
    from ringserve.server.llm import LLM
    from ringserve.server.settings.config import ServeConfig
    from ringserve.shm_transport.records import Pooling

_HOMES = {
    "LLM": "ringserve.server.llm",
    "AsyncLLM": "ringserve.server.generation.async_llm",
    "EncodeRequest": "ringserve.server.generation.input_processor",
    "GenerateRequest": "ringserve.server.generation.input_processor",
    "OutputKind": "ringserve.server.generation.outputs",
    "Pooling": "ringserve.shm_transport.records",
    "SamplingParams": "ringserve.server.generation.sampling_params",
    "ServeConfig": "ringserve.server.settings.config",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "EncodeRequest",
    "GenerateRequest",
    "OutputKind",
    "Pooling",
    "SamplingParams",
    "ServeConfig",
]


def __getattr__(name: str) -> Any:
    """Import one of `__all__`."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ringserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
