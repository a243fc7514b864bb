"""Streams with logprobs: most of their tokens are written the short way, and nobody can tell."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.server.api.render.chunks import ChatChunks, CompletionChunks, Shown, StreamIdentity
from ringserve.server.api.render.logprob_format import ChatLogprobs, CompletionLogprobs
from ringserve.server.api.render.sse import DONE, EventStream
from ringserve.server.generation.collector import DeltaWriter
from ringserve.server.generation.outputs import OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.http.sink import Headers
from ringserve.shm_transport.records import FinishReason
from tests.server.generation.test_token_cases import Bench, TinyTokenizer

PIECES = [{"text": "one"}, {"text": " two"}, {"hex": "f09f"}, {"hex": "9982"}, {"text": '"\n'}, {"text": "é"}] * 3
FORMS = [(ChatChunks, ChatLogprobs), (CompletionChunks, CompletionLogprobs)]


class FakeSink:
    """Keeps the body, and how many events of it took the short way."""

    def __init__(self) -> None:
        self.is_writable = True
        self.on_writable = self.on_idle = None
        self.data = b""
        self.num_short = 0

    def open(self, status: int, headers: Headers) -> None:  # noqa: ARG002  # the protocol's
        assert status == 200

    def write(self, data: bytes) -> None:
        self.data += data

    def framed(self, head: bytes, tail: bytes) -> DeltaWriter:
        def write(middle: bytes) -> bool:
            if not self.is_writable:
                return False
            self.data += head + middle + tail
            self.num_short += 1
            return True

        return write

    def finish(self, data: bytes = b"") -> None:
        self.data += data
        assert self.data.endswith(DONE)


def stream(form: Any, logprobs: Any, *, has_short_way: bool = True, stalls: tuple[int, ...] = ()) -> FakeSink:
    """Stream all pieces, a token a step, to a client that takes nothing in the steps `stalls`."""

    class Chunks(form):  # type: ignore[misc]
        def delta_frame(self, index: int) -> Any:
            return super().delta_frame(index) if has_short_way else None

    tokenizer, sink = TinyTokenizer("byte_level", PIECES), FakeSink()
    bench = Bench(tokenizer)
    (handle,), collector = bench.add([], SamplingParams(max_tokens=None, logprobs=2), OutputKind.DELTA)
    identity = StreamIdentity(response_id="r", created=1, model="m", fingerprint="f")
    shown = Shown(logprobs=logprobs(tokenizer.server.names))
    collector.attach(EventStream(sink, Chunks(identity, shown), num_choices=1, num_prompt_tokens=[0]))
    for step, token_id in enumerate(tokenizer.ids_of(PIECES)):
        sink.is_writable = step not in stalls
        if sink.is_writable:
            collector.flush()
        bench.step((handle, [token_id], 0, -1), num_logprobs=2)
    sink.is_writable = True
    collector.flush()
    bench.step((handle, [], int(FinishReason.LENGTH), -1))
    return sink


def entries(sink: FakeSink) -> list[Any]:
    """Return what the client has of each token."""
    chunks = [json.loads(event[6:]) for event in sink.data.decode().split("\n\n")[:-2]]
    scored = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"] is not None]
    if "content" in scored[0]:
        return [entry for one in scored for entry in one["content"]]
    return [entry for one in scored for entry in zip(*one.values(), strict=True)]


@pytest.mark.parametrize(("form", "logprobs"), FORMS)
def test_the_short_way_writes_what_the_long_way_writes(form: Any, logprobs: Any) -> None:
    short, long = stream(form, logprobs), stream(form, logprobs, has_short_way=False)
    assert short.data == long.data
    assert long.num_short == 0
    assert short.num_short == len(PIECES) - 1 - 2 * 3  # but the first token, and those that are parts of a character
    assert len(entries(short)) == len(PIECES)


@pytest.mark.parametrize(("form", "logprobs"), FORMS)
@given(stalls=st.lists(st.integers(0, len(PIECES) - 1)).map(tuple))
def test_a_client_that_stalls_misses_no_entry_and_every_offset_goes_on(
    form: Any, logprobs: Any, stalls: tuple[int, ...]
) -> None:
    assert entries(stream(form, logprobs, stalls=stalls)) == entries(stream(form, logprobs))
