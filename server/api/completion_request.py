"""The body of POST /v1/completions."""

from typing import Any, ClassVar

from ringserve.server.api.generation_fields import GenerationFields
from ringserve.server.errors import RequestError

DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 1024


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    needed: ClassVar[str | None] = "prompt"
    prompt: str | list[Any] | None = None
    logprobs: int | None = None

    def token_limit(self) -> int:
        """Return max_tokens.

        Raises:
            RequestError: If it is 0 without echo: nothing would be answered.
        """
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens is 0: must be at least 1, or 0 with echo", param="max_tokens")
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

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
