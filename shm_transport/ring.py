"""The ring protocol: fixed slots, two counting semaphores, one producer and one consumer.

`head` and `tail` are private to their side; only slots and semaphores are shared. POSIX lists sem_post and sem_wait as
synchronizing memory, which is what orders the payload, on ARM too. A slot is read only with a `filled` token in hand.
"""

from typing import NamedTuple

import posix_ipc

from ringserve.shm_transport.errors import SequenceError
from ringserve.shm_transport.layout import struct_of
from ringserve.shm_transport.records import RECORD_HEADER
from ringserve.shm_transport.segment import Segment

HEADER = struct_of(RECORD_HEADER)
HEADER_BYTES = RECORD_HEADER.itemsize


class RecordHeader(NamedTuple):
    """What HEADER unpacks: the fields of RECORD_HEADER, in its order."""

    sequence: int
    kind: int
    flags: int
    body_bytes: int
    message_bytes: int
    num_rows: int
    num_tokens: int
    num_logprob_entries: int
    num_prefill_tokens: int
    step: int
    scheduled_ns: int
    forward_done_ns: int
    published_ns: int
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks: int
    num_preemptions: int
    num_aborted: int = 0
    aborted_ns: int = 0


assert RecordHeader._fields == RECORD_HEADER.names


def wait(semaphore: posix_ipc.Semaphore, timeout_s: float) -> bool:
    """Take one token, waiting up to `timeout_s`; a signal makes it return False early, so callers loop."""
    try:
        semaphore.acquire(timeout_s)
    except (posix_ipc.BusyError, posix_ipc.SignalError):
        return False
    return True


class Producer:
    """The filling side. One thread of one process calls it."""

    def __init__(self, segment: Segment) -> None:
        self._free = segment.free
        self._filled = segment.filled
        self._num_slots = segment.header.num_slots
        self._holds_slot = False
        self.sequence = 0  # that the next record must carry, the tail: the producer's own, never shared
        self.slot = 0  # index of the slot to fill next

    def try_claim(self) -> bool:
        """Make sure that the next slot is free to fill; False if the ring is full."""
        if not self._holds_slot:
            try:
                self._free.acquire(0)  # SYNC slot-free: pairs with Consumer.release
            except (posix_ipc.BusyError, posix_ipc.SignalError):
                return False
            self._holds_slot = True
        return True

    def wait_claim(self, timeout_s: float) -> bool:
        """Like try_claim, waiting up to `timeout_s`."""
        if not self._holds_slot:
            self._holds_slot = wait(self._free, timeout_s)  # SYNC slot-free: pairs with Consumer.release
        return self._holds_slot

    def publish(self) -> None:
        """Hand the claimed, filled slot to the consumer."""
        assert self._holds_slot
        self._holds_slot = False
        self.sequence += 1
        self.slot = self.sequence % self._num_slots
        self._filled.release()  # SYNC slot-filled: pairs with Consumer.try_wait and wait; the payload is visible first


class Consumer:
    """The reading side. One thread calls it; the waiter thread may wait on `filled` in its place."""

    def __init__(self, segment: Segment) -> None:
        self.filled = segment.filled
        self._free = segment.free
        self._num_slots = segment.header.num_slots
        self._head = 0  # the consumer's own, never shared
        self.slot = 0  # index of the slot to read next

    @property
    def num_pending(self) -> int:
        """Records that are posted and not yet taken."""
        return int(self.filled.value)

    def try_wait(self) -> bool:
        """Take a `filled` token if there is one. `.value` first: an empty acquire(0) raises, at 8x the cost."""
        if self.filled.value == 0:
            return False
        try:
            self.filled.acquire(0)  # SYNC slot-filled: pairs with Producer.publish
        except (posix_ipc.BusyError, posix_ipc.SignalError):  # the waiter thread was faster; a signal came in
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        """Take a `filled` token, waiting up to `timeout_s`."""
        return wait(self.filled, timeout_s)  # SYNC slot-filled: pairs with Producer.publish

    def check(self, sequence: int) -> None:
        """Check the sequence number found in the slot.

        Raises:
            SequenceError: If it is not the next one: a lost record, or a semaphore posted once too often.
        """
        if sequence != self._head:
            raise SequenceError(
                f"record {sequence} where record {self._head} must come: a gap or an over-posted semaphore"
            )

    def release(self) -> None:
        """Give the slot back; its memory must not be looked at any more."""
        self._head += 1
        self.slot = self._head % self._num_slots
        self._free.release()  # SYNC slot-free: pairs with Producer.try_claim and wait_claim
