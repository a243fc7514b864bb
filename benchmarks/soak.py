"""Does a server that works for hours grow, or slow down? A line a minute, the first quarter against the last.

    python -m benchmarks.soak [--minutes M] [--quick] [--json PATH]

A real server with the synthetic engine gets a random mix of requests (soak_load.py) at random moments, at 80%
of the rate that it reached with NUM_AT_ONCE clients that each wait for their answers. The client shares its core with
the engine.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import report
from benchmarks.processes import SyntheticServer, cores, cpu_ns, pin
from benchmarks.report import Target, percentiles
from benchmarks.soak_load import Clients, Mix, Tally

LOAD = 0.8  # of what the server can do
NUM_AT_ONCE = 512  # so many saturate the server, or the client
_MOST_THREADS = 6  # that asyncio's pool may come to have only after the warm-up
_MOST_FDS = 8  # that an idle server may have more of after the load
STEP_MS = 10
PERIOD_S, QUICK_PERIOD_S, NUM_QUICK_PERIODS = 60.0, 4.0, 8
_CALIBRATION_S, _WARM_UP_S = 15.0, 30.0
_CLOSING_S = 1.0  # in which the server notices that the last clients have left
_MB = 1e6
_LINE = (
    "{minute:5.1f} min  RSS {rss_mb:6.1f} MB, engine {engine_rss_mb:6.1f}; fds {num_fds:3d}; threads {num_threads:2d}; "
    "shared {shared_mb:5.2f} MB; {num_requests:6d} requests, {num_errors} errors; TTFT p99 {ttft_p99_ms:6.1f} ms; "
    "gap p99 {gap_p99_ms:6.1f} ms; CPU: server {cpu:.2f}, client {client_cpu:.2f}"
)


class Soak:
    """One run.

    Args:
        server: Has started, and is fresh.
    """

    def __init__(self, server: SyntheticServer) -> None:
        self._server = server
        self._engine_pid = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()[0])
        self._mix = Mix(seed=7)
        self._moments = random.Random(8)
        self.rate = 0.0  # requests a second that the server gets
        self.lines: list[dict[str, Any]] = []
        self.idle_fds: list[int] = []  # before the load, and after it

    async def run(self, num_periods: int, period_s: float, warm_up_s: float, calibration_s: float) -> None:
        """Find the rate, then load for `num_periods` after a warm-up, one line each."""
        clients = Clients(self._server.port)
        self.idle_fds.append(_count(self._server.pid, "fd"))
        self.rate = LOAD * await self._capacity(clients, calibration_s)
        print(f"{self.rate:.0f} requests a second, {LOAD:.0%} of what {NUM_AT_ONCE} clients at once can have")
        await self._load(clients, time.monotonic() + warm_up_s)
        started_s = time.monotonic()
        for i in range(1, num_periods + 1):
            clients.tally, began_s = Tally(), time.monotonic()
            before = cpu_ns(self._server.pid), time.process_time_ns()
            await self._load(clients, started_s + i * period_s)
            elapsed_s = time.monotonic() - began_s
            cpu = (cpu_ns(self._server.pid) - before[0]) / 1e9 / elapsed_s
            client_cpu = (time.process_time_ns() - before[1]) / 1e9 / elapsed_s
            line = self._line(clients) | {"cpu": cpu, "client_cpu": client_cpu}
            self.lines.append({"minute": (time.monotonic() - started_s) / 60, **line})
            print(_LINE.format(**self.lines[-1]), flush=True)
        await clients.wait()
        await asyncio.sleep(_CLOSING_S)
        self.idle_fds.append(_count(self._server.pid, "fd"))

    async def _capacity(self, clients: Clients, duration_s: float) -> float:
        ends_s, num_done = time.monotonic() + duration_s, 0

        async def one_after_the_other() -> None:
            nonlocal num_done
            while time.monotonic() < ends_s:
                await clients.start(self._mix.draw())
                num_done += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(NUM_AT_ONCE)))
        return num_done / (time.monotonic() - ends_s + duration_s)

    async def _load(self, clients: Clients, until_s: float) -> None:
        """Start visits at random moments, whether or not those before have ended."""
        next_s = time.monotonic()
        while next_s < until_s:
            await asyncio.sleep(next_s - time.monotonic())
            clients.start(self._mix.draw())
            next_s += self._moments.expovariate(self.rate)

    def _line(self, clients: Clients) -> dict[str, Any]:
        tally = clients.tally
        ttft, gaps = percentiles(tally.ttft_s), percentiles(tally.gaps_s)
        server, engine = _memory(self._server.pid), _memory(self._engine_pid)
        return {
            "rss_mb": server["VmRSS"], "engine_rss_mb": engine["VmRSS"],
            "shared_mb": server["RssShmem"], "num_fds": _count(self._server.pid, "fd"),
            "num_threads": _count(self._server.pid, "task"), "num_shm_names": _num_shm_names(self._server.pid),
            "num_requests": tally.num_requests, "num_left": tally.num_left, "num_refused": tally.num_refused,
            "num_running": clients.num_running, "num_errors": tally.errors.total(), "errors": dict(tally.errors),
            "ttft_p50_ms": ttft["p50"] * 1e3, "ttft_p99_ms": ttft["p99"] * 1e3, "gap_p50_ms": gaps["p50"] * 1e3,
            "gap_p99_ms": gaps["p99"] * 1e3,
        }  # fmt: skip

    def targets(self) -> list[Target]:
        """Compare the last quarter with the first: medians, which a single bad minute does not move."""
        num = max(1, len(self.lines) // 4)

        def quarters(name: str) -> list[float]:
            parts = (self.lines[:num], self.lines[-num:])
            return [float(statistics.median(line[name] for line in part)) for part in parts]

        def ratio(name: str) -> float:
            first, last = quarters(name)
            return last / first

        def grown(name: str) -> float:
            first, last = quarters(name)
            return last - first

        return [
            Target("errors", sum(line["num_errors"] for line in self.lines), 0),
            Target("rss_last_vs_first_quarter", ratio("rss_mb"), 1.05),
            Target("engine_rss_last_vs_first_quarter", ratio("engine_rss_mb"), 1.05),
            Target("shared_memory_last_vs_first_quarter", ratio("shared_mb"), 1.05),
            Target("shm_names", max(line["num_shm_names"] for line in self.lines), 0),
            Target("idle_fds_grown", self.idle_fds[1] - self.idle_fds[0], _MOST_FDS),
            Target("threads_grown", grown("num_threads"), _MOST_THREADS),
            Target("ttft_p99_last_vs_first_quarter", ratio("ttft_p99_ms"), 1.25),
            Target("gap_p99_last_vs_first_quarter", ratio("gap_p99_ms"), 1.25),
        ]


def _memory(pid: int) -> dict[str, float]:
    """Return a process's memory by /proc's names, MB."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 / _MB for words in lines if words[-1] == "kB"}


def _count(pid: int, what: str) -> int:
    return len([*Path(f"/proc/{pid}/{what}").iterdir()])


def _num_shm_names(pid: int) -> int:
    return len([path for path in Path("/dev/shm").iterdir() if f"ringserve-{pid}-" in path.name])


def main() -> None:
    """Run, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=60, help="how long (default: 60)")
    options = report.parse_arguments(parser, "soak")
    pin(os.getpid(), cores()[1])
    num_periods, period_s, warm_up_s, calibration_s = options.minutes, PERIOD_S, _WARM_UP_S, _CALIBRATION_S
    if options.quick:
        num_periods, period_s, warm_up_s, calibration_s = NUM_QUICK_PERIODS, QUICK_PERIOD_S, 4.0, 4.0
    with tempfile.TemporaryDirectory() as folder:
        server = SyntheticServer(Path(folder), "--step-time-ms", str(STEP_MS), "--max-num-seqs", "1024")
        try:
            assert server.port
            soak = Soak(server)
            uvloop.run(soak.run(num_periods, period_s, warm_up_s, calibration_s))
        finally:
            server.close()
    figures = {"is_quick": options.quick, "minutes": num_periods * period_s / 60, "requests_per_s": soak.rate,
               "idle_fds": soak.idle_fds, "lines": soak.lines}  # fmt: skip
    report.finish(options.json, "soak", figures, soak.targets())


if __name__ == "__main__":
    main()
