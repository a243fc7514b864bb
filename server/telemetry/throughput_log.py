"""A line in the log each ten seconds with what the server does; none while it does nothing."""

import asyncio
import logging
import time
from typing import NamedTuple

from ringserve.server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class _Counts(NamedTuple):
    at_s: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_queried_tokens: int
    num_cached_tokens: int


class ThroughputLog:
    """Writes while it runs. Loop thread only."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before = self._counts()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start, in the running loop."""
        self._before = self._counts()
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        """Write no more."""
        if self._timer is not None:
            self._timer.cancel()

    def write(self) -> None:
        """Write what has happened since the last time; nothing if nothing has, and nobody waits or runs."""
        before, now, header = self._before, self._counts(), self._metrics.header
        self._before = now
        has_moved = now[1:] != before[1:]
        if header is None or not (has_moved or header.num_running or header.num_waiting):
            return
        elapsed_s = max(now.at_s - before.at_s, 1e-3)
        num_queried = now.num_queried_tokens - before.num_queried_tokens
        num_cached = now.num_cached_tokens - before.num_cached_tokens
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f%%, prefix hits %s",
            (now.num_prompt_tokens - before.num_prompt_tokens) / elapsed_s,
            (now.num_generation_tokens - before.num_generation_tokens) / elapsed_s,
            header.num_running,
            header.num_waiting,
            100 * header.num_blocks_used / max(header.num_blocks, 1),
            f"{100 * num_cached / num_queried:.1f}%" if num_queried else "-",
        )

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(INTERVAL_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.write()
        self._schedule(loop)

    def _counts(self) -> _Counts:
        m = self._metrics
        return _Counts(
            time.monotonic(), m.num_prompt_tokens, m.num_generation_tokens, m.num_queried_tokens, m.num_cached_tokens
        )
