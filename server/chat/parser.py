"""From one choice's text to what a chat message has of it: reasoning, content, tool calls."""

from dataclasses import dataclass
from typing import NamedTuple

from ringserve.server.chat.reasoning import MARKERS, ReasoningText, ThinkSplitter
from ringserve.server.chat.tool_formats import TEXT
from ringserve.server.chat.tool_parser import TextOrCall, ToolCallDelta, ToolFormat, ToolParser


class ChatDelta(NamedTuple):
    """What a piece of text has brought: reasoning, then content and calls as the model wrote them one after another."""

    reasoning: str
    parts: tuple[TextOrCall, ...]

    @property
    def content(self) -> str:
        """All content."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """All calls."""
        return tuple(part for part in self.parts if isinstance(part, ToolCallDelta))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatParsing:
    """How to read a request's answers.

    Attributes:
        tools: The format of tool calls; TEXT: there are none.
        names: The functions that may be called.
        is_parallel: Whether an answer may have several calls; those after the first are left out if not.
        reasoning: What to do with `<think>`: None leaves it in the text; True: the prompt has opened it.
        include_reasoning: Whether the client wants to see it.
        call_finish: The finish reason of an answer with calls, where the model ended by itself.
    """

    tools: ToolFormat = TEXT
    names: frozenset[str] = frozenset()
    is_parallel: bool = True
    reasoning: bool | None = None
    include_reasoning: bool = True
    call_finish: str = "tool_calls"

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that must not be skipped."""
        return frozenset(self.tools.markers) | frozenset(() if self.reasoning is None else MARKERS)

    def parser(self) -> "ChatParser":
        """Return a parser for one choice."""
        return ChatParser(self)


class ChatParser:
    """The state of one choice."""

    def __init__(self, parsing: ChatParsing) -> None:
        self._parsing = parsing
        self._splitter = None if parsing.reasoning is None else ThinkSplitter(is_open=parsing.reasoning)
        self._tools = ToolParser(parsing.tools, parsing.names)

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has begun."""
        return self._tools.has_tool_calls

    def push(self, text: str) -> ChatDelta:
        """Take a piece of text; all pieces together may be grouped in any way."""
        split = ReasoningText("", text) if self._splitter is None else self._splitter.push(text)
        return self._delta(split.reasoning, self._tools.push(split.answer))

    def finish(self, text: str = "") -> ChatDelta:
        """Take the last piece, and return what it and all that was held back have brought."""
        before = self.push(text)
        split = ReasoningText("", "") if self._splitter is None else self._splitter.finish()
        more = self._delta(split.reasoning, self._tools.push(split.answer))
        last = self._delta("", self._tools.finish())
        deltas = (before, more, last)
        return ChatDelta(
            "".join(delta.reasoning for delta in deltas), tuple(part for delta in deltas for part in delta.parts)
        )

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason of a choice that ended with `reason`."""
        return self._parsing.call_finish if reason == "stop" and self.has_tool_calls else reason

    def _delta(self, reasoning: str, parts: tuple[TextOrCall, ...]) -> ChatDelta:
        if not self._parsing.is_parallel:
            parts = tuple(part for part in parts if isinstance(part, str) or part.index == 0)
        return ChatDelta(reasoning if self._parsing.include_reasoning else "", parts)
