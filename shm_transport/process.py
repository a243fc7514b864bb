"""What a process must know of another one: alive or not, and which one it is. Linux only."""

import ctypes
import os
import select
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if there is no such process.

    Together with the pid it names one process for ever: pids are used again, pairs are not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def is_alive(pid: int, started: int) -> bool:
    """Return whether the process that had `pid` at `started` (see start_time) still runs."""
    return start_time(pid) == started


class PeerProcess:
    """Another process, watched through a pidfd: its pid, used again, is not mistaken for it.

    Raises:
        ProcessLookupError: If there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    def is_alive(self) -> bool:
        """Return whether it still runs; never waits. A process that nobody has reaped yet is dead."""
        return not self._poll.poll(0)

    def close(self) -> None:
        """Give the pidfd back."""
        os.close(self._pidfd)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit at once if it already has.

    Called by the child itself: between fork and here the parent may have died, hence the look at getppid().
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent process is {os.getppid()}, expected {parent_pid}: it died during start-up")
