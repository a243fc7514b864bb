"""Foretells when the next step record is due, from the publish stamps of those before. No clock of its own, no I/O."""

from collections import deque
from dataclasses import dataclass

_NUM_SAMPLES = 16  # of the newest intervals; a quarter of them may be anything without moving a window
_MIN_SAMPLES = 8
_MAX_INTERVAL_NS = 200_000_000  # longer ones are pauses between requests, not steps
_MAX_JITTER = 0.25  # spread over middle, beyond which the steps count as irregular
_MARGIN_SPREADS = 3
_MIN_MARGIN_NS = 100_000


@dataclass(slots=True, frozen=True)
class Window:
    """When the next record is likely, CLOCK_MONOTONIC nanoseconds; it opens earlier, for whoever wakes up late."""

    opens_ns: int
    likely_ns: int
    closes_ns: int


class StepClock:
    """The middle of the newest step intervals, and their spread: half the distance between their quartiles.

    Not mean and deviation: one step that a busy machine delays by milliseconds widened the windows of the next thirty.

    Args:
        cpu_budget: Largest share of a core that waiting inside the windows may take.
        lead_ns: How much earlier a window opens, because whoever waits for it wakes up late.
    """

    def __init__(self, *, cpu_budget: float, lead_ns: int) -> None:
        self._least_interval_ns = (_MIN_MARGIN_NS + lead_ns) / cpu_budget
        self._cpu_budget = cpu_budget
        self._lead_ns = lead_ns
        self._last_ns = 0
        self._intervals_ns: deque[int] = deque(maxlen=_NUM_SAMPLES)

    def note(self, published_ns: int) -> None:
        """Take the publish stamp of a step's record."""
        interval_ns = published_ns - self._last_ns
        self._last_ns = published_ns
        if 0 < interval_ns <= _MAX_INTERVAL_NS:
            self._intervals_ns.append(interval_ns)
        else:
            self._intervals_ns.clear()

    def window(self, more_lead_ns: int = 0) -> Window | None:
        """Return when the next record is likely; None while idle or irregular, or if the budget does not allow it.

        Args:
            more_lead_ns: Beside `lead_ns`, where the budget allows that too: for something to do before the record.
        """
        count = len(self._intervals_ns)
        if count < _MIN_SAMPLES or self._intervals_ns[-1] < self._least_interval_ns:
            return None
        ordered = sorted(self._intervals_ns)
        middle_ns = ordered[count // 2]
        spread_ns = (ordered[-1 - count // 4] - ordered[count // 4]) // 2
        margin_ns = max(_MARGIN_SPREADS * spread_ns, _MIN_MARGIN_NS)
        most_lead_ns = self._cpu_budget * middle_ns - margin_ns  # so that a record in time costs the budget
        if spread_ns > _MAX_JITTER * middle_ns or self._lead_ns > most_lead_ns:
            return None
        lead_ns = self._lead_ns + more_lead_ns
        if lead_ns > most_lead_ns:
            lead_ns = self._lead_ns
        due_ns = self._last_ns + middle_ns
        return Window(due_ns - margin_ns - lead_ns, due_ns - margin_ns, due_ns + margin_ns)
