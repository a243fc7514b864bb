"""Configuration of `ringserve bench`: each setting written once; the command line is made from these fields."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from ringserve.server.errors import StartupError

DEFAULT_CONCURRENCY = 8


def _option(default: Any, help_text: str, metavar: str | None = None, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "metavar": metavar, **extra})


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What load to make, and where to put the figures."""

    url: str
    endpoint: str = _option("chat", "what to ask", choices=("chat", "completions"), group="load")
    model: str | None = _option(None, "the first that the server lists if unset", "NAME", group="load")
    num_prompts: int = _option(100, "requests in all", "N", group="load")
    concurrency: int | None = _option(
        None, f"requests at once, each followed by the next; {DEFAULT_CONCURRENCY} if no rate is set", "N", group="load"
    )
    request_rate: float | None = _option(
        None,
        "requests a second instead, at random (Poisson), whether or not earlier ones have ended",
        "R",
        group="load",
    )
    num_warmups: int = _option(1, "requests before the clock starts", "N", group="load")
    seed: int = _option(0, "of prompts and arrivals", "N", group="load")
    timeout: float = _option(600.0, "time after which a request counts as failed", "SECONDS", group="load")
    input_len: int = _option(128, "words of a random prompt, most of them one token", "N", group="requests")
    output_len: int = _option(64, "most tokens of an answer", "N", group="requests")
    prompts_file: str | None = _option(
        None, 'prompts instead of random ones, one a line; a JSON object\'s "prompt"', "FILE", group="requests"
    )
    ignore_eos: bool = _option(False, "answers of full length, where the server knows ignore_eos", group="requests")
    extra_body: str | None = _option(None, "JSON object of further request fields", "JSON", group="requests")
    api_key: str | None = _option(None, "$OPENAI_API_KEY if unset", "KEY", group="requests")
    json: str | None = _option(None, "write all figures there", "FILE", group="results")
    plot: str | None = _option(None, "draw them there, as PNG", "FILE", group="results")

    def __post_init__(self) -> None:
        """Raise StartupError for a value out of its range."""
        for name in ("num_prompts", "concurrency", "input_len", "output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StartupError(f"{_flag(name)} is {value}: at least 1")
        for name in ("request_rate", "timeout"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise StartupError(f"{_flag(name)} is {value}: above 0, and finite")
        for name in ("num_warmups", "seed"):
            if getattr(self, name) < 0:
                raise StartupError(f"{_flag(name)} is {getattr(self, name)}: at least 0")
        if self.concurrency is not None and self.request_rate is not None:
            raise StartupError("--concurrency and --request-rate are two kinds of load: choose one")
        if not self.url.startswith(("http://", "https://")):
            raise StartupError(f"URL is {self.url!r}: it begins with http:// or https://")
        self.extra_fields()

    @property
    def base_url(self) -> str:
        """The server's address up to and including /v1."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else url + "/v1"

    def extra_fields(self) -> dict[str, Any]:
        """Return --extra-body's fields."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError as exc:
            raise StartupError(f"--extra-body is no JSON: {exc}") from exc
        if not isinstance(fields, dict):
            raise StartupError("--extra-body is no JSON object")
        return fields


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
