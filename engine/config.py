"""What an engine is started with: one frozen dataclass of plain, JSON-able fields."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ringserve.engine.errors import EngineConfigError

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["auto", "none", "int4"]
RunnerName = Literal["auto", "hf", "fused"]
Overlap = Literal["auto", "on", "off"]
_CHOICES = {
    "dtype": Dtype, "device": Device, "quantization": Quantization, "runner": RunnerName, "overlap": Overlap,
}  # fmt: skip
_AT_LEAST_ONE = (
    "block_size", "max_model_len", "max_num_seqs", "max_num_waiting", "max_num_batched_tokens", "num_threads",
    "kv_cache_tokens",
)  # fmt: skip
_MAX_PREFILL_SHARE = 0.95


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
    max_num_waiting: int = 4096  # requests without a seat; twice what the server lets in, so it is the one to refuse
    max_num_batched_tokens: int | None = None  # most prompt tokens in a step; None: by the device
    target_gap_s: float = 0.25  # the longest step with prompt tokens that is planned: streams wait for their next token
    min_prefill_share: float = 0.5  # of such a step's time, for prompts, whatever the target: others wait for theirs
    num_threads: int | None = None  # CPU threads; None: all cores but one, which is left to the server process
    block_size: int = 32  # tokens of a KV cache block; fewer waste less of a last block, and make longer tables
    runner: RunnerName = "auto"  # auto: fused where it gives transformers' logits, else hf, transformers' own code
    quantization: Quantization = "auto"  # auto: int4 for few rows where that loses nothing, on a CPU in bfloat16
    overlap: Overlap = "auto"  # two steps in flight. auto: on a GPU, which the host would keep waiting else
    deterministic: bool = False  # whether a request's tokens are free of its batch mates' influence, which costs speed
    runtime_adapters: bool = False  # whether more may come while it runs: every layer looks for them then
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA: the name that requests use, its PEFT directory
    kv_cache_tokens: int | None = None  # None: what half of the free memory holds, no more than all seats can use

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            choices = get_args(kind)
            if getattr(self, name) not in choices:
                raise EngineConfigError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(choices)}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineConfigError(f"{name} is {value}: it must be at least 1")
        if not self.target_gap_s > 0.0:
            raise EngineConfigError(f"target_gap_s is {self.target_gap_s}: it must be above 0")
        if not 0.0 <= self.min_prefill_share <= _MAX_PREFILL_SHARE:
            raise EngineConfigError(f"min_prefill_share is {self.min_prefill_share}: from 0 to {_MAX_PREFILL_SHARE}")

    def resolve_num_batched_tokens(self, device: str) -> int:
        """Return how many prompt tokens a step takes where nobody decodes; `device` is a torch device type.

        Larger chunks gain nothing on CPUs, and keep everyone else waiting.
        """
        return self.max_num_batched_tokens or (512 if device == "cpu" else 8192)

    def resolve_overlap(self, device: str) -> bool:
        """Return whether two steps are in flight; `device` is a torch device type. On a CPU that gains nothing."""
        return device != "cpu" if self.overlap == "auto" else self.overlap == "on"

    def resolve_num_threads(self) -> int:
        """Return how many CPU threads torch may use: one that shares its core with the server holds up the others."""
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) - 1)
