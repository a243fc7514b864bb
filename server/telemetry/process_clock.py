"""What the server process itself costs its streams: event-loop lag and garbage collections. Loop thread only."""

import asyncio
import gc
import time

from ringserve.server.telemetry.histogram import SECONDS, Histogram
from ringserve.server.telemetry.metrics import SHORT_S

_TICK_S = 0.1


class ProcessClock:
    """Measures while it runs: how late the loop calls back, and how long collections hold it.

    Attributes:
        lag: One observation each 100 ms: how much later than asked for the loop has called back.
        gc_pauses: By generation, one observation for each collection.
    """

    def __init__(self) -> None:
        self.lag = Histogram(SHORT_S, SECONDS)
        self.gc_pauses = [Histogram(SHORT_S, SECONDS) for _ in range(3)]
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._gc_started_ns = 0

    def start(self) -> None:
        """Start measuring, in the running loop."""
        gc.callbacks.append(self._on_gc)
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stop; what has been measured stays."""
        gc.callbacks.remove(self._on_gc)
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + _TICK_S
        self._timer = loop.call_at(self._due_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lag.observe(max(int((loop.time() - self._due_s) * 1e9), 0))
        self._schedule(loop)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_started_ns = time.monotonic_ns()
        else:
            self.gc_pauses[info["generation"]].observe(time.monotonic_ns() - self._gc_started_ns)
