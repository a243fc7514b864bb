"""Chat answers with tool calls or reasoning: their stream chunks, and their whole messages."""

from typing import Any

import msgspec

from ringserve.server.api.render.choices import chat_choice
from ringserve.server.api.render.chunks import PLAIN, ChatChunks, Shown, StreamIdentity
from ringserve.server.chat.parser import ChatDelta, ChatParser, ChatParsing
from ringserve.server.chat.tool_parser import TextOrCall, ToolCallDelta
from ringserve.server.generation.outputs import CompletionOutput
from ringserve.server.text.json_string import json_string


class ParsedChunks:
    """A ChunkFormat: ChatChunks whose text is parsed. Each tool call delta is a chunk of its own: so clients add up.

    An output's logprobs, token ids and usage are its last chunk's.
    """

    def __init__(self, identity: StreamIdentity, shown: Shown = PLAIN, *, parsing: ChatParsing) -> None:
        self._chunks = ChatChunks(identity, shown)
        self._shown = shown
        self._parsing = parsing
        self._parsers: dict[int, ChatParser] = {}

    def opening(self, num_choices: int, usage: bytes) -> bytes:
        """Return a role chunk for each choice."""
        return self._chunks.opening(num_choices, usage)

    def delta_frame(self, index: int) -> None:  # noqa: ARG002  # the protocol's
        """Return None: every text is parsed."""
        return

    def delta(self, output: CompletionOutput, usage: bytes) -> bytes:
        """Return the chunks of a delta; none while the parser holds its text back, unless there is more to show."""
        deltas = _deltas(self._parser(output.index).push(output.text))
        if not deltas:
            if not usage and (self._shown.is_plain or not output.token_ids):
                return b""
            deltas = [b"{}"]
        before = self._before(output, deltas[:-1], usage)
        return before + self._chunks.delta_chunk(output, deltas[-1], usage)

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunks of one choice."""
        parser = self._parser(output.index)
        deltas = _deltas(parser.finish(output.text)) or [b"{}"]
        before = self._before(output, deltas[:-1], usage)
        last = msgspec.structs.replace(output, finish_reason=parser.finish_reason(output.finish_reason))
        return before + self._chunks.finish_chunk(last, deltas[-1], usage, is_fingerprinted=is_fingerprinted)

    def usage(self, usage: bytes) -> bytes:
        """Return the usage chunk."""
        return self._chunks.usage(usage)

    def _parser(self, index: int) -> ChatParser:
        if index not in self._parsers:
            self._parsers[index] = self._parsing.parser()
        return self._parsers[index]

    def _before(self, output: CompletionOutput, deltas: list[bytes], usage: bytes) -> bytes:
        bare = CompletionOutput(output.index, "", [], num_tokens=output.num_tokens)
        return b"".join(self._chunks.delta_chunk(bare, delta, usage) for delta in deltas)


def parsed_choice(parsing: ChatParsing, output: CompletionOutput, shown: Shown) -> dict[str, Any]:
    """Return one choice of a whole answer; a ChoiceFormat, once it has its parsing."""
    choice = chat_choice(output, shown)
    message, choice["finish_reason"] = parsed_message(output, parsing)
    choice["message"] |= message
    return choice


def parsed_message(output: CompletionOutput, parsing: ChatParsing) -> tuple[dict[str, Any], str | None]:
    """Return what a whole answer's message has in place of its text, and the choice's finish reason."""
    parser = parsing.parser()
    delta = parser.finish(output.text)
    calls = _whole_calls(delta.tool_calls)
    message: dict[str, Any] = {"content": delta.content or (None if calls or delta.reasoning else "")}
    if parsing.reasoning is not None:
        reasoning = delta.reasoning or None
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message, parser.finish_reason(output.finish_reason)


def _whole_calls(deltas: tuple[ToolCallDelta, ...]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.id is not None:
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += delta.arguments
    return calls


def _deltas(delta: ChatDelta) -> list[bytes]:
    """Return the `delta` objects of the chunks: what the parser found, in the order in which the model wrote it."""
    deltas = []
    if delta.reasoning:  # under vLLM's name, and the one that other servers and clients have
        text = json_string(delta.reasoning)
        deltas.append(b'{"reasoning":%b,"reasoning_content":%b}' % (text, text))
    return deltas + [_part(part) for part in delta.parts]


def _part(part: TextOrCall) -> bytes:
    if isinstance(part, str):
        return b'{"content":%b}' % json_string(part)
    return b'{"tool_calls":[%b]}' % _tool_call(part)


def _tool_call(call: ToolCallDelta) -> bytes:
    arguments = json_string(call.arguments)
    if call.id is None:
        return b'{"index":%d,"function":{"arguments":%b}}' % (call.index, arguments)
    assert call.name is not None
    form = b'{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}'
    return form % (call.index, json_string(call.id), json_string(call.name), arguments)
