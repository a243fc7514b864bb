"""Configuration of `ringserve serve`: each setting written once; the command line is made from these fields."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.errors import StartupError


def _option(default: Any, help_text: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **extra})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """What the server needs to know. None means: the model's own, or what the machine has."""

    model: str | None = None  # None: the default model
    host: str = _option("127.0.0.1", "address to bind; 0.0.0.0 for every interface")
    port: int = _option(8000, "port to bind; 0 for a free one")
    served_model_name: tuple[str, ...] = _option((), "names for requests to use; responses report the first", many=True)
    chat_template: str | None = _option(None, "file with a Jinja chat template, or the template itself")
    max_num_queued_reqs: int = _option(2048, "live requests beyond which new ones get a 503")
    max_body_mb: int = _option(32, "largest request body, MiB")
    drain_timeout: float = _option(30.0, "seconds that running streams may take to end after SIGTERM")
    step_timeout: float = _option(60.0, "seconds after which a step in progress counts as stuck")
    keep_alive_on_engine_death: bool = _option(False, "stay up, answering 503, when the engine has died")
    engine: str = _option("model", "what generates: the model, or a synthetic engine", choices=("model", "synthetic"))
    dtype: str = _option("auto", "weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = _option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = _option(None, "longest prompt and output together, tokens")
    max_num_seqs: int | None = _option(None, "sequences that run at once")
    step_time_ms: float = _option(0.0, "synthetic engine: time of a step; 0 is free-running")
    tokens_per_step: int = _option(1, "synthetic engine: tokens of each request in a step")
    prefill_time_ms: float = _option(0.0, "synthetic engine: time to a request's first token")
    script: str | None = _option(None, "synthetic engine: JSON file, the token ids that each request emits")
    lockstep: str | None = _option(None, "synthetic engine: file of one u64, the events that have reached the clients")
    fail_after: int = _option(-1, "synthetic engine: fail each request after so many tokens; -1 is never")
    step_log: str | None = _option(None, "file for each step's publish stamp, rows and tokens")

    def __post_init__(self) -> None:
        """Raise StartupError for a value out of its range."""
        _at_least(self, 0, "port", "drain_timeout", "step_time_ms", "prefill_time_ms")
        _at_least(self, 1, "max_num_queued_reqs", "max_body_mb", "tokens_per_step", "step_timeout")
        _at_least(self, 1, "max_model_len", "max_num_seqs")
        _at_least(self, -1, "fail_after")
        if self.port > 65535:
            raise StartupError(f"--port is {self.port}: at most 65535")

    def engine_config(self, tokenizer: Path) -> dict[str, Any]:
        """Return the engine process's configuration, without its rings.

        Args:
            tokenizer: The model's tokenizer.json; its directory is the model.
        """
        limits = {"max_model_len": self.max_model_len, "max_num_seqs": self.max_num_seqs}
        given = {name: value for name, value in limits.items() if value is not None}
        if self.engine == "model":
            options = {"model": str(tokenizer.parent), "dtype": self.dtype, "device": self.device, **given}
            return {"model": options, "step_log": self.step_log}
        synthetic = {
            "tokenizer": str(tokenizer), "script": self.script or "", "step_time_s": self.step_time_ms / 1e3,
            "tokens_per_step": self.tokens_per_step, "prefill_time_s": self.prefill_time_ms / 1e3,
            "lockstep": self.lockstep or "", "fail_after": self.fail_after, **given,
        }  # fmt: skip
        return {"synthetic": synthetic, "step_log": self.step_log}


def _at_least(config: ServeConfig, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not (value >= least and math.isfinite(value)):
            raise StartupError(f"--{name.replace('_', '-')} is {value}: at least {least}")
