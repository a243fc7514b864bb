"""Watches a server from a process of its own while a test attacks it: /health each 50 ms, memory, descriptors, threads.

A process, because the attacker's Python would be measured otherwise.
"""

import multiprocessing
import os
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

PERIOD_S = 0.05
HEALTH_LIMIT_S = 0.1  # what /health may take, whatever happens
WATCHDOG = 5  # times that: a shared machine's own pauses are no finding
_FOOTPRINT_EACH = 20  # polls
_TIMEOUT_S = 30
_QUESTION = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds."""

    rss_mb: float
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        """Look at a live process."""
        proc = Path(f"/proc/{pid}")
        rss_mb = int((proc / "statm").read_text().split()[1]) * _PAGE_BYTES / 1e6
        return cls(rss_mb, len([*(proc / "fd").iterdir()]), len([*(proc / "task").iterdir()]))


@dataclass(slots=True)
class Report:
    """What was seen. Times in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    worst_gap_s: float = 0.0  # between two answers
    failures: list[str] = field(default_factory=list)  # polls that were not answered with 200
    curve: list[tuple[float, Footprint]] = field(default_factory=list)

    def line(self) -> str:
        """Return it in words."""
        latencies = sorted(self.latencies_s)
        p50, p99, worst = (latencies[int((len(latencies) - 1) * part)] * 1e3 for part in (0.5, 0.99, 1.0))
        curve = " ".join(f"{at:.0f}s:{each.rss_mb:.0f}" for at, each in self.curve[:: len(self.curve) // 12 + 1])
        return (
            f"/health {len(latencies)} times: p50 {p50:.1f}, p99 {p99:.1f}, worst {worst:.1f} ms, worst gap "
            f"{self.worst_gap_s * 1e3:.0f} ms, {len(self.failures)} failed; RSS MB {curve}; "
            f"most fds {max(each.num_fds for _, each in self.curve)}, "
            f"threads {max(each.num_threads for _, each in self.curve)}"
        )


class Watch:
    """A context in which a server is watched; `report` is there after it.

    Args:
        port: Where /health is.
        pid: Of the server.
    """

    def __init__(self, port: int, pid: int) -> None:
        self._pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_watch, args=(other, port, pid), daemon=True)
        self.report = Report()

    def __enter__(self) -> "Watch":
        self._process.start()
        assert self._pipe.poll(_TIMEOUT_S), "the watching process does not start"
        self._pipe.recv()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        self._pipe.send("end")
        if self._pipe.poll(_TIMEOUT_S + 10):
            self.report = self._pipe.recv()
        self._process.kill()
        self._process.join()
        self._process.close()
        if exc is None:
            print(self.report.line())
            self.check()

    def check(self) -> None:
        """Fail if the server was not there for others at any moment."""
        assert self.report.latencies_s
        assert self.report.failures == []
        assert max(self.report.latencies_s) < WATCHDOG * HEALTH_LIMIT_S


def _watch(pipe: Connection, port: int, pid: int) -> None:
    report, started_s = Report(), time.monotonic()
    answered_s, polls = started_s, 0
    pipe.send("ready")
    while not pipe.poll(max(0.0, started_s + polls * PERIOD_S - time.monotonic())):
        if polls % _FOOTPRINT_EACH == 0:
            report.curve.append((time.monotonic() - started_s, Footprint.of(pid)))
        begun_s = time.monotonic()
        try:
            answer = _ask(port)
        except OSError as exc:
            answer = repr(exc).encode()
        now_s = time.monotonic()
        if not answer.startswith(b"HTTP/1.1 200 "):
            report.failures.append(f"{now_s - started_s:.1f} s: {answer[:200]!r}")
        report.latencies_s.append(now_s - begun_s)
        report.worst_gap_s = max(report.worst_gap_s, now_s - answered_s)
        answered_s = now_s
        polls = max(polls + 1, int((now_s - started_s) / PERIOD_S))
    report.curve.append((time.monotonic() - started_s, Footprint.of(pid)))
    pipe.send(report)


def _ask(port: int) -> bytes:
    """Return the answer of /health on a new connection, as a balancer asks."""
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as client:
        client.sendall(_QUESTION)
        answer = b""
        while part := client.recv(4096):
            answer += part
    return answer
