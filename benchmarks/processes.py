"""What the benchmarks of the whole path start: servers, floors, and the load client; and how they look at them.

CPU time is the process's own CPU clock: utime and stime of /proc/PID/stat in nanoseconds instead of 10 ms ticks.

A serving process has a core to itself. Left alone, the scheduler puts a client that a write wakes on the writer's core,
where it waits until the server is done: over a network no client does that, and latencies came out twice as long.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ringserve.shm_transport import process

_ADDRESS = re.compile(r"http://[\d.]+:(\d+)")
_CPUCLOCK_SCHED = 2  # of <linux/posix-timers.h>: all threads, those that have ended too


def cpu_ns(pid: int) -> int:
    """Return a process's CPU time, user and system."""
    return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)


def rss_bytes(pid: int) -> int:
    """Return a process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def cores() -> tuple[set[int], set[int]]:
    """Return the serving processes' core and those of all others; the same one where there is one only."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def pin(pid: int, to: set[int]) -> None:
    """Bind a process, with the threads that it has and those to come, to cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), to)


class StepLog:
    """Reads what a synthetic engine or a floor logs of its steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_steps(self) -> np.ndarray:
        """Return the steps with rows since the last call: [num_steps, 3] int64: published_ns, rows, tokens."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        steps = np.array(text.split(), np.int64).reshape(-1, 3)
        return steps[steps[:, 1] > 0]


class Listening:
    """A command that prints its address once it listens. It gets a core to itself; its children get the others.

    It ends with the thread that makes this, however that ends.

    Attributes:
        pid: Of the process that serves; of a server, not its engine's.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        root = Path(__file__).parents[1]
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
            preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # no threads yet
        )  # fmt: skip
        self.pid = self._process.pid

    @functools.cached_property
    def port(self) -> int:
        """Wait until it listens, and return where on 127.0.0.1.

        Raises:
            RuntimeError: If it does not; its stderr says why.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = _ADDRESS.search(line)
        if match is None:
            raise RuntimeError(f"{' '.join(self._command)} did not start: {line!r}")
        own, others = cores()
        pin(self.pid, own)
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            pin(int(child), others)
        return int(match[1])

    def close(self) -> None:
        """End it: by SIGTERM, after 5 s by SIGKILL."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()


class SyntheticServer(Listening):
    """`ringserve serve --engine synthetic`, with a log of its steps.

    Args:
        folder: For its files.
        flags: More of its flags.
        is_lockstep: The engine waits for the clients; `counter` is then the file in which they count events.
        module: Which command line: the server's own, or one that wraps it.
    """

    def __init__(
        self, folder: Path, *flags: str, is_lockstep: bool = False, module: str = "ringserve.server.cli"
    ) -> None:
        own = Path(tempfile.mkdtemp(dir=folder))
        self.steps = StepLog(own / "steps")
        self.counter = own / "counter" if is_lockstep else None
        if self.counter is not None:
            self.counter.write_bytes(bytes(8))
            flags = (*flags, "--lockstep", str(self.counter))
        common = ("--engine", "synthetic", "--port", "0", "--max-model-len", "100000000", "--drain-timeout", "1")
        super().__init__(module, "serve", *common, "--step-log", str(self.steps.path), *flags)


def peak_rss_bytes(pid: int, is_over: Callable[[float], bool]) -> int:
    """Sample until `is_over`, which waits for so many seconds at most; return the largest."""
    peak = rss_bytes(pid)
    while not is_over(0.05):
        peak = max(peak, rss_bytes(pid))
    return peak
