"""Server-sent events: the bytes of each chunk, and the stream that writes them.

A chunk is a template of the request plus one escaped string; no object is made for it. Key sets as vLLM's: OpenAI
clients and vLLM's see what they know.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from server.errors import ServerError
from server.json_string import json_string, one_line
from server.outputs import CompletionOutput
from server.sink import DeltaWriter, Headers, Sink

SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamIdentity:
    """What all chunks of one response have in common."""

    response_id: str
    created: int
    model: str
    fingerprint: str


@dataclass(slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int = 0

    def to_json(self) -> bytes:
        """Return OpenAI's usage object."""
        total = self.prompt_tokens + self.completion_tokens
        form = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}'
        return form % (self.prompt_tokens, total, self.completion_tokens)


class ChunkFormat(Protocol):
    """Makes the chunks of one kind of response. `usage` is b"" or a JSON object for the chunk's `usage`."""

    def opening(self, num_choices: int, usage: bytes) -> bytes:
        """Return what comes before all text."""

    def delta_frame(self, index: int, usage: bytes) -> tuple[bytes, bytes]:
        """Return what comes before and after the JSON string of a chunk's text."""

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunk of one choice, with the text that is left."""

    def usage(self, usage: bytes) -> bytes:
        """Return the chunk without choices that reports usage."""


class ChatChunks:
    """/v1/chat/completions."""

    def __init__(self, identity: StreamIdentity) -> None:
        self._fingerprint = json_string(identity.fingerprint)
        self._head = _head(identity, "chat.completion.chunk")

    def opening(self, num_choices: int, usage: bytes) -> bytes:
        """Return a role chunk for each choice."""
        tail = b',"prompt_token_ids":null,"prompt_text":null}\n\n'
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"".join(
            b'%b[{"index":%d%b%b%b' % (self._head, index, delta, _field(usage), tail) for index in range(num_choices)
        )

    def delta_frame(self, index: int, usage: bytes) -> tuple[bytes, bytes]:
        """Return what comes before and after a chunk's text."""
        tail = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]%b}\n\n' % _field(usage)
        return b'%b[{"index":%d,"delta":{"content":' % (self._head, index), tail

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunk of one choice."""
        form = b'%b[{"index":%d,"delta":{"content":%b},"logprobs":null,%b,"token_ids":null}]%b%b}\n\n'
        fingerprint = _fingerprint(self._fingerprint, is_fingerprinted)
        content, reasons = json_string(output.text), _reasons(output)
        return form % (self._head, output.index, content, reasons, _field(usage), fingerprint)

    def usage(self, usage: bytes) -> bytes:
        """Return the usage chunk."""
        return _usage_chunk(self._head, usage, self._fingerprint)


class CompletionChunks:
    """/v1/completions."""

    def __init__(self, identity: StreamIdentity) -> None:
        self._fingerprint = json_string(identity.fingerprint)
        self._head = _head(identity, "text_completion")
        reasons = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
        self._delta_tail = reasons

    def opening(self, num_choices: int, usage: bytes) -> bytes:  # noqa: ARG002  # the protocol's
        """Return nothing: completions have no roles."""
        return b""

    def delta_frame(self, index: int, usage: bytes) -> tuple[bytes, bytes]:
        """Return what comes before and after a chunk's text."""
        return b'%b[{"index":%d,"text":' % (self._head, index), b"%b%b}\n\n" % (self._delta_tail, _field(usage))

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunk of one choice."""
        form = b'%b[{"index":%d,"text":%b,"logprobs":null,%b,"prompt_token_ids":null,"token_ids":null}]%b%b}\n\n'
        fingerprint = _fingerprint(self._fingerprint, is_fingerprinted)
        text, reasons = json_string(output.text), _reasons(output)
        return form % (self._head, output.index, text, reasons, _field(usage), fingerprint)

    def usage(self, usage: bytes) -> bytes:
        """Return the usage chunk."""
        return _usage_chunk(self._head, usage, self._fingerprint)


class EventStream:
    """One SSE response: an OutputWriter (server/collector.py) for all its choices.

    Status and headers leave with the first event, so an error before it is a real 4xx or 5xx.

    Args:
        num_choices: Sequences that the response ends with.
        num_prompt_tokens: Of each prompt; the choices are split evenly over them.
        include_usage: Send a usage chunk before [DONE].
        continuous_usage: Send usage in every chunk too.
    """

    def __init__(
        self,
        sink: Sink,
        form: ChunkFormat,
        *,
        num_choices: int,
        num_prompt_tokens: list[int],
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self._sink = sink
        self._form = form
        self._num_choices = num_choices
        self._num_unfinished = num_choices
        self._prompt_tokens = num_prompt_tokens
        self._completion_tokens = [0] * num_choices
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage and include_usage
        self._is_open = False
        self._is_finished = False

    @property
    def is_writable(self) -> bool:
        """Whether the client keeps up."""
        return self._sink.is_writable

    def write(self, output: CompletionOutput) -> None:
        """Send one choice's delta; an event without text, usage or finish is not sent."""
        if self._is_finished:  # another request of this response has failed: the connection is the next response's
            return
        self._completion_tokens[output.index] = output.num_tokens
        data = b"" if self._is_open else self._opening()
        usage = self._usage_of(output.index) if self._continuous_usage else b""
        if output.finish_reason is not None:
            data += self._form.finish(output, usage, is_fingerprinted=not self._include_usage)
            self._num_unfinished -= 1
            if self._num_unfinished == 0:
                self._finish(data)
                return
        elif output.text or usage:
            head, tail = self._form.delta_frame(output.index, usage)
            data += head + json_string(output.text) + tail
        if data:
            if not self._is_open:
                self._open()
            self._sink.write(data)

    def delta_writer(self, index: int) -> DeltaWriter | None:
        """Return a short cut for deltas of one choice whose text is ready as a JSON string; None if there is none yet.

        It writes nothing and returns False while the client does not keep up, or once the response has ended.
        """
        if not self._is_open or self._continuous_usage:
            return None
        return self._sink.framed(*self._form.delta_frame(index, b""))

    def fail(self, error: Exception) -> None:
        """End the response with an error: an event if it has begun, else a status of its own."""
        if self._is_finished:
            return
        self._is_finished = True
        error = error if isinstance(error, ServerError) else ServerError(str(error))
        body = one_line(_encode(error.body()))
        if self._is_open:
            self._sink.write(b"data: %b\n\n%b" % (body, DONE))
        else:
            self._sink.open(error.status, error_headers(error))
            self._sink.write(body)
        self._sink.finish()

    def _open(self) -> None:
        self._is_open = True
        self._sink.open(200, SSE_HEADERS)

    def _opening(self) -> bytes:
        usage = Usage(self._prompt_tokens[0]).to_json() if self._continuous_usage else b""
        return self._form.opening(self._num_choices, usage)

    def _usage_of(self, index: int) -> bytes:
        prompt = index * len(self._prompt_tokens) // self._num_choices
        return Usage(self._prompt_tokens[prompt], self._completion_tokens[index]).to_json()

    def _finish(self, data: bytes) -> None:
        self._is_finished = True
        if self._include_usage:
            total = Usage(sum(self._prompt_tokens), sum(self._completion_tokens))
            data += self._form.usage(total.to_json())
        if not self._is_open:
            self._open()
        self._sink.write(data + DONE)
        self._sink.finish()


def error_headers(error: ServerError) -> Headers:
    """Return the headers of an error response."""
    headers: Headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return headers


def _head(identity: StreamIdentity, kind: str) -> bytes:
    return b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":' % (
        json_string(identity.response_id), kind.encode(), identity.created, json_string(identity.model),
    )  # fmt: skip


def _field(usage: bytes) -> bytes:
    return b',"usage":' + usage if usage else b""


def _fingerprint(fingerprint: bytes, is_fingerprinted: bool) -> bytes:
    return b',"system_fingerprint":' + fingerprint if is_fingerprinted else b""


def _reasons(output: CompletionOutput) -> bytes:
    return b'"finish_reason":%b,"stop_reason":%b' % (_encode(output.finish_reason), _json_value(output.stop_reason))


def _json_value(value: "str | int | None") -> bytes:
    return json_string(value) if isinstance(value, str) else _encode(value)


def _usage_chunk(head: bytes, usage: bytes, fingerprint: bytes) -> bytes:
    return b'%b[],"usage":%b,"system_fingerprint":%b}\n\n' % (head, usage, fingerprint)
