"""Request bodies of the OpenAI endpoints: strict types, unknown fields ignored, unsupported ones refused by name."""

from typing import Any

import msgspec

from server.errors import RequestError, shown
from server.sampling_params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16

# Fields that change the answer and are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "structural_tag": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _GenerationFields(msgspec.Struct, kw_only=True):
    """What both endpoints share; msgspec has no other way to flatten fields."""

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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None
    request_id: str | None = None
    best_of: Any = None
    echo: Any = None
    frequency_penalty: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_whitespace_pattern: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    modalities: Any = None
    presence_penalty: Any = None
    prompt_logprobs: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None

    def check(self) -> None:
        """Refuse fields that are not supported, and stream_options without stream.

        Raises:
            RequestError: Naming the field.
        """
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and not any(_is_same(value, v) for v in neutral):
                raise RequestError(
                    f"{name} is {shown(value)}: this server does not support it, leave it out", param=name
                )
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is set without stream: set stream to true, or leave it out", param="stream_options"
            )

    def sampling_params(self, max_tokens: int | None, defaults: dict[str, float]) -> SamplingParams:
        """Return the request's parameters: its own values, else the model's, else OpenAI's.

        Raises:
            RequestError: If a value is out of its range.
        """
        names = (
            "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
            "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "stream_interval",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        stop_token_ids = tuple(self.stop_token_ids or ())
        return SamplingParams(**{**defaults, **given}, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids)


class CompletionRequest(_GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any] | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: each a text or a list of token ids.

        Raises:
            RequestError: If there are none, or they are of mixed kinds.
        """
        prompt = self.prompt
        if prompt is None or prompt == []:
            raise RequestError("prompt is missing or empty: a text, token ids, or a list of either", param="prompt")
        if isinstance(prompt, str):
            return [prompt]
        if type(prompt[0]) is int:  # the others are checked with the vocabulary, after the length
            return [prompt]
        if len(prompt) > _MAX_PROMPTS:
            raise RequestError(f"prompt is a list of {len(prompt)}: at most {_MAX_PROMPTS} prompts", param="prompt")
        if all(type(item) is str for item in prompt) or all(type(item) is list for item in prompt):
            return prompt
        raise RequestError(
            "prompt is a list of mixed or wrong kinds: all texts, all token ids (integers), or all lists of token ids",
            param="prompt",
        )


_MAX_PROMPTS = 1024


class ChatMessage(msgspec.Struct):
    """One message; fields that the template may use are kept."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None

    def to_template(self) -> dict[str, Any]:
        """Return the message as templates expect it: content a string, "" where there is none.

        Raises:
            RequestError: If a content part is not text.
        """
        message: dict[str, Any] = {"role": self.role, "content": _content_text(self.content)}
        for name in ("name", "tool_calls", "tool_call_id"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


class ChatCompletionRequest(_GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    def token_limit(self) -> int | None:
        """Return max_completion_tokens, or its older name's value.

        Raises:
            RequestError: If it is below 1.
        """
        limit = self.max_completion_tokens
        if limit is not None and limit < 1:
            raise RequestError(
                f"max_completion_tokens is {shown(limit)}: must be at least 1", param="max_completion_tokens"
            )
        return self.max_tokens if limit is None else limit

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template.

        Raises:
            RequestError: If there are none, or one is not text.
        """
        if not self.messages:
            raise RequestError("messages is empty: at least one message", param="messages")
        return [message.to_template() for message in self.messages]


def _content_text(content: "str | list[Any] | None") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f'messages has a content part {shown(part)}: only {{"type": "text", "text": ...}} is supported',
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _is_same(value: object, neutral: object) -> bool:
    """Compare as JSON does: 0 is 0.0, and no False."""
    return value is neutral or (value == neutral and not isinstance(value, bool) and not isinstance(neutral, bool))
