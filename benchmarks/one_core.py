"""Does a waiting strategy slow an engine that has to share its only core with the server? Steps each second.

    python -m benchmarks.one_core [--quick] [--json PATH]

An engine process computes for 4 ms a step, publishes, and goes on; the reader waits for it by `adaptive` or `block`.
Both are pinned to one core, and take turns, round by round.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time

import uvloop
from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.report import Target
from benchmarks.transport_paths import RINGS, Cell, make_step
from ringserve.shm_transport import process, segment
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step_ring import StepReader, StepRecord, StepWriter
from ringserve.shm_transport.strategies import make_waiter

STEP_S = 0.004
NUM_ROWS = 32


def compute(seconds: float) -> None:
    """Burn CPU time, not wall time: a neighbour on the core makes it last longer."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def run_engine(ring: Segment, server_pid: int) -> None:
    """Publish a step each STEP_S of CPU time, for as long as the server lives."""
    process.die_with_parent(server_pid)
    writer, step = StepWriter(ring, on_full=lambda: None), make_step(Cell(NUM_ROWS))
    while True:
        compute(STEP_S)
        writer.publish(step)


async def steps_per_s(strategy: str, duration_s: float) -> float:
    """Measure one round."""
    ring = segment.create(f"{segment.new_base_name()}-step", segment.step_header(RINGS, epoch=1))
    ring.unlink()
    context = multiprocessing.get_context("fork")
    engine = context.Process(target=run_engine, args=(ring, os.getpid()), daemon=True)
    engine.start()
    assert engine.pid is not None
    reader = StepReader(ring)
    waiter = make_waiter(strategy, reader.consumer, engine.pid)
    num_steps, started = -20, 0.0  # warm-up
    while num_steps <= 0 or time.monotonic() < started + duration_s:
        while not waiter.try_wait():
            await waiter.wait(timeout_s=1)
        record = reader.read()
        assert isinstance(record, StepRecord)
        waiter.note(record.header.published_ns)
        num_steps += 1
        if num_steps == 0:
            started = time.monotonic()
        await asyncio.sleep(0)
    rate = num_steps / (time.monotonic() - started)
    engine.kill()
    engine.join()
    waiter.close()
    return rate


def main() -> None:
    """Run, print, and save."""
    options = report.parse_arguments(argparse.ArgumentParser(description=__doc__), "one_core")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before any thread or process is made: they inherit it
    rates: dict[str, list[float]] = {"block": [], "adaptive": []}
    for _ in track(range(4 if options.quick else 20), "measuring", console=Console(stderr=True)):
        for strategy, values in rates.items():
            values.append(uvloop.run(steps_per_s(strategy, 2.0)))
    medians = {strategy: statistics.median(values) for strategy, values in rates.items()}
    for strategy, median in medians.items():
        print(f"{strategy:9} {median:6.1f} steps/s, from {min(rates[strategy]):.1f} to {max(rates[strategy]):.1f}")
    ratio = medians["adaptive"] / medians["block"]
    targets = [Target("adaptive_steps_per_s_vs_block_on_one_core", ratio, 0.98, is_upper_bound=False)]
    report.finish(options.json, "one_core", {"is_quick": options.quick, "steps_per_s": rates}, targets)


if __name__ == "__main__":
    main()
