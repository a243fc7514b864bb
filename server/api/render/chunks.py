"""The JSON of stream chunks: a template of the request plus one escaped string; no object is made for a chunk.

Key sets as vLLM's: OpenAI's clients and vLLM's see what they know.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from ringserve.server.generation.outputs import CompletionOutput, TokenLogprobs
from ringserve.server.text.json_string import json_string

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
    """Tokens of a request; those of its prompt that were cached, if that is to be told."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None

    def to_json(self) -> bytes:
        """Return OpenAI's usage object."""
        total = self.prompt_tokens + self.completion_tokens
        details = (
            b""
            if self.cached_tokens is None
            else (b',"prompt_tokens_details":{"cached_tokens":%d}' % self.cached_tokens)
        )
        form = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}'
        return form % (self.prompt_tokens, total, self.completion_tokens, details)


class LogprobFormat(Protocol):
    """Makes the JSON of one choice's logprobs; called in the order of its tokens."""

    def to_json(self, index: int, logprobs: TokenLogprobs) -> bytes:
        """Return the `logprobs` object of choice `index`."""

    def token_json(self, index: int, token_ids: list[int], numbers: list[bytes]) -> bytes:
        """Return that of one token, whose entries' logprobs are JSON numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What a request wants to see beside text.

    Attributes:
        logprobs: How, if at all.
        token_ids: Whether each delta brings its token ids.
        prompt_token_ids: Of each prompt, for each choice's first chunk; None if they are not wanted.
        sequences_per_prompt: n; choice i belongs to prompt i // n.
    """

    logprobs: LogprobFormat | None = None
    token_ids: bool = False
    prompt_token_ids: list[list[int]] | None = None
    sequences_per_prompt: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether a delta is its text alone."""
        return self.logprobs is None and not self.token_ids

    def logprobs_json(self, output: CompletionOutput) -> bytes:
        """Return the `logprobs` of a delta or a choice."""
        if self.logprobs is None or output.logprobs is None:
            return b"null"
        return self.logprobs.to_json(output.index, output.logprobs)

    def token_ids_json(self, output: CompletionOutput) -> bytes:
        """Return the `token_ids` of a delta or a choice."""
        return _encode(output.token_ids) if self.token_ids else b"null"

    def prompt_token_ids_json(self, index: int) -> bytes:
        """Return the `prompt_token_ids` of a choice."""
        ids = self.prompt_token_ids
        return b"null" if ids is None else _encode(ids[index // self.sequences_per_prompt])

    def is_empty(self, output: CompletionOutput) -> bool:
        """Whether a delta has nothing to show."""
        return not output.text and (self.is_plain or not output.token_ids)


PLAIN = Shown()


class DeltaFrame(NamedTuple):
    """What stands around a delta's text, a JSON string, and around its logprobs if it has any."""

    head: bytes
    tail: bytes
    middle: bytes = b""  # after the text, before the logprobs
    logprobs: LogprobFormat | None = None


class ChunkFormat(Protocol):
    """Makes the chunks of one kind of response. `usage` is b"" or a JSON object for the chunk's `usage`."""

    def opening(self, num_choices: int, usage: bytes) -> bytes:
        """Return what comes before all text."""

    def delta_frame(self, index: int) -> DeltaFrame | None:
        """Return what all deltas of a choice but its first have in common; None if `delta` must make each."""

    def delta(self, output: CompletionOutput, usage: bytes) -> bytes:
        """Return the chunk, or the chunks, of a delta that does not end its choice; b"" if there is nothing to send."""

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunk of one choice, with the text that is left."""

    def usage(self, usage: bytes) -> bytes:
        """Return the chunk without choices that reports usage."""


class ChatChunks:
    """/v1/chat/completions."""

    def __init__(self, identity: StreamIdentity, shown: Shown = PLAIN) -> None:
        self._shown = shown
        self._fingerprint = json_string(identity.fingerprint)
        self._head = _head(identity, "chat.completion.chunk")

    def opening(self, num_choices: int, usage: bytes) -> bytes:
        """Return a role chunk for each choice."""
        tail = b',"prompt_token_ids":%b,"prompt_text":null}\n\n' % self._shown.prompt_token_ids_json(0)
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"".join(
            b'%b[{"index":%d%b%b%b' % (self._head, index, delta, _field(usage), tail) for index in range(num_choices)
        )

    def delta_frame(self, index: int) -> DeltaFrame | None:
        """Return what comes before and after a delta's text."""
        head = b'%b[{"index":%d,"delta":{"content":' % (self._head, index)
        return _frame(self._shown, head, b'},"logprobs":', b',"finish_reason":null,"token_ids":null}]}\n\n')

    def delta(self, output: CompletionOutput, usage: bytes) -> bytes:
        """Return the chunk of a delta."""
        if self._shown.is_empty(output) and not usage:
            return b""
        return self.delta_chunk(output, b'{"content":%b}' % json_string(output.text), usage)

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunk of one choice."""
        delta = b'{"content":%b}' % json_string(output.text)
        return self.finish_chunk(output, delta, usage, is_fingerprinted=is_fingerprinted)

    def delta_chunk(self, output: CompletionOutput, delta: bytes, usage: bytes) -> bytes:
        """Return a chunk with this JSON object as its delta; logprobs and token ids are the output's."""
        form = b'%b[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null,"token_ids":%b}]%b}\n\n'
        logprobs, token_ids = self._shown.logprobs_json(output), self._shown.token_ids_json(output)
        return form % (self._head, output.index, delta, logprobs, token_ids, _field(usage))

    def finish_chunk(self, output: CompletionOutput, delta: bytes, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunk of one choice, with this JSON object as its delta."""
        form = b'%b[{"index":%d,"delta":%b,"logprobs":%b,%b,"token_ids":%b}]%b%b}\n\n'
        logprobs, token_ids = self._shown.logprobs_json(output), self._shown.token_ids_json(output)
        fingerprint = _fingerprint(self._fingerprint, is_fingerprinted)
        return form % (
            self._head, output.index, delta, logprobs, _reasons(output), token_ids, _field(usage), fingerprint,
        )  # fmt: skip

    def usage(self, usage: bytes) -> bytes:
        """Return the usage chunk."""
        return _usage_chunk(self._head, usage, self._fingerprint)


class CompletionChunks:
    """/v1/completions."""

    def __init__(self, identity: StreamIdentity, shown: Shown = PLAIN) -> None:
        self._shown = shown
        self._begun: set[int] = set()  # choices that have shown their prompt's token ids
        self._fingerprint = json_string(identity.fingerprint)
        self._head = _head(identity, "text_completion")

    def opening(self, num_choices: int, usage: bytes) -> bytes:  # noqa: ARG002  # the protocol's
        """Return nothing: completions have no roles."""
        return b""

    def delta_frame(self, index: int) -> DeltaFrame | None:
        """Return what comes before and after a delta's text. Asked for after a choice's first output only."""
        rest = b',"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
        return _frame(self._shown, b'%b[{"index":%d,"text":' % (self._head, index), b',"logprobs":', rest)

    def delta(self, output: CompletionOutput, usage: bytes) -> bytes:
        """Return the chunk of a delta."""
        if self._shown.is_empty(output) and not usage:
            return b""
        return self._chunk(output, usage, b"")

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunk of one choice."""
        return self._chunk(output, usage, _fingerprint(self._fingerprint, is_fingerprinted))

    def usage(self, usage: bytes) -> bytes:
        """Return the usage chunk."""
        return _usage_chunk(self._head, usage, self._fingerprint)

    def _chunk(self, output: CompletionOutput, usage: bytes, fingerprint: bytes) -> bytes:
        form = b'%b[{"index":%d,"text":%b,"logprobs":%b,%b,"prompt_token_ids":%b,"token_ids":%b}]%b%b}\n\n'
        shown, index = self._shown, output.index
        return form % (
            self._head, index, json_string(output.text), shown.logprobs_json(output), _reasons(output),
            self._prompt_token_ids(index), shown.token_ids_json(output), _field(usage), fingerprint,
        )  # fmt: skip

    def _prompt_token_ids(self, index: int) -> bytes:
        if index in self._begun:
            return b"null"
        self._begun.add(index)
        return self._shown.prompt_token_ids_json(index)


def _head(identity: StreamIdentity, kind: str) -> bytes:
    return b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":' % (
        json_string(identity.response_id), kind.encode(), identity.created, json_string(identity.model),
    )  # fmt: skip


def _frame(shown: Shown, head: bytes, middle: bytes, tail: bytes) -> DeltaFrame | None:
    if shown.token_ids:
        return None
    if shown.logprobs is None:
        return DeltaFrame(head, middle + b"null" + tail)
    return DeltaFrame(head, tail, middle, shown.logprobs)


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
