"""Waiting for a record in an asyncio loop: asyncio cannot await a semaphore, so a small thread does, when asked.

The thread hands its token over as a credit that only the loop clears. A cancelled reader, a dropped wake-up or a signal
in the thread therefore lose no token: the next look takes the credit first. Liveness does not rest on the semaphore's
time-outs, which run on CLOCK_REALTIME: a timer of the loop ends each wait once a second.
"""

import asyncio
import queue
import threading

import posix_ipc

from ringserve.shm_transport.ring import Consumer

_TICK_S = 1.0


class BlockWaiter:
    """The `block` strategy. All methods are called in the loop's thread."""

    num_spins_hit = num_spins_missed = 0

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        # Orders are time-outs in seconds; None ends the thread. A queue in C: the thread must be back in it, and out of
        # the interpreter, before the loop that it has just woken wants to run (threading.Semaphore cost 11 us more).
        self._orders: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._is_armed = False  # set by the loop; cleared by the thread, before its wake-up call
        self._credit = False  # set by the thread, cleared by the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._wake_up: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self.num_wakes = 0

    def try_wait(self) -> bool:
        """Take a `filled` token if there is one: the thread's credit first, then the semaphore."""
        if self._credit:  # SYNC credit: pairs with _run; the thread rests until it is armed again
            self._credit = False
            return True
        return self._consumer.try_wait()

    async def wait(self, timeout_s: float) -> None:
        """Suspend until a token is probably there, `wake` is called, or `timeout_s` has passed; then call try_wait."""
        if self._credit:
            return
        loop = asyncio.get_running_loop()
        self._start(loop)
        self._wake_up = loop.create_future()
        timer = None
        if self._is_armed:  # by a wait that was cut short: its time-out may be a longer one
            timer = loop.call_later(timeout_s, self.wake)
        else:
            self._is_armed = True
            self._orders.put(timeout_s)
        try:
            await self._wake_up
        finally:
            self._wake_up = None
            if timer is not None:
                timer.cancel()

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
        """End the thread. The post wakes it if it waits for a record; the ring is not used after this."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._thread is not None:
            self._orders.put(None)
            self._consumer.filled.release()
            self._thread.join()
            self._thread = None

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            return
        self._loop = loop
        self._tick()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ringserve-waiter", daemon=True)
            self._thread.start()

    def _tick(self) -> None:
        assert self._loop is not None
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        self.wake()

    def _run(self) -> None:
        while (timeout_s := self._orders.get()) is not None:
            if self._take(timeout_s):
                self.num_wakes += 1
                self._credit = True  # SYNC credit: pairs with try_wait
            self._is_armed = False
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self.wake)
            except RuntimeError:  # the loop is closed: the credit waits for the next one
                continue

    def _take(self, timeout_s: float) -> bool:
        try:
            self._consumer.filled.acquire(timeout_s)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        return True
