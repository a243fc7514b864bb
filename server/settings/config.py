"""Configuration of `ringserve serve`: each setting written once; the command line is made from these fields."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ringserve.server.chat.reasoning import REASONING_PARSERS
from ringserve.server.chat.tool_formats import TOOL_PARSERS
from ringserve.server.errors import StartupError, shown
from ringserve.shm_transport.log_format import FORMATS
from ringserve.shm_transport.strategies import STRATEGIES

_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")  # as browsers send it
_HOST_NAME = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.IGNORECASE | re.ASCII)
_TOO_LARGE = 2**63  # for any setting, infinity too


def _option(default: Any, help_text: str, metavar: str | None = None, **extra: Any) -> Any:
    return field(
        default=default, repr=extra.get("is_shown", True), metadata={"help": help_text, "metavar": metavar, **extra}
    )


def _synthetic(default: Any, help_text: str, metavar: str) -> Any:
    return _option(default, help_text, metavar, group="synthetic engine (--engine synthetic)")


_MAX_PREFILL_PERCENT = 95  # streams still get a token every twenty times their own step


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """What the server needs to know. None means: the model's own, or what the machine has."""

    model: str | None = None  # None: the default model
    host: str = _option("127.0.0.1", "address to bind; 0.0.0.0 for every interface", "ADDRESS")
    port: int = _option(8000, "port to bind; 0 for a free one", "PORT")
    uds: str | None = _option(None, "a Unix socket to bind instead", "PATH")
    root_path: str = _option("", "prefix that a proxy in front strips from paths", "/PREFIX")
    ssl_certfile: str | None = _option(None, "certificate chain, PEM: serve HTTPS", "FILE")
    ssl_keyfile: str | None = _option(None, "its private key, if not in the same file", "FILE")
    ssl_ca_certs: str | None = _option(None, "authorities that may sign clients' certificates, PEM", "FILE")
    ssl_cert_reqs: str = _option("none", "whether clients need a certificate", choices=("none", "optional", "required"))
    served_model_name: tuple[str, ...] = _option((), "names for requests to use; responses report the first", "NAME")
    tool_call_parser: str = _option(
        "auto", "format of the model's tool calls; auto: by its chat template", choices=TOOL_PARSERS
    )
    reasoning_parser: str = _option(
        "none", "think: <think>...</think> becomes reasoning_content", choices=REASONING_PARSERS
    )
    chat_template: str | None = _option(None, "a file with a Jinja chat template, or the template itself", "TEMPLATE")
    api_key: tuple[str, ...] = _option(
        (), "keys, one of which requests must carry; others see them in the process list: better in a file", "KEY",
        is_shown=False,
    )  # fmt: skip
    api_key_file: str | None = _option(None, "a file with more of them, one a line", "FILE")
    max_concurrency_per_key: int | None = _option(None, "requests of one key at once; more get a 429", "N")
    fair_by_key: bool = _option(False, "the key that has the fewest prompt tokens waiting goes first")
    allowed_hosts: tuple[str, ...] = _option(
        (), "names that clients may call the server by, beside IP addresses and localhost; *.NAME for those below one, "
        "* for any; with none, only a server on the loopback checks", "NAME",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = _option(
        (), "origins whose pages may use the server, such as https://example.org; * for all; none if unset", "ORIGIN"
    )
    allowed_methods: tuple[str, ...] = _option((), "methods that those pages may use; all if unset", "METHOD")
    allowed_headers: tuple[str, ...] = _option((), "headers that those pages may send; all if unset", "HEADER")
    allow_credentials: bool = _option(False, "those pages may send cookies")
    max_num_queued_reqs: int = _option(2048, "live sequences beyond which new requests get a 503", "N")
    max_num_queued_tokens: int = _option(
        2**22, "prompt tokens, of requests without a first token, beyond which they do", "N"
    )
    max_stored_responses: int = _option(1024, "responses kept for previous_response_id; 0 keeps none", "N")
    max_body_mb: int = _option(16, "largest request body, MiB", "MIB")
    sse_keep_alive_interval: float = _option(15.0, "idle time before a stream gets a comment; 0 for none", "SECONDS")
    write_timeout: float = _option(60.0, "time after which a client that reads nothing is cut off; 0: never", "SECONDS")
    receive_timeout: float = _option(
        60.0, "time for a request's head to come, and for which its body may pause; 0: any", "SECONDS"
    )
    keep_alive_timeout: float = _option(  # above 600 s, Google's balancers', the longest default of a common proxy
        620.0, "time after which a connection without a request is closed; more than a proxy's in front; 0: never",
        "SECONDS",
    )  # fmt: skip
    drain_timeout: float = _option(30.0, "time that running streams may take to end after SIGTERM", "SECONDS")
    step_timeout: float = _option(60.0, "time after which a step in progress counts as stuck", "SECONDS")
    stream_interval: int = _option(1, "least tokens in an event, but for the first and the last", "N")
    pooling: str | None = _option(
        None, "of embeddings; as the model's 1_Pooling/config.json says, else last, if unset", choices=("last", "mean")
    )
    wait_strategy: str = _option("adaptive", "how the server waits for the next step", choices=STRATEGIES)
    keep_alive_on_engine_death: bool = _option(False, "stay up, answering 503, when the engine has died")
    enable_dev_routes: bool = _option(False, "serve /pause, /sleep and the like, and adapters that come and go")
    engine: str = _option("model", "what generates", choices=("model", "synthetic"))
    dtype: str = _option("auto", "of weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = _option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    quantization: str = _option("auto", "weights on CPUs; auto: 4-bit where lossless", choices=("auto", "none", "int4"))
    runner: str = _option(
        "auto", "what runs the model; auto: the fastest that is right", choices=("auto", "hf", "fused")
    )
    overlap: str = _option("auto", "two steps in flight; auto: on a GPU", choices=("auto", "on", "off"))
    adapters: tuple[str, ...] = _option((), "LoRA adapters (PEFT), each served as a model of that name", "NAME=DIR")
    deterministic: bool = _option(False, "a request's tokens never depend on its batch mates; slower")
    num_threads: int | None = _option(None, "of the engine on CPUs; all cores but one if unset", "N")
    kv_cache_tokens: int | None = _option(None, "size of the KV cache; half of the free memory if unset", "N")
    block_size: int | None = _option(None, "tokens in a block of the KV cache", "N")
    max_num_batched_tokens: int | None = _option(None, "most prompt tokens in a step; by the device if unset", "N")
    target_gap_ms: float = _option(
        250.0, "longest step with prompt tokens, the gap that running streams see then", "MS"
    )
    min_prefill_percent: int = _option(50, "least part of such a step's time for prompts, whatever the target", "N")
    max_model_len: int | None = _option(None, "longest prompt and output together, tokens; the model's if unset", "N")
    max_num_seqs: int | None = _option(None, "sequences that run at once; the engine's choice if unset", "N")
    log_format: str = _option("text", "of the log, on stderr", choices=FORMATS)
    enable_log_requests: bool = _option(False, "log each request that has ended: tokens, times, how it ended")
    log_prompts: bool = _option(False, "with --enable-log-requests: the prompt's text too")
    disable_log_stats: bool = _option(False, "no line each ten seconds with rates and queue lengths")
    otlp_traces_endpoint: str | None = _option(
        None, "OpenTelemetry collector (OTLP over HTTP) for a span of each request; none if unset", "URL"
    )
    step_log: str | None = _option(None, "write each step's publish stamp, rows and tokens there", "FILE")
    step_time_ms: float = _synthetic(0.0, "time of a step; 0 is free-running", "MS")
    tokens_per_step: int = _synthetic(1, "tokens of each request in a step", "N")
    prefill_time_ms: float = _synthetic(0.0, "time to a request's first token", "MS")
    script: str | None = _synthetic(None, "JSON list of the token ids that each request emits", "FILE")
    lockstep: str | None = _synthetic(None, "one u64: the events that have reached the clients", "FILE")
    embedding_size: int = _synthetic(64, "numbers in an embedding", "N")
    fail_after: int = _synthetic(-1, "fail each request after so many tokens; -1 is never", "N")

    def __post_init__(self) -> None:
        """Raise StartupError for a value out of its range."""
        _at_least(self, 0, "sse_keep_alive_interval", "write_timeout", "receive_timeout", "keep_alive_timeout")
        _at_least(self, 0, "port", "max_stored_responses", "drain_timeout", "step_time_ms", "prefill_time_ms")
        _at_least(self, 0, "min_prefill_percent")
        _at_least(self, 1, "stream_interval", "max_num_queued_reqs", "max_body_mb", "tokens_per_step", "step_timeout")
        _at_least(
            self, 1, "target_gap_ms", "max_model_len", "max_num_seqs", "num_threads", "kv_cache_tokens", "block_size"
        )
        _at_least(
            self, 1, "max_num_batched_tokens", "embedding_size", "max_concurrency_per_key", "max_num_queued_tokens"
        )
        _at_least(self, -1, "fail_after")
        if self.min_prefill_percent > _MAX_PREFILL_PERCENT:
            raise StartupError(f"--min-prefill-percent is {self.min_prefill_percent}: at most {_MAX_PREFILL_PERCENT}")
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and value not in (choices := each.metadata.get("choices", (value,))):
                raise StartupError(f"--{each.name.replace('_', '-')} is {value!r}: one of {', '.join(choices)}")
        if self.port > 65535:
            raise StartupError(f"--port is {self.port}: at most 65535")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise StartupError(f"--root-path is {self.root_path!r}: write /prefix, without a slash at its end")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise StartupError(f"--allowed-origins has {origin!r}: write * or scheme://host[:port], without a path")
        if "*" in self.allowed_origins and self.allow_credentials:
            raise StartupError(
                "--allow-credentials with --allowed-origins *: any page could act as its reader; name the origins"
            )
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise StartupError(
                    f"--allowed-hosts has {name!r}: write a name such as llm.example.org, *.example.org or *, without "
                    "scheme, port or path; IP addresses are always allowed"
                )
        self._check_adapters()
        self._check_names()
        if self.otlp_traces_endpoint is not None and not _is_http_url(self.otlp_traces_endpoint):
            raise StartupError(
                f"--otlp-traces-endpoint is {self.otlp_traces_endpoint!r}: must be http://HOST:PORT or "
                "https://HOST:PORT, with the path /v1/traces or none"
            )

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The models that the adapters are served as."""
        return tuple(adapter.partition("=")[0] for adapter in self.adapters)

    def shown(self) -> str:
        """Return every setting that has a value, for the log; secrets only as set."""
        values = {
            field.name: getattr(self, field.name) for field in fields(self) if field.metadata.get("is_shown", True)
        }
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if value not in (None, ()))

    def engine_config(self, tokenizer: Path) -> dict[str, Any]:
        """Return the engine process's configuration, without its rings.

        Args:
            tokenizer: The model's tokenizer.json; its directory is the model.
        """
        given = self._given("max_model_len", "max_num_seqs")
        common = {"step_log": self.step_log, "log_format": self.log_format}
        if self.engine == "model":
            options = {
                "model": str(tokenizer.parent), "dtype": self.dtype, "device": self.device,
                "quantization": self.quantization, "runner": self.runner, "deterministic": self.deterministic,
                "overlap": self.overlap, "runtime_adapters": self.enable_dev_routes,
                "target_gap_s": self.target_gap_ms / 1e3, "min_prefill_share": self.min_prefill_percent / 100,
                **given, **self._given("num_threads", "kv_cache_tokens", "block_size", "max_num_batched_tokens"),
            }  # fmt: skip
            if self.adapters:
                options["adapters"] = dict(adapter.split("=", 1) for adapter in self.adapters)
            return {"model": options, **common}
        synthetic = {
            "tokenizer": str(tokenizer), "script": self.script or "", "step_time_s": self.step_time_ms / 1e3,
            "tokens_per_step": self.tokens_per_step, "prefill_time_s": self.prefill_time_ms / 1e3,
            "lockstep": self.lockstep or "", "fail_after": self.fail_after, "embedding_size": self.embedding_size,
            **given,
        }  # fmt: skip
        return {"synthetic": synthetic, **common}

    def _check_adapters(self) -> None:
        names = self.adapter_names
        for adapter in self.adapters:
            name, _, directory = adapter.partition("=")
            if not (name and directory):
                raise StartupError(f"--adapters is {adapter}: must be NAME=DIR")
            if name in self.served_model_name or names.count(name) > 1:
                raise StartupError(f"--adapters is {adapter}: the name is another model's already")
        if names and self.engine != "model":
            raise StartupError(f"--adapters is for --engine model: {self.engine} has none")

    def _check_names(self) -> None:
        """Raise StartupError for a model's name that no JSON can have, or that would break a line of the log."""
        for name in (*(self.served_model_name or (self.model or "default",)), *self.adapter_names):
            if not name or not name.isprintable():
                raise StartupError(
                    f"a model's name is {name!r}: must have characters, printable ones alone (--served-model-name)"
                )

    def _given(self, *names: str) -> dict[str, int]:
        """Return those of the fields that are set; the engine has defaults for the others."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and not re.search(r"\s", text)
    except ValueError:  # half of an IPv6 address, or a port that is none
        return False


def _at_least(config: ServeConfig, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < _TOO_LARGE:  # NaN too
            raise StartupError(f"--{name.replace('_', '-')} is {shown(value)}: at least {least}, and below 2^63")
