"""Chat templates: Jinja in a sandbox, with the globals that transformers gives its templates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ringserve.server.errors import RequestError, StartupError, shown
from ringserve.server.text.tokenizer import read_json

_STUMBLES = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip
_MARK = "\ue000ringserve-end\ue001"  # private characters, which no template knows


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's turns for training; for serving it is its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """What a chat template gets.

    Attributes:
        messages: Each with `role` and `content`, a string.
        tools: OpenAI's `tools`.
        documents: For templates that quote them.
        add_generation_prompt: End with the beginning of the assistant's turn.
        continues_final_message: End inside the last message, for the answer to go on with it.
        extra: Further variables of the template; the names above win.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continues_final_message: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja source.
        special_tokens: bos_token, eos_token and the like, for the template to use.

    Attributes:
        takes_tools: Whether it shows tools to the model.

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
        self._knows_developer = "developer" in source
        self.source = source
        try:
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise StartupError(f"the chat template is not valid Jinja: {exc}") from exc

    def render(self, prompt: ChatPrompt) -> str:
        """Return the prompt's text.

        Raises:
            RequestError: If the template refuses the messages, or stumbles over them.
        """
        messages = prompt.messages if self._knows_developer else [_as_system(message) for message in prompt.messages]
        text = self._render(prompt, messages)
        return self._without_end(prompt, messages, text) if prompt.continues_final_message else text

    def _render(self, prompt: ChatPrompt, messages: list[dict[str, Any]]) -> str:
        names = {
            **prompt.extra, **self._special_tokens, "messages": messages, "tools": prompt.tools,
            "documents": prompt.documents, "add_generation_prompt": prompt.add_generation_prompt,
        }  # fmt: skip
        try:
            return self._template.render(names)
        except _STUMBLES as exc:
            raise RequestError(f"the model's chat template refuses these messages: {exc}", param="messages") from exc

    def _without_end(self, prompt: ChatPrompt, messages: list[dict[str, Any]], text: str) -> str:
        """Cut a rendered chat behind its last message's content.

        Where that is, a mark behind the content shows: the template's ending may hold the content's text too. Templates
        may strip a content, and the mark keeps them from it: so what stands before it is compared with `text`.
        """
        last = messages[-1]
        content = str(last["content"])
        before, mark, _ = self._render(prompt, [*messages[:-1], {**last, "content": content + _MARK}]).partition(_MARK)
        kept = before if text.startswith(before) else before.rstrip()
        if not mark or not content.strip() or not text.startswith(kept):
            raise RequestError(
                "continue_final_message is true, but the last message is empty, or changed by the model's chat "
                "template",
                param="continue_final_message",
            )
        return kept


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    """Return a developer's message as the system's, for templates that know no developer."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def load_chat_template(directory: Path, override: str | None, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """Return the model's chat template, or None if it has none.

    Args:
        directory: The model's.
        override: A file's path, or Jinja source; wins over the model's own.
        special_tokens: For the template to use.

    Raises:
        StartupError: If the template is missing or not valid.
    """
    source = _template_source(directory) if override is None else _override_source(override)
    return None if source is None else ChatTemplate(source, special_tokens)


def _template_source(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    template = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        path = directory / "tokenizer_config.json"
        raise StartupError(f"chat_template in {path} is {shown(template)}: must be a text, or a list with a default")
    return template


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise StartupError(f"{path} cannot be read as text: {exc}") from exc


def _override_source(override: str) -> str:
    if "{" in override:
        return override
    if not Path(override).is_file():
        raise StartupError(f"--chat-template {override!r} is neither Jinja source nor a file")
    return _read_text(Path(override))
