"""Full rings: the producer waits, counts the wait and goes on, or learns that nobody will ever make room.

The peers are this file, started as a program.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ringserve.shm_transport import process, segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import PeerDiedError
from ringserve.shm_transport.messages import AddRequest
from ringserve.shm_transport.records import RecordKind, RingKind
from ringserve.shm_transport.request_ring import Inbox, Outbox
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step_ring import Message, StepReader, StepRecord, StepWriter
from tests.shm_transport.ring_peer import checked_step
from tests.shm_transport.test_two_processes import check, read_one

ROOT = Path(__file__).parents[2]
CONFIG = RingConfig(
    num_step_slots=4, max_rows=8, max_tokens=64, max_logprob_entries=64, num_request_slots=4, request_slot_bytes=256
)
EPOCH = 77
NUM_STEPS = 200
NUM_REQUESTS = 24
LIMIT_S = 30.0


def consumer(step_name: str, _: str) -> None:
    """Read and check steps until a REPLY comes."""
    reader, parent = StepReader(segment.attach(step_name, RingKind.STEP, EPOCH)), os.getppid()
    for n in range(NUM_STEPS + 1):
        while not reader.consumer.wait(timeout_s=0.1):
            assert os.getppid() == parent
        record = reader.read()
        if n < NUM_STEPS:
            assert isinstance(record, StepRecord)
            check(record, n)
    assert record == Message(RecordKind.REPLY, b"end")


def engine(step_name: str, request_name: str) -> None:
    """Fill the step ring, stop, publish the rest; the request ring is drained only while the step ring is full."""
    requests = Inbox(segment.attach(request_name, RingKind.REQUEST, EPOCH))
    handles, parent, rng = [], os.getppid(), np.random.default_rng(1)

    def on_full() -> None:
        assert os.getppid() == parent
        handles.extend(request.handle for request in requests.drain())

    writer = StepWriter(segment.attach(step_name, RingKind.STEP, EPOCH), on_full)
    for n in range(NUM_STEPS):
        if n == CONFIG.num_step_slots:
            os.kill(os.getpid(), signal.SIGSTOP)
        writer.publish(checked_step(n, rng))
    writer.publish_message(RecordKind.REPLY, json.dumps(handles).encode())


@pytest.fixture
def rings(make_rings) -> tuple[Segment, Segment]:
    return make_rings(CONFIG, EPOCH)


@pytest.fixture
def start(rings: tuple[Segment, Segment]) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started = []

    def start(role: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.shm_transport.test_full_rings", role, rings[0].name, rings[1].name]
        started.append(subprocess.Popen(command, cwd=ROOT))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()  # ends a stopped process too
        peer.wait()


def wait_stopped(peer: subprocess.Popen[bytes]) -> None:
    assert os.WIFSTOPPED(os.waitpid(peer.pid, os.WUNTRACED)[1])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_stopped_consumer_makes_the_producer_wait_until_it_continues(
    rings: tuple[Segment, Segment], start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    peer, rng, num_slices = start("consumer"), np.random.default_rng(1), 0
    is_stopped = False

    def on_full() -> None:
        nonlocal num_slices
        num_slices += is_stopped
        if num_slices == 3:
            os.kill(peer.pid, signal.SIGCONT)
        assert num_slices < 100
        assert peer.poll() is None

    writer = StepWriter(rings[0], on_full)
    for n in range(NUM_STEPS):
        if n == NUM_STEPS // 2:
            os.kill(peer.pid, signal.SIGSTOP)
            wait_stopped(peer)
            is_stopped, stalls_before, stall_ns_before = True, writer.num_stalls, writer.stall_ns
        writer.publish(checked_step(n, rng))
    writer.publish_message(RecordKind.REPLY, b"end")
    assert peer.wait(timeout=LIMIT_S) == 0  # it has checked every step
    assert num_slices >= 3
    assert writer.num_stalls > stalls_before
    assert writer.stall_ns - stall_ns_before >= 125_000_000  # three slices of 50 ms, on another clock


def test_a_dead_consumer_ends_the_producers_wait_within_100_ms(
    rings: tuple[Segment, Segment], start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    peer, rng, killed_ns = start("consumer"), np.random.default_rng(1), 0
    consumer_process = process.PeerProcess(peer.pid)

    def on_full() -> None:
        nonlocal killed_ns
        if not consumer_process.is_alive():
            raise PeerDiedError("the consumer died")
        if not killed_ns:  # at the start of a slice: the longest wait there can be
            killed_ns = time.monotonic_ns()
            os.kill(peer.pid, signal.SIGKILL)

    writer = StepWriter(rings[0], on_full)
    os.kill(peer.pid, signal.SIGSTOP)
    wait_stopped(peer)
    for n in range(CONFIG.num_step_slots):
        writer.publish(checked_step(n, rng))
    try:
        with pytest.raises(PeerDiedError):
            writer.publish(checked_step(CONFIG.num_step_slots, rng))
        waited_s = (time.monotonic_ns() - killed_ns) / 1e9
    finally:
        consumer_process.close()
    print(f"the wait ended {1000 * waited_s:.1f} ms after the consumer's death")
    assert killed_ns
    assert waited_s < 0.5


def test_both_rings_full_at_once_end_well(
    rings: tuple[Segment, Segment], start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    steps, requests = rings
    outbox, reader = Outbox(requests), StepReader(steps)
    for handle in range(NUM_REQUESTS):
        outbox.add(AddRequest(handle=handle, prompt_token_ids=np.arange(4, dtype=np.int32), max_tokens=1))
    outbox.flush()
    peer = start("engine")
    wait_stopped(peer)
    assert (steps.free.value, requests.free.value) == (0, 0)  # both full

    os.kill(peer.pid, signal.SIGCONT)

    def sends_all() -> bool:
        outbox.flush()
        assert reader.consumer.num_pending == CONFIG.num_step_slots  # full all the time
        return outbox.is_empty and requests.filled.value == 0

    wait_until(sends_all)
    for n in range(NUM_STEPS):
        record = read_one(reader, peer)
        assert isinstance(record, StepRecord)
        check(record, n)
    message = read_one(reader, peer)
    assert isinstance(message, Message)
    assert json.loads(message.body) == list(range(NUM_REQUESTS))
    assert peer.wait(timeout=LIMIT_S) == 0


if __name__ == "__main__":
    role, *names = sys.argv[1:]
    process.die_with_parent(os.getppid())
    {"consumer": consumer, "engine": engine}[role](*names)
