"""Chat templates: Jinja in a sandbox, with the globals that transformers gives its templates."""

import json
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.errors import RequestError, StartupError

_STUMBLES = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's turns for training; for serving it is its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja source.
        special_tokens: bos_token, eos_token and the like, for the template to use.

    Raises:
        StartupError: If the source is no template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise StartupError(f"the chat template is not valid Jinja: {exc}") from exc

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt.

        Args:
            messages: Each with `role` and `content`, a string.
            tools: OpenAI's `tools`.
            documents: For templates that quote them.
            add_generation_prompt: End with the beginning of the assistant's turn.
            extra: Further variables of the template; the names above win.

        Raises:
            RequestError: If the template refuses the messages, or stumbles over them.
        """
        try:
            return self._template.render({
                **extra, **self._special_tokens, "messages": messages, "tools": tools, "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            })  # fmt: skip
        except _STUMBLES as exc:
            raise RequestError(f"the model's chat template refuses these messages: {exc}", param="messages") from exc


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
