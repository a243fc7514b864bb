"""The engine's signs of life in the step ring's header: written by the engine, read by the server.

Two stamps tell a stuck engine from a busy one. A thread writes `alive` four times a second; it stops when the process
is stopped or its interpreter is blocked. The loop writes `step opened` and `step closed`: a long prefill is
merely busy.
"""

import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringserve.shm_transport.records import SEGMENT_HEADER
from ringserve.shm_transport.segment import Segment

_PERIOD_S = 0.25
ALIVE_LIMIT_S = 1.5


def _word(segment: Segment, name: str) -> NDArray[np.uint64]:
    assert SEGMENT_HEADER.fields is not None
    return np.frombuffer(segment.map, "<u8", 1, SEGMENT_HEADER.fields[name][1])


class Heartbeat:
    """The engine's side."""

    def __init__(self, segment: Segment) -> None:
        self._alive = _word(segment, "alive_ns")  # written by the heartbeat thread alone
        self._opened = _word(segment, "step_opened_ns")  # this and the next three: the engine loop alone
        self._closed = _word(segment, "step_closed_ns")
        self._num_stalls = _word(segment, "num_stalls")
        self._stall_ns = _word(segment, "stall_ns")
        self._stop = threading.Event()
        self._alive[0] = time.monotonic_ns()
        self._thread = threading.Thread(target=self._run, name="ringserve-heartbeat", daemon=True)
        self._thread.start()

    def open_step(self) -> None:
        """Say that a step begins."""
        self._opened[0] = time.monotonic_ns()

    def close_step(self) -> None:
        """Say that the step has ended."""
        self._closed[0] = time.monotonic_ns()

    def count_stalls(self, num_stalls: int, stall_ns: int) -> None:
        """Export how often and how long the engine has waited for a free slot."""
        self._num_stalls[0] = num_stalls
        self._stall_ns[0] = stall_ns

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._alive[0] = time.monotonic_ns()


@dataclass(slots=True, kw_only=True, frozen=True)
class Pulse:
    """The engine's signs of life at one moment."""

    alive_age_s: float
    open_step_s: float  # how long the step in progress has been open; 0 between steps
    num_stalls: int
    stall_s: float

    def stuck_reason(self, step_timeout_s: float) -> str | None:
        """Return why the engine counts as stuck, or None while it is well, or merely busy."""
        if self.alive_age_s > ALIVE_LIMIT_S:
            return f"the engine has given no sign of life for {self.alive_age_s:.1f} s (limit {ALIVE_LIMIT_S} s)"
        if self.open_step_s > step_timeout_s:
            return f"a step has been running for {self.open_step_s:.1f} s (--step-timeout {step_timeout_s:g} s)"
        return None


class PulseReader:
    """The server's side."""

    def __init__(self, segment: Segment) -> None:
        names = ("alive_ns", "step_opened_ns", "step_closed_ns", "num_stalls", "stall_ns")
        self._words = [_word(segment, name) for name in names]

    def read(self) -> Pulse:
        """Look at the engine's words; costs a microsecond and never waits."""
        alive, opened, closed, num_stalls, stall_ns = (int(word[0]) for word in self._words)
        now = time.monotonic_ns()
        return Pulse(
            alive_age_s=(now - alive) / 1e9,
            open_step_s=(now - opened) / 1e9 if opened > closed else 0.0,
            num_stalls=num_stalls,
            stall_s=stall_ns / 1e9,
        )
