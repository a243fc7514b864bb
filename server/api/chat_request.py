"""The body of POST /v1/chat/completions."""

from typing import Any, ClassVar

from ringserve.server.api.generation_fields import NEUTRAL, GenerationFields
from ringserve.server.chat.messages import ChatMessage
from ringserve.server.chat.template import ChatPrompt
from ringserve.server.chat.tools import Tool, ToolChoice, ToolUse, tool_use
from ringserve.server.errors import RequestError, shown


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        name: values for name, values in NEUTRAL.items() if name not in ("tools", "tool_choice")
    }
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def limit_name(self) -> str:
        """The field that limits the answer's tokens: the one that the client has sent."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def token_limit(self) -> int | None:
        """Return max_completion_tokens, or its older name's value.

        Raises:
            RequestError: If it is below 1.
        """
        for name in ("max_completion_tokens", "max_tokens"):
            limit: int | None = getattr(self, name)
            if limit is not None and limit < 1:
                raise RequestError(f"{name} is {shown(limit)}: must be at least 1", param=name)
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        """Return how many most likely tokens to report beside each sampled one; None: no logprobs.

        Raises:
            RequestError: If top_logprobs is set without logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs is {shown(self.top_logprobs)} without logprobs: set logprobs to true",
                param="top_logprobs",
            )
        return (self.top_logprobs or 0) if self.logprobs else None

    def tool_use(self) -> ToolUse | None:
        """Return what the request wants of its tools; None if it has none.

        Raises:
            RequestError: If that makes no sense.
        """
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def chat_prompt(self) -> ChatPrompt:
        """Return what the chat template gets.

        Raises:
            RequestError: If there are no messages, one is not text, or the options contradict each other.
        """
        if not self.messages:
            raise RequestError("messages is empty: at least one message", param="messages")
        if self.chat_template is not None:
            raise RequestError(
                "chat_template is set: templates of requests are not trusted, start the server with --chat-template",
                param="chat_template",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true: leave one out",
                param="continue_final_message",
            )
        extra = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            extra["reasoning_effort"] = self.reasoning_effort
        return ChatPrompt(
            messages=[message.to_template(place) for place, message in enumerate(self.messages)],
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            continues_final_message=bool(self.continue_final_message),
            extra=extra,
        )

    def echoed_text(self, prompt: ChatPrompt) -> str:
        """Return what `echo` puts in front of the answer: the last message, if it is the assistant's."""
        last = prompt.messages[-1]
        return str(last["content"]) if last["role"] == "assistant" else ""
