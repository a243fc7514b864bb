import math
import random

import pytest

from ringserve.shm_transport.step_clock import StepClock

MS = 1_000_000
RANDOM = [20 * abs(math.tan(n)) for n in range(1, 100)]


def clock_after(intervals_ms: list[float], cpu_budget: float = 0.5) -> tuple[StepClock, float]:
    """Return a clock that has seen records at these intervals, and when the last was, ns."""
    clock, now_ns = StepClock(cpu_budget=cpu_budget, lead_ns=MS), 1000.0 * MS
    clock.note(int(now_ns))
    for interval_ms in intervals_ms:
        now_ns += interval_ms * MS
        clock.note(int(now_ns))
    return clock, now_ns


def test_regular_steps_have_a_window_around_the_next_one() -> None:
    rng = random.Random(1)
    clock, last_ns = clock_after([20 + rng.uniform(-0.3, 0.3) for _ in range(100)])
    window = clock.window()
    assert window is not None
    assert window.opens_ns < last_ns + 20 * MS < window.closes_ns
    assert window.opens_ns > last_ns + 17 * MS
    assert window.closes_ns < last_ns + 22 * MS


@pytest.mark.parametrize(
    "intervals_ms",
    [
        [],
        [20] * 3,
        [20] * 50 + [5000],
        [1, 40] * 50,
        RANDOM,
        [0.0] * 50,
    ],
    ids=["idle", "too few", "pause", "alternating", "random", "same stamp"],
)
def test_idle_and_irregular_steps_have_none(intervals_ms: list[float]) -> None:
    assert clock_after(intervals_ms)[0].window() is None


def test_steps_so_close_that_waiting_would_exceed_the_budget_have_none() -> None:
    assert clock_after([1] * 100)[0].window() is None
    assert clock_after([1] * 100, cpu_budget=2.0)[0].window() is not None


@pytest.mark.parametrize(("interval_ms", "lead_ms"), [(20, 4), (7, 1)], ids=["long", "only the short one"])
def test_a_window_opens_as_early_as_the_budget_allows(interval_ms: float, lead_ms: float) -> None:
    clock = StepClock(cpu_budget=0.5, lead_ns=MS)
    for n in range(20):
        clock.note(1000 * MS + int(n * interval_ms * MS))
    window = clock.window(more_lead_ns=3 * MS)
    assert window is not None
    assert window.likely_ns - window.opens_ns == lead_ms * MS


def test_a_new_rhythm_is_learnt() -> None:
    clock, last_ns = clock_after([20] * 100 + [10] * 100)
    window = clock.window()
    assert window is not None
    assert window.opens_ns < last_ns + 10 * MS < window.closes_ns


def test_steps_that_the_machine_delays_do_not_widen_the_window() -> None:
    rng = random.Random(1)
    intervals = [20 + rng.uniform(-0.02, 0.02) for _ in range(96)]
    quiet = clock_after(intervals)[0].window()
    delayed = clock_after([24 if n % 8 == 5 else 16 if n % 8 == 6 else x for n, x in enumerate(intervals)])[0].window()
    assert quiet is not None
    assert delayed is not None
    assert delayed.closes_ns - delayed.opens_ns <= 1.1 * (quiet.closes_ns - quiet.opens_ns)
