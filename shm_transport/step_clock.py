"""Foretells when the next step record is due, from the publish stamps of those before. No clock of its own, no I/O."""

from dataclasses import dataclass

_WEIGHT = 0.125  # of the newest interval in the running mean and deviation
_MIN_SAMPLES = 8
_MAX_INTERVAL_NS = 200_000_000  # longer ones are pauses between requests, not steps
_MAX_JITTER = 0.25  # deviation over mean, beyond which the steps count as irregular
_MIN_MARGIN_NS = 100_000


@dataclass(slots=True, frozen=True)
class Window:
    """When the next record is likely, CLOCK_MONOTONIC nanoseconds."""

    opens_ns: int
    closes_ns: int


class StepClock:
    """A running mean and deviation of the step interval.

    Args:
        cpu_budget: Largest share of a core that waiting inside the windows may take.
        lead_ns: How much earlier a window opens, because whoever waits for it wakes up late.
    """

    def __init__(self, *, cpu_budget: float, lead_ns: int) -> None:
        self._cpu_budget = cpu_budget
        self._lead_ns = lead_ns
        self._last_ns = 0
        self._mean_ns = 0.0
        self._deviation_ns = 0.0
        self._num_samples = 0

    def note(self, published_ns: int) -> None:
        """Take the publish stamp of a record."""
        interval_ns = published_ns - self._last_ns
        self._last_ns = published_ns
        if not 0 < interval_ns <= _MAX_INTERVAL_NS:
            self._num_samples = 0
        elif self._num_samples == 0:
            self._mean_ns, self._deviation_ns, self._num_samples = float(interval_ns), 0.0, 1
        else:
            error_ns = interval_ns - self._mean_ns
            self._mean_ns += _WEIGHT * error_ns
            self._deviation_ns += _WEIGHT * (abs(error_ns) - self._deviation_ns)
            self._num_samples += 1

    def window(self) -> Window | None:
        """Return when the next record is likely; None while idle or irregular, or if the budget does not allow it."""
        if self._num_samples < _MIN_SAMPLES or self._deviation_ns > _MAX_JITTER * self._mean_ns:
            return None
        margin_ns = max(3.0 * self._deviation_ns, _MIN_MARGIN_NS)
        if margin_ns + self._lead_ns > self._cpu_budget * self._mean_ns:  # what a record in time costs
            return None
        due_ns = self._last_ns + self._mean_ns
        return Window(int(due_ns - margin_ns - self._lead_ns), int(due_ns + margin_ns))
