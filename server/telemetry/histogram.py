"""A histogram whose observations cost a look-up and two additions: plain lists, no locks. Loop thread only."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SECONDS = 1e-9  # the unit of an observation made in nanoseconds


class Histogram:
    """Counts by bucket. Observations are integers: nanoseconds, or plain counts.

    Args:
        bounds: Upper bounds of the buckets, inclusive, rising, in what is shown; one without a bound is added.
        unit: How much of that an observation of 1 is.
    """

    __slots__ = ("_bounds", "_counts", "_shown", "_sum", "_unit")

    def __init__(self, bounds: Sequence[float], unit: float = 1.0) -> None:
        self._shown = [f"{bound:g}" for bound in bounds]
        self._bounds = [round(bound / unit) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._unit = unit
        self._sum = 0

    def observe(self, value: int, count: int = 1) -> None:
        """Take `count` equal observations."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def count(self) -> int:
        """Observations until now."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """The sum of all observations, in the shown unit."""
        return self._sum * self._unit

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound as text, the last "+Inf", with the observations up to it."""
        return list(zip((*self._shown, "+Inf"), map(float, accumulate(self._counts)), strict=True))
