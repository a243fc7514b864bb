"""How long each hop of a step takes on its way to the sockets: histograms of the stamps that the step record brings.

Always on: once a record, never once a token. Loop thread only.
"""

import time
from dataclasses import dataclass

from ringserve.shm_transport.ring import RecordHeader

NUM_BUCKETS = 26
BUCKET_BOUNDS_US = tuple(2**n - 1 for n in range(NUM_BUCKETS - 1))  # upper bounds, inclusive; the last has none
HOPS = (
    "scheduled_to_forward_done",
    "forward_done_to_published",
    "published_to_read",
    "read_to_text",  # the last row's text is with its transport
    "text_to_written",  # the loop has sent what the transports held
)


@dataclass(slots=True, frozen=True)
class HopTimes:
    """One hop until now: `counts` by BUCKET_BOUNDS_US, not cumulative, and the sum of all times."""

    counts: tuple[int, ...]
    sum_s: float


class HopClock:
    """One histogram a hop."""

    def __init__(self) -> None:
        self._counts = [[0] * NUM_BUCKETS for _ in HOPS]
        self._sums_ns = [0] * len(HOPS)

    def note(self, header: RecordHeader, read_ns: int, text_ns: int) -> None:
        """Take the stamps of a record whose bytes the loop has just sent."""
        stamps = (
            header.scheduled_ns, header.forward_done_ns, header.published_ns, read_ns, text_ns, time.monotonic_ns(),
        )  # fmt: skip
        if not stamps[0]:  # figures alone: no step was made
            return
        counts, sums_ns, before_ns = self._counts, self._sums_ns, stamps[0]
        for hop in range(5):
            now_ns = stamps[hop + 1]
            elapsed_ns = now_ns - before_ns if now_ns > before_ns else 0
            bucket = (elapsed_ns // 1000).bit_length()
            counts[hop][bucket if bucket < NUM_BUCKETS else -1] += 1
            sums_ns[hop] += elapsed_ns
            before_ns = now_ns

    def snapshot(self) -> dict[str, HopTimes]:
        """Return what was measured until now, by hop."""
        columns = zip(HOPS, self._counts, self._sums_ns, strict=True)
        return {hop: HopTimes(tuple(counts), sum_ns / 1e9) for hop, counts, sum_ns in columns}
