"""Server-sent events: the stream that writes a response's chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ringserve.server.api.render.chunks import ChunkFormat, DeltaFrame, Usage
from ringserve.server.errors import ServerError
from ringserve.server.generation.collector import DeltaWriter, ScoredWriter
from ringserve.server.generation.outputs import CompletionOutput
from ringserve.server.http.json_response import error_headers
from ringserve.server.http.sink import Headers, Sink
from ringserve.server.text.json_string import one_line

SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends.

    Attributes:
        done: What comes after the last chunk.
        failed: Makes what comes instead, where the response has begun and cannot go on.
    """

    done: bytes
    failed: Callable[[ServerError], bytes]


def _failed(error: ServerError) -> bytes:
    return b"data: %b\n\n%b" % (one_line(_encode(error.body())), DONE)


_KEEP_ALIVE = b": keep-alive\n"  # one newline: after a blank line some clients see an empty event

DONE_ENDING = Ending(DONE, _failed)


class EventStream:
    """One SSE response: an OutputWriter (server/generation/collector.py) for all its choices.

    Status and headers leave with the first event, so an error before it is a real 4xx or 5xx.

    Args:
        num_choices: Sequences that the response ends with.
        num_prompt_tokens: Of each prompt; the choices are split evenly over them.
        include_usage: Send a usage chunk before [DONE].
        continuous_usage: Send usage in every chunk too.
        ending: What it ends with.
        cached_tokens: Returns how many tokens of all prompts were cached, once the stream has ended.
        headers: Of the response, beside those of every event stream.
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
        ending: Ending = DONE_ENDING,
        cached_tokens: Callable[[], int | None] = lambda: None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._sink = sink
        self._ending = ending
        self._form = form
        self._num_choices = num_choices
        self._num_unfinished = num_choices
        self._prompt_tokens = num_prompt_tokens
        self._completion_tokens = [0] * num_choices
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage and include_usage
        self._cached_tokens = cached_tokens
        self._headers = [*SSE_HEADERS, *headers]
        self._is_open = False  # status and headers are sent
        self._is_begun = False  # an event is sent
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
        data = b"" if self._is_begun else self._opening()
        usage = self._usage_of(output.index) if self._continuous_usage else b""
        if output.finish_reason is not None:
            data += self._form.finish(output, usage, is_fingerprinted=not self._include_usage)
            self._num_unfinished -= 1
            if self._num_unfinished == 0:
                self._finish(data)
                return
        else:
            data += self._form.delta(output, usage)
        if data:
            self._is_begun = True
            if not self._is_open:
                self._open()
            self._sink.write(data)

    def keep_alive(self) -> None:
        """Send a comment, which clients skip: whatever stands between sees a connection that is in use.

        One that comes before the first event takes status and headers along: an error is an event from then on.
        """
        if self._is_finished or not self._sink.is_writable:
            return
        if not self._is_open:
            self._open()
        self._sink.write(_KEEP_ALIVE)

    def delta_writer(self, index: int) -> DeltaWriter | None:
        """Return a short cut for deltas of one choice whose text is ready as a JSON string; None if there is none yet.

        It writes nothing and returns False while the client does not keep up, or once the response has ended.
        """
        frame = self._frame(index)
        return None if frame is None or frame.logprobs is not None else self._sink.framed(frame.head, frame.tail)

    def scored_writer(self, index: int) -> ScoredWriter | None:
        """Return the same for deltas of one token with its logprobs."""
        frame = self._frame(index)
        if frame is None or frame.logprobs is None:
            return None
        sink, middle, token_json = self._sink, frame.middle, frame.logprobs.token_json
        write = sink.framed(frame.head, frame.tail)

        def write_scored(text: bytes, token_ids: list[int], numbers: list[bytes]) -> bool:
            # what is formatted counts as sent: nothing is that cannot leave
            return sink.is_writable and write(text + middle + token_json(index, token_ids, numbers))

        return write_scored

    def _frame(self, index: int) -> DeltaFrame | None:
        """Return what all deltas of a choice have in common, once it has begun."""
        return self._form.delta_frame(index) if self._is_begun and not self._continuous_usage else None

    def fail(self, error: Exception) -> None:
        """End the response with an error: an event if it has begun, else a status of its own."""
        if self._is_finished:
            return
        self._is_finished = True
        error = error if isinstance(error, ServerError) else ServerError(str(error))
        if self._is_open:
            self._sink.finish(self._ending.failed(error))
        else:
            self._sink.open(error.status, error_headers(error))
            self._sink.finish(one_line(_encode(error.body())))

    def _open(self) -> None:
        self._is_open = True
        self._sink.open(200, self._headers)

    def _opening(self) -> bytes:
        usage = Usage(self._prompt_tokens[0]).to_json() if self._continuous_usage else b""
        return self._form.opening(self._num_choices, usage)

    def _usage_of(self, index: int) -> bytes:
        prompt = index * len(self._prompt_tokens) // self._num_choices
        return Usage(self._prompt_tokens[prompt], self._completion_tokens[index]).to_json()

    def _finish(self, data: bytes) -> None:
        self._is_finished = True
        if self._include_usage:
            total = Usage(sum(self._prompt_tokens), sum(self._completion_tokens), self._cached_tokens())
            data += self._form.usage(total.to_json())
        if not self._is_open:
            self._open()
        self._sink.finish(data + self._ending.done)
