"""Splits a model's reasoning, `<think>...</think>` at the beginning of its output, from its answer."""

from typing import NamedTuple

from ringserve.server.chat.text_scanner import Reads, TextScanner

MARKERS = ("<think>", "</think>")
REASONING_PARSERS = ("none", "think")  # as --reasoning-parser names them


class ReasoningText(NamedTuple):
    """What a piece of text has brought."""

    reasoning: str
    answer: str


class ThinkSplitter:
    """Splits one choice's text.

    Args:
        is_open: The prompt ends inside of `<think>`: the output begins with reasoning.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._text = TextScanner()
        self._reasoning: list[str] = []
        self._answer: list[str] = []
        self._reading = self._read(is_open)

    def push(self, text: str) -> ReasoningText:
        """Take a piece of text."""
        self._text.add(text)
        next(self._reading)
        return self._collected()

    def finish(self) -> ReasoningText:
        """Return what was held back."""
        self._text.end()
        next(self._reading, None)
        return self._collected()

    def _read(self, is_open: bool) -> Reads[None]:
        text = self._text
        text.hold()
        if not is_open:
            yield from text.space()
            is_open = yield from text.try_take("<think>")
        if is_open:
            yield from text.until("</think>", self._reasoning.append)
            yield from text.try_take("</think>")
        else:
            self._answer.append(text.held())
        yield from text.rest(self._answer.append)

    def _collected(self) -> ReasoningText:
        text = ReasoningText("".join(self._reasoning), "".join(self._answer))
        self._reasoning.clear()
        self._answer.clear()
        return text


def ends_in_reasoning(prompt: str) -> bool:
    """Whether a prompt leaves `<think>` open, as templates do that make the model think."""
    return prompt.rstrip().endswith("<think>")
