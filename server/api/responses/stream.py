"""What a model's output becomes in /v1/responses: output items, and the events that tell of them as they grow.

One way for both modes: a response that is wanted whole is a stream of one delta whose events nobody reads.
Loop thread only.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from ringserve.server.api.render.logprob_format import ChatLogprobs
from ringserve.server.api.responses.items import Item, new_id
from ringserve.server.chat.parser import ChatDelta
from ringserve.server.chat.tool_parser import ToolCallDelta
from ringserve.server.errors import ServerError
from ringserve.server.generation.outputs import CompletionOutput
from ringserve.server.text.json_string import json_string, one_line

_encode = msgspec.json.encode


class TextParser(Protocol):
    """Tells reasoning, text and tool calls apart."""

    def push(self, text: str) -> ChatDelta:
        """Return what a delta means."""

    def finish(self) -> ChatDelta:
        """Return what was held back."""


class CachedPrompt(Protocol):
    """What knows how much of a prompt was cached, once the first token is there: a collector, or a RequestOutput."""

    num_cached_tokens: int


class PlainParser:
    """Takes everything for text."""

    def push(self, text: str) -> ChatDelta:
        """Return the delta as text."""
        return ChatDelta("", (text,) if text else ())

    def finish(self) -> ChatDelta:
        """Return nothing."""
        return ChatDelta("", ())


class _Events:
    """Numbers a stream's events, from 0."""

    def __init__(self) -> None:
        self._number = 0

    def take_number(self) -> int:
        """Return the next event's number."""
        self._number += 1
        return self._number - 1

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return an event."""
        return self.event_of(kind, one_line(_encode(fields)))

    def event_of(self, kind: str, fields: bytes) -> bytes:
        """Return an event whose fields are a JSON object already."""
        name = kind.encode()
        form = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n'
        return form % (name, name, self.take_number(), fields[1:])


class _TextKind(NamedTuple):
    """What differs between a message and reasoning."""

    id_prefix: str
    item: dict[str, Any]
    part: dict[str, Any]
    event: str
    has_logprobs: bool


_MESSAGE = _TextKind(
    "msg", {"type": "message", "role": "assistant"}, {"type": "output_text", "annotations": []},
    "response.output_text", True,
)  # fmt: skip
_REASONING = _TextKind(
    "rs", {"type": "reasoning", "summary": [], "encrypted_content": None}, {"type": "reasoning_text"},
    "response.reasoning_text", False,
)  # fmt: skip


class _TextItem:
    """A message or reasoning that grows: an item with one part of text."""

    def __init__(self, kind: _TextKind, output_index: int, events: _Events, logprobs: list[bytes]) -> None:
        self.kind = kind
        self._events = events
        self._id = new_id(kind.id_prefix)
        self._where = {"item_id": self._id, "output_index": output_index, "content_index": 0}
        self._output_index = output_index
        self._texts: list[str] = []
        self._logprobs = logprobs  # JSON of the tokens so far, each item of one or more entries; another fills it
        self._num_sent_logprobs = 0
        self._no_logprobs = b',"logprobs":[]' if kind.has_logprobs else b""
        name = f"{kind.event}.delta".encode()
        self._delta_head = b'event: %b\ndata: {"type":"%b",%b,"delta":' % (name, name, _encode(self._where)[1:-1])

    def open(self) -> bytes:
        """Return the events that announce it."""
        item = {**self.kind.item, "id": self._id, "status": "in_progress", "content": []}
        added = self._events.event("response.output_item.added", output_index=self._output_index, item=item)
        return added + self._events.event("response.content_part.added", **self._where, part=self._part("", b"[]"))

    def add(self, text: str) -> bytes:
        """Return the event of more text."""
        self._texts.append(text)
        number = self._events.take_number()
        return b'%b%b%b,"sequence_number":%d}\n\n' % (
            self._delta_head,
            json_string(text),
            self._take_logprobs(),
            number,
        )

    def _take_logprobs(self) -> bytes:
        start, self._num_sent_logprobs = self._num_sent_logprobs, len(self._logprobs)
        if start == self._num_sent_logprobs:
            return self._no_logprobs
        return b',"logprobs":[%b]' % b",".join(self._logprobs[start:])

    def close(self, status: str) -> bytes:
        """Return the events that end it, after one for the logprobs of tokens without text, such as the last."""
        rest = self.add("") if self._num_sent_logprobs < len(self._logprobs) else b""
        text, entries = "".join(self._texts), self._entries()
        logprobs = {"logprobs": msgspec.Raw(entries)} if self.kind.has_logprobs else {}
        part = self._part(text, entries)
        return b"".join((
            rest,
            self._events.event(f"{self.kind.event}.done", **self._where, text=text, **logprobs),
            self._events.event("response.content_part.done", **self._where, part=part),
            self._events.event(
                "response.output_item.done", output_index=self._output_index, item=self.to_item(status)
            ),
        ))  # fmt: skip

    def to_item(self, status: str) -> Item:
        """Return the item as it is now."""
        part = self._part("".join(self._texts), self._entries())
        return {**self.kind.item, "id": self._id, "status": status, "content": [part]}

    def _entries(self) -> bytes:
        return b"[%b]" % b",".join(self._logprobs)

    def _part(self, text: str, entries: bytes) -> dict[str, Any]:
        logprobs = {"logprobs": msgspec.Raw(entries)} if self.kind.has_logprobs else {}
        return {**self.kind.part, "text": text, **logprobs}


class _CallItem:
    """A function call whose arguments grow."""

    def __init__(self, call: ToolCallDelta, output_index: int, events: _Events) -> None:
        self.index = call.index
        self._events = events
        self._id = new_id("fc")
        self._call_id = call.id or new_id("call")
        self._name = call.name or ""
        self._where = {"item_id": self._id, "output_index": output_index}
        self._output_index = output_index
        self._arguments: list[str] = []

    def open(self) -> bytes:
        """Return the event that announces it."""
        item = self.to_item("in_progress")
        return self._events.event("response.output_item.added", output_index=self._output_index, item=item)

    def add(self, arguments: str) -> bytes:
        """Return the event of more arguments."""
        self._arguments.append(arguments)
        return self._events.event("response.function_call_arguments.delta", **self._where, delta=arguments)

    def close(self, status: str) -> bytes:
        """Return the events that end it."""
        item = self.to_item(status)
        arguments = item["arguments"]
        done = self._events.event(
            "response.function_call_arguments.done", **self._where, name=self._name, arguments=arguments
        )
        return done + self._events.event("response.output_item.done", output_index=self._output_index, item=item)

    def to_item(self, status: str) -> Item:
        """Return the item as it is now."""
        return {
            "type": "function_call", "id": self._id, "status": status, "call_id": self._call_id, "name": self._name,
            "arguments": "".join(self._arguments),
        }  # fmt: skip


class ResponseEvents:
    """A ChunkFormat (server/api/render/chunks.py) that makes one response's events, and the response itself.

    Args:
        base: The response object without what the output decides.
        parser: Tells the output's kinds of text apart.
        num_prompt_tokens: For usage.
        count_tokens: Of a text, for usage.
        logprobs: Makes the logprobs of an output's tokens, if they are wanted; then the output is text alone.
        on_end: Called with the finished response, encoded, before its last event is written.
    """

    def __init__(
        self,
        base: dict[str, Any],
        parser: TextParser,
        *,
        num_prompt_tokens: int,
        count_tokens: Callable[[str], int],
        on_end: Callable[[bytes], None],
        logprobs: ChatLogprobs | None = None,
    ) -> None:
        self.response = b""  # encoded, once it has ended
        self._head = one_line(_encode(base))[:-1]  # of the response object, encoded here: not on the way of tokens
        self._parser = parser
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._on_end = on_end
        self._format = logprobs
        self._logprobs: list[bytes] = []  # of the text; texts that come later wait here for an item
        self._count_tokens = count_tokens
        self._prompts: Sequence[CachedPrompt] = ()
        self._events = _Events()
        self._closed: list[Item] = []
        self._open: _TextItem | _CallItem | None = None

    def reading(self, prompts: Sequence[CachedPrompt]) -> "ResponseEvents":
        """Return the same, from now on with the number of cached tokens of the one prompt."""
        self._prompts = prompts
        return self

    def opening(self, num_choices: int, usage: bytes) -> bytes:  # noqa: ARG002  # the protocol's
        """Return the events that come before all output."""
        response = msgspec.Raw(self._response("in_progress", []))
        created = self._events.event("response.created", response=response)
        return created + self._events.event("response.in_progress", response=response)

    def delta_frame(self, index: int) -> None:  # noqa: ARG002  # the protocol's
        """Return None: each event has a number of its own."""
        return

    def delta(self, output: CompletionOutput, usage: bytes) -> bytes:  # noqa: ARG002  # the protocol's
        """Return the events of a delta."""
        self._num_tokens = output.num_tokens
        if self._format is not None and output.logprobs is not None and output.token_ids:
            self._logprobs.append(self._format.content_json(output.logprobs)[1:-1])
        return self._take(self._parser.push(output.text))

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:  # noqa: ARG002
        """Return the events of the last delta, and those that end the response."""
        data = self.delta(output, b"") + self._take(self._parser.finish())
        if self._open is None and not self._closed:
            data += self._switch_to(self._text_item(_MESSAGE))
        status = "completed" if output.finish_reason == "stop" else "incomplete"
        data += self._close(status)
        details = {"reason": "max_output_tokens"} if output.finish_reason == "length" else None
        response = self._response(status, self._closed, incomplete_details=details)
        self._end(response)
        return data + self._events.event(f"response.{status}", response=msgspec.Raw(response))

    def usage(self, usage: bytes) -> bytes:  # noqa: ARG002  # the protocol's
        """Return nothing: usage is part of the response."""
        return b""

    def failure(self, error: ServerError) -> bytes:
        """Return the events that end a response that has begun with an error."""
        items = self._closed if self._open is None else [*self._closed, self._open.to_item("incomplete")]
        told = {"code": error.code or "server_error", "message": str(error)}
        response = self._response("failed", items, error=told)
        self._end(response)
        data = self._events.event("error", **told, param=error.param)
        return data + self._events.event("response.failed", response=msgspec.Raw(response))

    def whole(self, output: CompletionOutput) -> bytes:
        """Return the response, encoded, of an output that has come at once."""
        self.finish(output, b"", is_fingerprinted=False)
        return self.response

    def _take(self, delta: ChatDelta) -> bytes:
        data = b""
        if delta.reasoning:
            data += self._add_text(_REASONING, delta.reasoning)
        for part in delta.parts:
            data += self._add_text(_MESSAGE, part) if isinstance(part, str) else self._add_call(part)
        return data

    def _add_text(self, kind: _TextKind, text: str) -> bytes:
        item, data = self._open, b""
        if not isinstance(item, _TextItem) or item.kind is not kind:
            item = self._text_item(kind)
            data = self._switch_to(item)
        return data + item.add(text)

    def _add_call(self, call: ToolCallDelta) -> bytes:
        item, data = self._open, b""
        if not isinstance(item, _CallItem) or item.index != call.index:
            item = _CallItem(call, self._next_index(), self._events)
            data = self._switch_to(item)
        return data + item.add(call.arguments) if call.arguments else data

    def _text_item(self, kind: _TextKind) -> _TextItem:
        return _TextItem(kind, self._next_index(), self._events, self._logprobs)

    def _next_index(self) -> int:
        return len(self._closed) + (self._open is not None)

    def _switch_to(self, item: _TextItem | _CallItem) -> bytes:
        data = self._close("completed")
        self._open = item
        return data + item.open()

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        self._closed.append(item.to_item(status))
        return item.close(status)

    def _end(self, response: bytes) -> None:
        self.response = response
        self._on_end(response)

    def _response(
        self,
        status: str,
        output: list[Item],
        *,
        error: dict[str, str] | None = None,
        incomplete_details: dict[str, str] | None = None,
    ) -> bytes:
        """Return the response object as it is now, on one line."""
        has_ended = status != "in_progress"
        rest = {
            "status": status, "output": output, "completed_at": int(time.time()) if status == "completed" else None,
            "usage": self._usage() if has_ended else None, "error": error, "incomplete_details": incomplete_details,
        }  # fmt: skip
        return b"%b,%b" % (self._head, one_line(_encode(rest))[1:])

    def _num_reasoning_tokens(self) -> int:
        """Return how many tokens the reasoning is; where its tokens end, an output that came at once does not say."""
        texts = [item["content"][0]["text"] for item in self._closed if item["type"] == "reasoning"]
        return sum(map(self._count_tokens, texts))

    def _usage(self) -> dict[str, Any]:
        num_cached = sum(prompt.num_cached_tokens for prompt in self._prompts)
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }
