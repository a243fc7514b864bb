"""Waiting for a record in an asyncio loop: asyncio cannot await a semaphore, so a small thread does, when asked.

The thread hands its token over as a credit that only the loop clears. A cancelled reader, a dropped wake-up or a signal
in the thread therefore lose no token: the next look takes the credit first. Liveness does not rest on the semaphore's
time-outs, which run on CLOCK_REALTIME: the loop's own timer bounds each wait.
"""

import asyncio
import contextlib
import threading

import posix_ipc

from shm_transport.ring import Consumer

_SLICE_S = 1.0  # how long the thread waits before it looks whether it should end


class BlockWaiter:
    """The `block` strategy. All methods are called in the loop's thread."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._arm = threading.Semaphore(0)
        self._is_armed = False  # the loop's own
        self._credit = False  # set by the thread, cleared by the loop
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_up: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self.num_wakes = 0

    def try_wait(self) -> bool:
        """Take a `filled` token if there is one: the thread's credit first, then the semaphore."""
        if self._credit:  # SYNC credit: pairs with _run; the thread rests until it is armed again
            self._credit = False
            self._is_armed = False
            return True
        return self._consumer.try_wait()

    async def wait(self, timeout_s: float) -> None:
        """Suspend until a token is probably there, `wake` is called, or `timeout_s` has passed; then call try_wait."""
        loop = asyncio.get_running_loop()
        self._start(loop)
        self._wake_up = loop.create_future()
        if not self._is_armed:
            self._is_armed = True
            self._arm.release()
        timer = loop.call_later(timeout_s, self.wake)
        try:
            if not self._credit:
                await self._wake_up
        finally:
            timer.cancel()
            self._wake_up = None

    @property
    def has_credit(self) -> bool:
        """Whether the thread has handed a token over."""
        return self._credit

    def note(self, published_ns: int) -> None:
        """Take a record's publish stamp; of no use to this strategy."""

    def wake(self) -> None:
        """End the wait now."""
        if self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(None)

    def close(self) -> None:
        """End the thread. The posts wake it wherever it waits; the ring is not used after this."""
        self._is_closed = True
        if self._thread is not None:
            self._arm.release()
            self._consumer.filled.release()
            self._thread.join()
            self._thread = None

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ringserve-waiter", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._arm.acquire()
            while not self._is_closed and not self._take():
                pass
            if self._is_closed:
                return
            self._credit = True  # SYNC credit: pairs with try_wait
            self.num_wakes += 1
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.wake)

    def _take(self) -> bool:
        try:
            self._consumer.filled.acquire(_SLICE_S)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        return True
