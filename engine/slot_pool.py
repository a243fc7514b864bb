"""Which request holds which token slots of the KV cache. Bookkeeping only: numpy, no torch.

A request reserves, when it is admitted, every slot that it can come to need, so it never has to be stopped for want of
memory. The unit that figures report is one token.
"""

import numpy as np
from numpy.typing import NDArray

PADDING_SLOT = 0  # never given to a request; the cache keeps it finite, so that padding can be gathered safely


class SlotPool:
    """Slots 1 to num_slots, each for the keys and values of one token."""

    def __init__(self, num_slots: int) -> None:
        # A stack: freed slots are taken first, so the memory touched is the most that was ever used at once.
        self._free = np.arange(num_slots, 0, -1, dtype=np.int64)
        self._num_free = num_slots
        self._held: dict[int, NDArray[np.int64]] = {}

    @property
    def num_slots(self) -> int:
        """Tokens that fit in all."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Tokens that are reserved."""
        return len(self._free) - self._num_free

    def try_allocate(self, handle: int, capacity: int) -> bool:
        """Reserve slots for `capacity` tokens; False, and nothing reserved, if there are not enough."""
        assert handle not in self._held
        if capacity > self._num_free:
            return False
        self._num_free -= capacity
        self._held[handle] = self._free[self._num_free : self._num_free + capacity][::-1].copy()
        return True

    def free(self, handle: int) -> None:
        """Take back what the request holds; one that holds nothing is ignored."""
        slots = self._held.pop(handle, None)
        if slots is not None:
            self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
            self._num_free += len(slots)

    def slots_of(self, handle: int) -> NDArray[np.int64]:
        """Return the request's slots, [capacity], the slot of position p at index p."""
        return self._held[handle]
