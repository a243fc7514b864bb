"""What is known of a sequence beside its text: when it reached what, for metrics, logs and traces.

Stamps are CLOCK_MONOTONIC nanoseconds: of the engine for queued, scheduled and published, of the server for the others.
"""

from dataclasses import dataclass

from ringserve.server.telemetry.trace_headers import TraceHeaders


@dataclass(slots=True)
class FirstToken:
    """A sequence's first row, as the server took it."""

    queued_ns: int
    scheduled_ns: int
    published_ns: int
    taken_ns: int
    num_cached_tokens: int


@dataclass(slots=True, kw_only=True)
class FinishedSequence:
    """One sequence that has ended, however it did; made once, at its end.

    `first` is None if it ended before its first token. `last_published_ns` is the stamp of the newest step at its end:
    its own last one, unless it was aborted.
    """

    request_id: str
    index: int
    num_siblings_left: int  # sequences of the same prompt that go on
    finish_reason: str  # "stop", "length", "abort" or "error"
    prompt_token_ids: list[int]
    num_tokens: int  # of output
    n: int
    max_tokens: int
    temperature: float
    top_p: float
    arrival_ns: int
    ended_ns: int
    last_published_ns: int
    first: FirstToken | None
    trace_headers: TraceHeaders | None = None  # None where nothing is traced

    @property
    def e2e_ns(self) -> int:
        """From the arrival to the end."""
        return self.ended_ns - self.arrival_ns

    @property
    def ttft_ns(self) -> int | None:
        """From the arrival to the first token; None if there was none."""
        return None if self.first is None else self.first.taken_ns - self.arrival_ns

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return 0 if self.first is None else self.first.num_cached_tokens
