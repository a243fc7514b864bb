"""The waiting strategies `spin` and `adaptive`, and the choice between them and `block` (waiter.py).

Loop thread only. Spinning is cooperative: the loop runs other tasks between two looks at the semaphore.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from ringserve.shm_transport.ring import Consumer
from ringserve.shm_transport.step_clock import StepClock, Window
from ringserve.shm_transport.waiter import BlockWaiter

STRATEGIES = ("block", "adaptive", "spin")

_LEAD_NS = 250_000  # from the waiter thread's time-out to a spinning loop: 150 us as a rule
_REHEARSAL_NS = 300_000  # that must be left for one: it runs lines that nobody has run since the last step
_REHEARSAL_LEAD_NS = 450_000  # for which windows open earlier
_CHECK_NS = 1_000_000_000  # how often the spare core is looked for
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class SpinWaiter:
    """The `spin` strategy: looks at the semaphore once in every turn of the loop. Takes a whole core.

    Cooperative: other tasks run between two looks.
    """

    num_wakes = num_spins_missed = 0

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._is_woken = False
        self.num_spins_hit = 0

    def try_wait(self) -> bool:
        """Take a `filled` token if there is one."""
        return self._consumer.try_wait()

    async def wait(self, timeout_s: float) -> None:
        """Look until a record is there, `wake` is called, or `timeout_s` has passed."""
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        self._is_woken = False
        while not (self._is_woken or self._consumer.num_pending or time.monotonic_ns() >= deadline_ns):
            await asyncio.sleep(0)
        self.num_spins_hit += self._consumer.num_pending > 0

    def note(self, published_ns: int) -> None:
        """Take a record's publish stamp; of no use here."""

    def wake(self) -> None:
        """End the wait at the next turn of the loop."""
        self._is_woken = True

    def close(self) -> None:
        """Nothing to end."""


class AdaptiveWaiter:
    """The `adaptive` strategy: blocks, but for the moments when the next step is due; then it spins.

    While the engine is idle or irregular, or there is no core to spare for spinning, this is BlockWaiter. Its thread
    also keeps the time until a window opens, on the semaphore's own time-out: uvloop's timers have whole milliseconds,
    and a thread that still waited inside the window would snatch the record from the spinning loop.

    Attributes:
        rehearse: Called, if there is one, once a window has opened and while there is time before the record.
    """

    def __init__(self, consumer: Consumer, has_spare_core: Callable[[], bool], cpu_budget: float = 0.1) -> None:
        self._consumer = consumer
        self._block = BlockWaiter(consumer)
        self._clock = StepClock(cpu_budget=cpu_budget, lead_ns=_LEAD_NS)
        self._has_spare_core = has_spare_core
        self._may_spin = has_spare_core()
        self._checked_ns = time.monotonic_ns()
        self._is_woken = False
        self.rehearse: Callable[[], None] | None = None
        self.num_spins_hit = 0
        self.num_spins_missed = 0

    @property
    def num_wakes(self) -> int:
        """Records that the thread has waited for."""
        return self._block.num_wakes

    def try_wait(self) -> bool:
        """Take a `filled` token if there is one."""
        return self._block.try_wait()

    async def wait(self, timeout_s: float) -> None:
        """Block until the window opens, spin while it is open, block again; ends as BlockWaiter.wait does."""
        more_lead_ns = 0 if self.rehearse is None else _REHEARSAL_LEAD_NS
        window = self._clock.window(more_lead_ns) if self._may_spin else None
        now_ns = time.monotonic_ns()
        if now_ns - self._checked_ns > _CHECK_NS:
            self._checked_ns, self._may_spin = now_ns, self._has_spare_core()
        if window is None or now_ns >= window.closes_ns:
            await self._block.wait(timeout_s)
        elif window.opens_ns > now_ns:
            await self._block.wait(min(timeout_s, (window.opens_ns - now_ns) / 1e9))
        else:
            if self.rehearse is not None and now_ns + _REHEARSAL_NS <= window.likely_ns:
                self.rehearse()
            await self._spin(window)

    def note(self, published_ns: int) -> None:
        """Take the publish stamp of a step's record."""
        self._clock.note(published_ns)

    def wake(self) -> None:
        """End the wait now."""
        self._is_woken = True
        self._block.wake()

    def close(self) -> None:
        """End the thread."""
        self._block.close()

    async def _spin(self, window: Window) -> None:
        self._is_woken = False
        while not (self._is_woken or self._block.has_credit or self._consumer.num_pending):
            if time.monotonic_ns() >= window.closes_ns:
                self.num_spins_missed += 1
                return
            await asyncio.sleep(0)
        self.num_spins_hit += 1


Waiter = BlockWaiter | SpinWaiter | AdaptiveWaiter


def make_waiter(strategy: str, consumer: Consumer, producer_pid: int) -> Waiter:
    """Return the waiter of a strategy for a ring that `producer_pid` fills."""
    if strategy == "block":
        return BlockWaiter(consumer)
    if strategy == "spin":
        return SpinWaiter(consumer)
    assert strategy == "adaptive"
    return AdaptiveWaiter(consumer, lambda: has_spare_core(producer_pid))


def has_spare_core(other_pid: int) -> bool:
    """Return whether this process and another may use two cores at once, by affinity and by the control group."""
    try:
        cores = os.sched_getaffinity(0) | os.sched_getaffinity(other_pid)
    except ProcessLookupError:
        return False
    return len(cores) >= 2 and _cpu_quota() >= 2


def _cpu_quota() -> float:
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):  # no control groups of version 2, or the root group
        return float("inf")
