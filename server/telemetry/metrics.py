"""What the server counts of its steps and sequences, from the stamps in the step records. docs/metrics.md defines it.

A step whose rows are those of the step before costs the same however many rows it has: all of them have one gap. Work
for single sequences is done only where they come, go, or miss a step. Loop thread only; nothing here knows Prometheus.
"""

import time
from collections import Counter, deque
from collections.abc import Callable

from ringserve.server.telemetry.finished_sequence import FinishedSequence
from ringserve.server.telemetry.histogram import SECONDS, Histogram
from ringserve.shm_transport.ring import RecordHeader
from ringserve.shm_transport.step_ring import StepRecord

# vLLM's bounds; those that it lacks below 10 ms and 300 ms are added in front, where a local server's times are.
TTFT_S = (
    .001, .0025, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
GAP_S = (
    .0005, .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_S = (
    .001, .0025, .005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip
SHORT_S = (
    2e-5, 5e-5, .0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10,
)  # fmt: skip
ITERATION_TOKENS = (1, 8, *(2**n for n in range(4, 15)))
NUM_SEQUENCES = (1, 2, 5, 10, 20)
TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class Metrics:
    """Everything that is counted, since the start.

    Of the histograms those of sequences have one observation for each that has ended, and only where it came so far.

    Attributes:
        header: The newest step record's; None before the first.
        published_ns: The newest step record's stamp.
        on_finished: Called with each sequence that has ended.
    """

    def __init__(self) -> None:
        self.header: RecordHeader | None = None
        self.published_ns = 0
        self.on_finished: list[Callable[[FinishedSequence], None]] = []
        self.finish_reasons: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.rejections: Counter[str] = Counter(dict.fromkeys(REJECTIONS, 0))
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_queried_tokens = 0  # prompt tokens that were looked for in the prefix cache
        self.num_cached_tokens = 0  # those that were found
        self.ttft = Histogram(TTFT_S, SECONDS)
        self.gap = Histogram(GAP_S, SECONDS)
        self.gap_mean = Histogram(GAP_S, SECONDS)
        self.e2e, self.queue, self.prefill, self.decode, self.inference = (
            Histogram(REQUEST_S, SECONDS) for _ in range(5)
        )
        self.abort = Histogram(SHORT_S, SECONDS)
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        self.prefill_tokens = Histogram(ITERATION_TOKENS)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.max_tokens = Histogram(TOKENS)
        self.n = Histogram(NUM_SEQUENCES)
        self._rows = _Rows()
        self._step_tokens = 0  # of the step whose records come in
        self._num_first = 0  # rows of the newest record that are their sequences' first
        self._num_returned = 0  # rows of it whose sequences were not in the record before
        self._aborts: deque[tuple[int, int]] = deque()  # the count that acknowledges each, and when it was sent
        self._num_aborted = 0  # that the engine has acknowledged

    def begin(self, record: StepRecord, is_live: Callable[[int], bool]) -> None:
        """Take a record up, before its rows are processed.

        Args:
            record: The next one.
            is_live: Whether a handle's sequence has not ended.
        """
        header = self.header = record.header
        self.published_ns = header.published_ns
        self._num_first = self._num_returned = 0
        if header.num_aborted != self._num_aborted:
            self._acknowledge(header)
        if record.handles and record.handles is not self._rows.handles:
            returned = self._rows.change(record.handles, is_live)
            self._num_returned = len(returned)
            for before_ns in returned:
                self.gap.observe(self.published_ns - before_ns)

    def end(self, record: StepRecord, num_late_rows: int, num_late_tokens: int) -> None:
        """Count a record whose rows have been processed.

        Args:
            record: That of `begin`.
            num_late_rows: How many of its rows belong to sequences that had ended before.
            num_late_tokens: The tokens in those.
        """
        num_rows = record.header.num_rows - num_late_rows
        num_tokens = record.header.num_tokens - num_late_tokens
        if num_rows:
            num_gaps = num_rows - self._num_first - self._num_returned
            if num_gaps > 0:
                self.gap.observe(self.published_ns - self._rows.published_ns, num_gaps)
            if num_tokens > num_rows:  # several tokens of a sequence in one step have no time between them
                self.gap.observe(0, num_tokens - num_rows)
            self.num_generation_tokens += num_tokens
            self._step_tokens += num_tokens
        if record.handles:
            self._rows.published_ns = self.published_ns
        if record.header.num_prefill_tokens and record.is_last:
            self.prefill_tokens.observe(record.header.num_prefill_tokens)
        if self._step_tokens and record.is_last:
            self.iteration_tokens.observe(self._step_tokens)
            self._step_tokens = 0

    def note_request(self, n: int, max_tokens: int) -> None:
        """Count what a prompt asks for, once it is on its way to the engine."""
        self.n.observe(n)
        self.max_tokens.observe(max_tokens)

    def note_first(self, ttft_ns: int) -> None:
        """Count a sequence's first row, before the record's `end`."""
        self._num_first += 1
        self.ttft.observe(ttft_ns)

    def note_prompt(self, num_tokens: int, num_cached_tokens: int, *, was_looked_for: bool) -> None:
        """Count a prompt that the engine has computed, once whatever its n."""
        self.num_prompt_tokens += num_tokens
        self._step_tokens += num_tokens - num_cached_tokens
        if was_looked_for:
            self.num_queried_tokens += num_tokens
            self.num_cached_tokens += num_cached_tokens

    def note_end(self, handle: int, finished: FinishedSequence) -> None:
        """Count a sequence that has ended."""
        self._rows.forget(handle)
        self.finish_reasons[finished.finish_reason] += 1
        self.prompt_tokens.observe(len(finished.prompt_token_ids))
        self.generation_tokens.observe(finished.num_tokens)
        self.e2e.observe(finished.e2e_ns)
        if (first := finished.first) is not None:
            decode_ns = finished.last_published_ns - first.published_ns
            self.queue.observe(first.scheduled_ns - first.queued_ns)
            self.prefill.observe(first.published_ns - first.scheduled_ns)
            self.decode.observe(decode_ns)
            self.inference.observe(finished.last_published_ns - first.scheduled_ns)
            if finished.num_tokens > 1:
                self.gap_mean.observe(decode_ns // (finished.num_tokens - 1))
        for callback in self.on_finished:
            callback(finished)

    def note_abort(self, num_sent: int) -> None:
        """Note that the engine has been told to drop sequences: `num_sent` of them until now."""
        if not self._aborts or num_sent != self._aborts[-1][0]:
            self._aborts.append((num_sent, time.monotonic_ns()))

    def _acknowledge(self, header: RecordHeader) -> None:
        self._num_aborted = header.num_aborted
        while self._aborts and self._aborts[0][0] <= header.num_aborted:
            self.abort.observe(max(header.aborted_ns - self._aborts.popleft()[1], 0))


class _Rows:
    """Which sequences were in the newest record that had any, and when those that were not had their last token."""

    def __init__(self) -> None:
        self.handles: list[int] = []  # the reader's own list: the same one means the same rows
        self.published_ns = 0
        self._present: set[int] = set()
        self._absent: dict[int, int] = {}  # live sequences that have had tokens: the stamp of the last

    def change(self, handles: list[int], is_live: Callable[[int], bool]) -> list[int]:
        """Take other rows; return the stamps of the last tokens of those who were absent and are back."""
        present = set(handles)
        for handle in self._present - present:
            if is_live(handle):
                self._absent[handle] = self.published_ns
        returned = [self._absent.pop(handle) for handle in self._absent.keys() & present] if self._absent else []
        self.handles, self._present = handles, present
        return returned

    def forget(self, handle: int) -> None:
        """Drop what is known of a sequence that has ended."""
        self._absent.pop(handle, None)
