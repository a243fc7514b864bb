"""How long does an engine step take to reach the asyncio task that handles it, in another process? One-way latency, us.

    python -m benchmarks.transport [--quick] [--json PATH]

The shared-memory ring (its three waiting strategies) against ZMQ in vLLM's shape, and against yardsticks: ZMQ with the
ring's bytes and no asyncio layer, the ring with an eventfd for a semaphore, multiprocessing.Queue, and a bare
semaphore. The rows are the same in every step, as between two arrivals. Paths take turns, round by round; figures are
over all rounds. `--quick` takes the target cells only.

CPU is us for each record. send: of the producer's process, but for its sleeping; decode: from the record's bytes to
Python values; reader: all of the consumer's process.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import posix_ipc
import uvloop
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import report
from benchmarks.report import Target
from benchmarks.transport_paths import (
    RINGS,
    Cell,
    Consumer,
    Eventfd,
    EventfdConsumer,
    Producer,
    QueueConsumer,
    QueueProducer,
    RingConsumer,
    RingProducer,
    TunedZmqConsumer,
    TunedZmqProducer,
    ZmqConsumer,
    ZmqProducer,
    make_step,
)
from benchmarks.transport_plot import plot
from ringserve.shm_transport import segment
from ringserve.shm_transport.ring import wait
from ringserve.shm_transport.strategies import STRATEGIES

ZMQ = "zmq (vLLM)"
PATHS = ("ring block", "ring adaptive", "ring spin", ZMQ, "zmq tuned", "ring eventfd", "mp.Queue")
QUICK_PATHS = PATHS[:4]
CELLS = (Cell(1), Cell(32), Cell(256), Cell(1024), Cell(256, num_logprobs=5))
QUICK_CELLS = (Cell(1), Cell(256))
GAPS_MS = (5, 1, 0)  # 0: closed loop, the next step when this one is decoded
WARM_UP = 20


@dataclass(slots=True)
class Samples:
    """What one path gave in one cell at one gap."""

    latency_us: list[float] = field(default_factory=list)
    decode_cpu_us: list[float] = field(default_factory=list)
    send_cpu_us: list[float] = field(default_factory=list)  # of each round, a mean
    consumer_cpu_us: list[float] = field(default_factory=list)  # whole process, of each round, a mean
    records_per_s: list[float] = field(default_factory=list)  # of each round
    round_p50_us: list[float] = field(default_factory=list)
    num_bytes: int = 0


class Route:
    """One path for one cell: a producer process, forked before anything runs, and this process's consumer."""

    def __init__(self, name: str, cell: Cell, folder: str) -> None:
        self._doorbell = posix_ipc.Semaphore(None, posix_ipc.O_CREX, initial_value=0)  # "decoded", for the closed loop
        self._pipe, other = multiprocessing.Pipe()
        make_producer, self._make_consumer = _ends(name, cell, folder)
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_produce, args=(other, make_producer, cell, self._doorbell), daemon=True)
        self._process.start()
        self._consumer: Consumer | None = None

    async def run(self, num_records: int, gap_ms: float, samples: Samples) -> None:
        """Measure one round."""
        self._consumer = self._consumer or self._make_consumer()
        num_seen = 0
        latencies: list[float] = []

        def handled(stamp_ns: int, now_ns: int, cpu_ns: int) -> None:
            nonlocal num_seen
            num_seen += 1
            if not gap_ms:
                self._doorbell.release()
            if num_seen > WARM_UP:
                latencies.append((now_ns - stamp_ns) / 1e3)
                samples.decode_cpu_us.append(cpu_ns / 1e3)

        total = num_records + WARM_UP
        started, cpu = time.monotonic(), time.process_time()
        self._pipe.send((total, gap_ms))
        await self._consumer.run(total, handled)
        elapsed_s, cpu_s = time.monotonic() - started, time.process_time() - cpu
        send_cpu_us, samples.num_bytes = self._pipe.recv()
        samples.latency_us += latencies
        samples.round_p50_us.append(statistics.median(latencies))
        samples.send_cpu_us.append(send_cpu_us)
        samples.consumer_cpu_us.append(cpu_s / total * 1e6)
        samples.records_per_s.append(total / elapsed_s)

    def close(self) -> None:
        """End the producer."""
        self._pipe.send(None)
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
        if self._consumer is not None:
            self._consumer.close()
        self._doorbell.unlink()


def _ends(name: str, cell: Cell, folder: str) -> tuple[Callable[[], Producer], Callable[[], Consumer]]:
    address = f"ipc://{folder}/{name.replace(' ', '-')}-{cell.num_rows}-{cell.num_logprobs}"
    if name == ZMQ:
        return lambda: ZmqProducer(address, cell), lambda: ZmqConsumer(address)
    if name == "zmq tuned":
        return lambda: TunedZmqProducer(address), lambda: TunedZmqConsumer(address, cell)
    if name == "mp.Queue":
        queue: multiprocessing.Queue[Any] = multiprocessing.get_context("fork").Queue()
        return lambda: QueueProducer(queue), lambda: QueueConsumer(queue)
    ring = segment.create(f"{segment.new_base_name()}-step", segment.step_header(RINGS, epoch=1))
    ring.unlink()
    if name == "ring eventfd":
        doorbell = Eventfd(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC))
        rung = replace(ring, filled=doorbell)
        return lambda: RingProducer(rung), lambda: EventfdConsumer(rung, doorbell)
    return lambda: RingProducer(ring), lambda: RingConsumer(ring, name.removeprefix("ring "))


def _produce(pipe: Connection, make: Callable[[], Producer], cell: Cell, decoded: posix_ipc.Semaphore) -> None:
    """The producer process: rounds of steps at a fixed gap, or each when the one before is decoded."""
    producer, step = make(), make_step(cell)
    while (order := pipe.recv()) is not None:
        num_records, gap_ms = order
        cpu_ns = num_bytes = 0
        other_threads_ns = time.process_time_ns() - time.thread_time_ns()  # ZMQ's and the queue's do the sending
        next_s = time.monotonic() + 0.05
        for n in range(num_records):
            if gap_ms:
                time.sleep(max(0.0, next_s - time.monotonic()))
                next_s += gap_ms / 1e3
            while not gap_ms and n > 0 and not wait(decoded, 1.0):
                pass
            started = time.thread_time_ns()
            num_bytes = producer.send(step, time.monotonic_ns())
            cpu_ns += time.thread_time_ns() - started
        while not gap_ms and not wait(decoded, 1.0):
            pass
        cpu_ns += time.process_time_ns() - time.thread_time_ns() - other_threads_ns
        pipe.send((cpu_ns / num_records / 1e3, num_bytes))


def measure_bare(num_rounds: int) -> dict[str, float]:
    """One way of a semaphore ping-pong between two processes that do nothing else, us."""
    ping, pong = (posix_ipc.Semaphore(None, posix_ipc.O_CREX, initial_value=0) for _ in range(2))

    def answer() -> None:
        for _ in range(num_rounds):
            ping.acquire()
            pong.release()

    process = multiprocessing.get_context("fork").Process(target=answer)
    process.start()
    samples = []
    for _ in range(num_rounds):
        started = time.monotonic_ns()
        ping.release()
        pong.acquire()
        samples.append((time.monotonic_ns() - started) / 2e3)
    process.join()
    ping.unlink()
    pong.unlink()
    return report.percentiles(samples)


async def measure(
    paths: dict[tuple[str, Cell], Route],
    gaps_ms: tuple[int, ...],
    num_rounds: int,
    num_records: int,
    progress: Progress,
) -> dict[tuple[str, Cell, int], Samples]:
    """Run every path in turn, round by round."""
    samples = {(name, cell, gap): Samples() for name, cell in paths for gap in gaps_ms}
    task = progress.add_task("measuring", total=num_rounds * len(samples))
    for _ in range(num_rounds):
        for (name, cell, gap), figures in samples.items():
            await paths[name, cell].run(num_records, gap, figures)
            progress.advance(task)
    return samples


@contextlib.contextmanager
def open_paths(names: tuple[str, ...], cells: tuple[Cell, ...]) -> Iterator[dict[tuple[str, Cell], Route]]:
    """Fork all producers, before this process has threads."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {(name, cell): Route(name, cell, folder) for cell in cells for name in names}
        try:
            yield paths
        finally:
            for path in paths.values():
                path.close()


@contextlib.contextmanager
def open_cells() -> Iterator[dict[str, Callable[[], dict[str, float]]]]:
    """Yield the ring's target cells, for benchmarks.compare."""
    names = [name for name in QUICK_PATHS if name != ZMQ]
    with open_paths(tuple(names), QUICK_CELLS) as paths, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def measure_round(route: Route) -> dict[str, float]:
            samples = Samples()
            runner.run(route.run(180, 5, samples))
            return {
                "p50_us": samples.round_p50_us[0], "send_cpu_us": samples.send_cpu_us[0],
                "decode_cpu_us": statistics.median(samples.decode_cpu_us),
            }  # fmt: skip

        yield {f"{name} {cell.num_rows} rows": partial(measure_round, route) for (name, cell), route in paths.items()}


def targets_of(samples: dict[tuple[str, Cell, int], Samples], is_full: bool) -> list[Target]:
    """Compare the ring with ZMQ at the 5 ms gap, as medians over the rounds."""

    def ratio(path: str, rows: int, get: Callable[[Samples], list[float]]) -> float:
        ring, zmq = (samples[name, Cell(rows), 5] for name in (path, ZMQ))
        return statistics.median(get(ring)) / statistics.median(get(zmq))

    targets = [
        Target("block_p50_1_row_vs_zmq", ratio("ring block", 1, lambda s: s.round_p50_us), 0.6),
        Target("block_p50_256_rows_vs_zmq", ratio("ring block", 256, lambda s: s.round_p50_us), 0.33),
        Target("adaptive_p50_256_rows_vs_zmq", ratio("ring adaptive", 256, lambda s: s.round_p50_us), 0.15),
        Target("spin_p50_256_rows_vs_zmq", ratio("ring spin", 256, lambda s: s.round_p50_us), 0.15),
        Target("producer_cpu_256_rows_vs_zmq", ratio("ring block", 256, lambda s: s.send_cpu_us), 0.1),
        Target("decode_cpu_256_rows_vs_zmq", ratio("ring block", 256, lambda s: s.decode_cpu_us), 0.25),
    ]
    if is_full:
        for path in (f"ring {strategy}" for strategy in STRATEGIES):
            for rows in (1, 256):
                ring, zmq = (report.percentiles(samples[name, Cell(rows), 5].latency_us) for name in (path, ZMQ))
                name = f"{path.removeprefix('ring ')}_p99_{rows}_rows_vs_zmq"
                targets.append(Target(name, ring["p99"] / zmq["p99"], 1.0))
    return targets


def show(samples: dict[tuple[str, Cell, int], Samples], bare: dict[str, float], console: Console) -> None:
    """Print the table."""
    title = "one-way latency and CPU for each record, us (closed: records/s)"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("rows", "gap", "path", "p50", "p90", "p99", "max", "send", "decode", "reader", "bytes"):
        table.add_column(column, justify="left" if column == "path" else "right", no_wrap=True)
    for (name, cell, gap), figures in sorted(
        samples.items(), key=lambda item: (item[0][1].num_rows, item[0][1].num_logprobs, -item[0][2])
    ):
        latency = report.percentiles(figures.latency_us)
        cpu = [
            statistics.median(values)
            for values in (figures.send_cpu_us, figures.decode_cpu_us, figures.consumer_cpu_us)
        ]
        rows = f"{cell.num_rows}" + (f" +{cell.num_logprobs}" if cell.num_logprobs else "")
        shown = [f"{latency[key]:.0f}" for key in ("p50", "p90", "p99", "max")]
        if not gap:
            shown = [f"{statistics.median(figures.records_per_s):.0f}/s", "", "", ""]
        table.add_row(
            rows,
            f"{gap} ms" if gap else "closed",
            name,
            *shown,
            *(f"{v:.1f}" for v in cpu),
            str(figures.num_bytes or ""),
        )
    console.print(table)
    console.print(f"bare semaphore hand-over: p50 {bare['p50']:.1f} us, p99 {bare['p99']:.1f} us")


def main() -> None:
    """Run, print, and save."""
    options = report.parse_arguments(argparse.ArgumentParser(description=__doc__), "transport")
    names, cells, gaps = (QUICK_PATHS, QUICK_CELLS, (5,)) if options.quick else (PATHS, CELLS, GAPS_MS)
    num_rounds, num_records = (5, 180) if options.quick else (10, 500)
    console = Console()
    console.width = max(console.width, 92)  # the table's
    bare = measure_bare(2000)
    with open_paths(names, cells) as paths, Progress(console=console) as progress:
        samples = uvloop.run(measure(paths, gaps, num_rounds, num_records, progress))
    show(samples, bare, console)
    figures = [
        {"path": name, "gap_ms": gap, **asdict(cell), "latency_us": report.percentiles(s.latency_us),
         "round_p50_us": s.round_p50_us, "send_cpu_us": statistics.median(s.send_cpu_us),
         "decode_cpu_us": statistics.median(s.decode_cpu_us), "consumer_cpu_us": statistics.median(s.consumer_cpu_us),
         "records_per_s": statistics.median(s.records_per_s), "bytes": s.num_bytes}
        for (name, cell, gap), s in samples.items()
    ]  # fmt: skip
    if options.json is not None:
        by_rows = {rows: {name: samples[name, Cell(rows), 5].latency_us for name in names} for rows in (1, 256)}
        plot(by_rows, options.json)
    result = {"is_quick": options.quick, "bare_semaphore_us": bare, "cells": figures}
    report.finish(options.json, "transport", result, targets_of(samples, is_full=not options.quick))


if __name__ == "__main__":
    main()
