"""HTTP in, text out: the front end, which knows the engine only through shm_transport.

As a library: the names in `__all__`. Each is imported with its first use, so that the command line stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.async_llm import AsyncLLM
    from server.config import ServeConfig
    from server.input_processor import EncodeRequest, GenerateRequest
    from server.llm import LLM
    from server.outputs import OutputKind
    from server.sampling_params import SamplingParams
    from shm_transport.records import Pooling

_HOMES = {
    "LLM": "server.llm",
    "AsyncLLM": "server.async_llm",
    "EncodeRequest": "server.input_processor",
    "GenerateRequest": "server.input_processor",
    "OutputKind": "server.outputs",
    "Pooling": "shm_transport.records",
    "SamplingParams": "server.sampling_params",
    "ServeConfig": "server.config",
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
        raise AttributeError(f"module 'server' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
