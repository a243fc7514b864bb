"""Request fields that both generating endpoints have: strict types, unknown ones ignored, unsupported ones refused."""

from typing import Any, ClassVar

import msgspec

from ringserve.server.errors import RequestError, shown
from ringserve.server.generation.sampling_params import MAX_BIASED_TOKENS, SamplingParams

# Fields that change the answer and are not supported, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

_SAMPLING_FIELDS = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "prompt_logprobs",
    "stream_interval",
)  # fmt: skip
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
_INT32 = 2**31
_MAX_SALT_CHARS = 128


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationFields(msgspec.Struct, kw_only=True):
    """What both endpoints share; msgspec has no other way to flatten fields."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = NEUTRAL
    needed: ClassVar[str | None] = None  # a field whose absence gets the endpoint's own error, not msgspec's
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    audio: Any = None
    best_of: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logprob_token_ids: Any = None
    modalities: Any = None
    moderation: Any = None
    prompt_embeds: Any = None
    repetition_detection: Any = None
    response_format: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    thinking_token_budget: Any = None
    tool_choice: Any = None
    tools: Any = None
    use_beam_search: Any = None
    verbosity: Any = None
    vllm_xargs: Any = None
    web_search_options: Any = None

    @property
    def limit_name(self) -> str:
        """The field that limits the answer's tokens."""
        return "max_tokens"

    def check(self) -> None:
        """Refuse fields that are not supported, and those that contradict each other.

        Raises:
            RequestError: Naming the field.
        """
        for name, neutral in self.neutral.items():
            value = getattr(self, name)
            if value is not None and not any(_is_same(value, v) for v in neutral):
                raise RequestError(
                    f"{name} is {shown(value)}: this server does not support it, leave it out", param=name
                )
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is set without stream: set stream to true, or leave it out", param="stream_options"
            )
        if self.stream and self.prompt_logprobs:
            raise RequestError(
                f"prompt_logprobs is {shown(self.prompt_logprobs)}: not with stream, leave either out",
                param="prompt_logprobs",
            )
        self._check_scheduling()

    def _check_scheduling(self) -> None:
        if not -_INT32 <= (self.priority or 0) < _INT32:
            raise RequestError(f"priority is {shown(self.priority)}: must be a 32-bit integer", param="priority")
        salt = self.cache_salt
        if salt is not None and not (0 < len(salt) <= _MAX_SALT_CHARS and not set(salt) & set("@/\\\0")):
            raise RequestError(
                f"cache_salt is {shown(salt)}: must be 1 to {_MAX_SALT_CHARS} characters, none of @ / \\ and NUL",
                param="cache_salt",
            )
        if self.truncation_side not in (None, "left", "right"):
            raise RequestError(
                f"truncation_side is {shown(self.truncation_side)}: must be left or right", param="truncation_side"
            )

    def sampling_params(
        self, max_tokens: int | None, defaults: dict[str, float], *, logprobs: int | None = None
    ) -> SamplingParams:
        """Return the request's parameters: its own values, else the model's, else OpenAI's.

        Args:
            max_tokens: As the endpoint resolves it.
            defaults: The model's.
            logprobs: As the endpoint resolves it.

        Raises:
            RequestError: If a value is out of its range.
        """
        given: dict[str, Any] = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        given |= {name: tuple(value) for name in _LISTS if (value := getattr(self, name)) is not None}
        if len(self.logit_bias or ()) > MAX_BIASED_TOKENS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias or ())} entries: at most {MAX_BIASED_TOKENS}", param="logit_bias"
            )
        if self.logit_bias:
            given["logit_bias"] = tuple((_token_id(key), bias) for key, bias in self.logit_bias.items())
        if self.allowed_token_ids == []:
            raise RequestError(
                "allowed_token_ids is empty: name the tokens, or leave it out", param="allowed_token_ids"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(**{**defaults, **given}, max_tokens=max_tokens, stop=stop, logprobs=logprobs)


def _token_id(key: str) -> int:
    # one way to write each: of two entries for a token nobody could say which counts
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and (key == "0" or key[0] != "0")):
        raise RequestError(f"logit_bias has the key {shown(key)}: must be a token id", param="logit_bias")
    return int(key)


def _is_same(value: object, neutral: object) -> bool:
    """Compare as JSON does: 0 is 0.0, and no False."""
    return value is neutral or (value == neutral and not isinstance(value, bool) and not isinstance(neutral, bool))
