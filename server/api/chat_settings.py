"""How this server's model calls tools and shows its reasoning: from its chat template and the command line."""

from dataclasses import dataclass, replace

from ringserve.server.api.chat_request import ChatCompletionRequest
from ringserve.server.chat.parser import ChatParsing
from ringserve.server.chat.reasoning import ends_in_reasoning
from ringserve.server.chat.template import ChatPrompt, ChatTemplate
from ringserve.server.chat.tool_formats import FORMATS, format_of_template
from ringserve.server.chat.tool_parser import ToolFormat
from ringserve.server.chat.tools import ToolUse
from ringserve.server.workers import run_near

_INLINE_MESSAGES = 256  # so many take about half a millisecond


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSettings:
    """What is the same for all chats.

    Attributes:
        tool_format: In which the model calls tools by itself; None: not known.
        takes_tools: Whether the chat template shows tools to the model; where it does not, the system's turn does.
        splits_reasoning: Whether `<think>` is split off.
    """

    tool_format: ToolFormat | None = None
    takes_tools: bool = False
    splits_reasoning: bool = False

    @classmethod
    def of(cls, template: ChatTemplate | None, tool_parser: str, reasoning_parser: str) -> "ChatSettings":
        """Return the settings for a template and two of the command line's names."""
        takes_tools = template is not None and template.takes_tools
        name: str | None = tool_parser
        if tool_parser == "auto":  # a template without tools gets them in the words of the Hermes format
            name = format_of_template(template.source) if template is not None and takes_tools else "hermes"
        return cls(
            tool_format=FORMATS.get(name or ""), takes_tools=takes_tools, splits_reasoning=reasoning_parser == "think"
        )

    def prompt(self, prompt: ChatPrompt, use: ToolUse | None) -> ChatPrompt:
        """Return a prompt that tells the model of its tools.

        Raises:
            RequestError: If the model's calls could not be read.
        """
        if use is None:
            return prompt
        use.format(self.tool_format)
        if self.takes_tools:
            return replace(prompt, tools=use.for_template())
        return replace(prompt, messages=use.told(prompt.messages))

    async def prompt_of(self, request: ChatCompletionRequest, use: ToolUse | None) -> ChatPrompt:
        """Return a request's prompt, told of its tools; made on a thread if there may be much of it.

        Raises:
            RequestError: As ChatCompletionRequest.chat_prompt and `prompt`.
        """
        has_calls = any(message.tool_calls for message in request.messages)
        is_short = len(request.messages) <= _INLINE_MESSAGES and not has_calls
        return await run_near(is_short, lambda: self.prompt(request.chat_prompt(), use))

    def parsing(self, use: ToolUse | None, prompt: str, *, include_reasoning: bool) -> ChatParsing | None:
        """Return how to read the answers to a prompt; None: they are plain text."""
        reasoning = ends_in_reasoning(prompt) if self.splits_reasoning else None
        if use is None or use.mode == "none":
            if reasoning is None:
                return None
            return ChatParsing(reasoning=reasoning, include_reasoning=include_reasoning)
        return ChatParsing(
            tools=use.format(self.tool_format),
            names=use.names,
            is_parallel=use.is_parallel,
            reasoning=reasoning,
            include_reasoning=include_reasoning,
            call_finish=use.call_finish,
        )
