"""Rehearsals: just before a step is due, a made-up token takes the way of a real one, as far as the kernel.

A core that has slept between two steps runs the lines that write a token several times slower than one that has just
run them: other processes have taken its caches. A client's token would pay for that; a rehearsal pays instead.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator

from ringserve.server.api.render.chunks import CompletionChunks, StreamIdentity
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.collector import DeltaWriter, RequestOutputCollector
from ringserve.server.generation.input_processor import ProcessedRequest
from ringserve.server.generation.output_processor import OutputProcessor, RequestState
from ringserve.server.generation.outputs import CompletionOutput, OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.telemetry.hop_clock import HopClock
from ringserve.server.telemetry.metrics import Metrics
from ringserve.server.text.tokenizer import Tokenizer
from ringserve.shm_transport.ring import HEADER, RecordHeader
from ringserve.shm_transport.step_ring import StepRecord

logger = logging.getLogger(__name__)

_TEXT = " the"
_IDENTITY = StreamIdentity(response_id="cmpl-rehearsal", created=0, model="rehearsal", fingerprint="")
_MAX_TOKENS = 4096  # of one sequence; then another begins, for the tokens of each are kept
_RECEIVE_BYTES = 65_536
_HEADER = RecordHeader._make(HEADER.unpack(bytes(HEADER.size)))._replace(num_rows=1, num_tokens=1)


class Rehearsal:
    """One stream that nobody reads, with counters and a socket of its own. Loop thread only.

    Args:
        tokenizer: The model's.
        transport: What the stream is written to.
        far_end: The other end of that, non-blocking.
    """

    def __init__(self, tokenizer: Tokenizer, transport: asyncio.WriteTransport, far_end: socket.socket) -> None:
        self._outputs = OutputProcessor(tokenizer, abort_in_engine=lambda _: None)
        self._metrics = Metrics()
        self._hop_clock = HopClock()
        self._stream = _Stream(transport)
        self._far_end = far_end
        self._token_ids = tokenizer.encode(_TEXT, add_special_tokens=False)[-1:] or [0]
        self._num_runs = 0
        self._state = self._begin()

    @property
    def num_runs(self) -> int:
        """Rehearsals until now."""
        return self._num_runs

    def run(self) -> None:
        """Process a record with one token, as the reader task does; the loop's next turn sends it."""
        self._num_runs += 1
        if self._state.num_tokens >= _MAX_TOKENS:
            self._outputs.drop(self._state.collector)
            self._state = self._begin()
        with contextlib.suppress(BlockingIOError):
            self._far_end.recv(_RECEIVE_BYTES)
        now_ns = time.monotonic_ns()
        header = _HEADER._replace(scheduled_ns=now_ns, forward_done_ns=now_ns, published_ns=now_ns)
        record = StepRecord(header, [self._state.handle], self._token_ids)
        self._metrics.begin(record, self._outputs.is_live)
        with contextlib.suppress(StopIteration):  # a single row never suspends
            self._outputs.process(record, is_behind=False).send(None)
        self._metrics.end(record, 0, 0)
        self._hop_clock.note(header, now_ns, time.monotonic_ns())

    def _begin(self) -> RequestState:
        """Begin a sequence, past its first token: the later ones take the short way."""
        request = ProcessedRequest(
            request_id="rehearsal", prompt_token_ids=self._token_ids, params=SamplingParams(), kind=OutputKind.DELTA,
            max_tokens=_MAX_TOKENS, eos_token_id=-1, stop_token_ids=(), first_index=0,
        )  # fmt: skip
        collector = RequestOutputCollector(request.request_id, request.prompt_token_ids, 1, request.kind)
        collector.attach(self._stream)
        state = self._outputs.add(request, 0, collector)
        state.find_short_way()
        return state


class _Stream:
    """The OutputWriter (server/generation/collector.py) of rehearsals."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._form = CompletionChunks(_IDENTITY)

    @property
    def is_writable(self) -> bool:
        """Whether the transport is open."""
        return not self._transport.is_closing()

    def write(self, output: CompletionOutput) -> None:
        """Send a delta."""
        self._transport.write(self._form.delta(output, b""))

    def delta_writer(self, index: int) -> DeltaWriter | None:
        """Return the short cut that a real stream has too."""
        frame, transport = self._form.delta_frame(index), self._transport
        if frame is None:
            return None
        head, tail = frame.head, frame.tail

        def write(text: bytes) -> bool:
            if transport.is_closing():
                return False
            transport.write(b"%b%b%b" % (head, text, tail))
            return True

        return write

    def scored_writer(self, index: int) -> None:
        """Return nothing: there are no logprobs."""

    def fail(self, error: Exception) -> None:
        """Nobody is told."""


@contextlib.asynccontextmanager
async def rehearsals(llm: AsyncLLM) -> AsyncIterator[Rehearsal | None]:
    """Have the engine client's reader rehearse, in the running loop, until the context ends."""
    try:
        near_end, far_end = connected_pair()
    except OSError as exc:
        logger.warning("steps are not rehearsed, so their tokens leave a little later: no loopback network (%s)", exc)
        yield None
        return
    with far_end:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near_end)
        rehearsal = Rehearsal(llm.model.tokenizer, transport, far_end)
        llm.rehearse(rehearsal.run)
        try:
            yield rehearsal
        finally:
            llm.rehearse(None)
            transport.close()


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection, non-blocking. A pair of Unix sockets would leave the kernel's TCP cold.

    Raises:
        OSError: If this machine has no loopback network.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near_end = socket.create_connection(listener.getsockname())
        far_end, address = listener.accept()
        while address != near_end.getsockname():  # somebody else was quicker
            far_end.close()
            far_end, address = listener.accept()
    near_end.setblocking(False)
    far_end.setblocking(False)
    return near_end, far_end
