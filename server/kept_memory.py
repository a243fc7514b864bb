"""Memory that malloc keeps of what threads have freed, back to the system.

Long texts and large bodies are handled on threads, and glibc keeps what those free: 60 bodies of 2 to 15 MB left 1 GB.
`malloc_trim` gives it back, in 60 ms for that, on a thread and without the GIL. Rejected: fewer arenas and a fixed
threshold for mmap, which change the peak and hardly what stays. Does nothing where the C library has no malloc_trim.
"""

import asyncio
import ctypes
from collections.abc import Callable
from pathlib import Path

_PERIOD_S = 2.0
_GROWTH_BYTES = 64 * 2**20
_GAIN_BYTES = 8 * 2**20
_EXTRA_TRIMS = 3  # after the last that gained: what was in use then may be free by now
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096


class KeptMemory:
    """Looks at the process's size, and trims once it has grown. `start` it in the loop; it ends with `stop`.

    Args:
        size: Returns the process's resident bytes.
        trim: Gives memory back; called on a thread.
        period_s: Between two looks.
    """

    def __init__(
        self,
        size: Callable[[], int] | None = None,
        trim: Callable[[], object] | None = None,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._size, self._trim, self._period_s = size or resident_bytes, trim or trim_memory, period_s
        self._smallest = 0
        self._num_left = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, with the size of now as that of a process at rest."""
        self._smallest = self._size()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="ringserve-kept-memory")

    def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            before = self._size()
            if before > self._smallest + _GROWTH_BYTES:
                self._num_left = _EXTRA_TRIMS
            if self._num_left:
                await asyncio.to_thread(self._trim)
                self._smallest = after = self._size()
                self._num_left = _EXTRA_TRIMS if before - after > _GAIN_BYTES else self._num_left - 1


def trim_memory() -> None:
    """Give what malloc keeps back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Return the process's size in memory."""
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
