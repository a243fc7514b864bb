"""Errors of the engine, named by whose fault they are.

EngineError
├── EngineConfigError       the configuration asks for what cannot be had (ValueError)
├── NotEnoughMemoryError    the model or its KV cache does not fit into the free memory (MemoryError)
└── ModelLoadError          the model directory cannot be served
    ├── ModelNotFoundError      no such directory, or no model in it (FileNotFoundError)
    ├── UnsupportedModelError   the engine's attention and this architecture do not go together
    └── AdapterError            a LoRA adapter cannot be read, is of another model, or of an unsupported kind

A single request that cannot go on is no error of the engine: that is `engine.interface.RequestFailedError`.
"""


class EngineError(Exception):
    """Base of every error that stops an engine from starting."""


class EngineConfigError(EngineError, ValueError):
    """The configuration asks for what this model or machine cannot give."""


class NotEnoughMemoryError(EngineError, MemoryError):
    """The weights, or the KV cache of one request, need more memory than is free."""


class ModelLoadError(EngineError):
    """The model directory is there but cannot be served."""


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """There is no such model directory, or it holds no config.json."""


class UnsupportedModelError(ModelLoadError):
    """The architecture does not run through the engine's attention, or runs through it wrongly."""


class AdapterError(ModelLoadError):
    """A LoRA adapter cannot be read, was made for another model, or wants more than plain LoRA of linear layers."""
