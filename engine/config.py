"""What an engine is started with: one frozen dataclass of plain, JSON-able fields."""

import os
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import EngineConfigError

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the engine core.

    Raises:
        EngineConfigError: If a value is outside of its range.
    """

    model: str  # path of a local Hugging Face model directory
    dtype: Dtype = "auto"  # auto: the checkpoint's own, so that nothing is rounded or doubled behind the user's back
    device: Device = "auto"  # auto: CUDA where torch sees it, else the CPU
    max_model_len: int | None = None  # tokens, prompt and output together; None: as many as the model was made for
    max_num_seqs: int = 64  # seats, requests in one step; on CPUs a step's cost grows about linearly above 32
    max_num_batched_tokens: int = 2048  # prompt tokens prefilled in one step; one prompt always goes, however long
    num_threads: int | None = None  # CPU threads; None: all cores but one, which is left to the server process
    kv_cache_tokens: int | None = None  # None: what half of the free memory holds, no more than all seats can use

    def __post_init__(self) -> None:
        for name, choices in (("dtype", get_args(Dtype)), ("device", get_args(Device))):
            if getattr(self, name) not in choices:
                raise EngineConfigError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(choices)}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_threads", "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineConfigError(f"{name} is {value}: it must be at least 1")

    def resolve_num_threads(self) -> int:
        """Return how many CPU threads torch may use: 2 on a busy 2-core machine were slower than 1."""
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) - 1)
