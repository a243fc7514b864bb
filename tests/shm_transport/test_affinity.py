"""The ring is right, if slow, where two processes must share one core, and where a third one wants it too."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ringserve.shm_transport import segment
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step_ring import Message, StepReader, StepRecord
from tests.shm_transport.test_two_processes import CONFIG, check, read_one, start_peer

NUM_RECORDS = 50_000
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with the test, however that ends


@pytest.fixture
def ring() -> Iterator[Segment]:
    created = segment.create(segment.new_base_name() + "-step", segment.step_header(CONFIG, epoch=77))
    yield created
    created.unlink()


@pytest.fixture
def one_core() -> Iterator[set[int]]:
    """This process, and all that it starts, may use one core."""
    cores = os.sched_getaffinity(0)
    core = {max(cores)}
    os.sched_setaffinity(0, core)
    try:
        yield core
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    yield busy
    busy.kill()
    busy.wait()


def exchange(ring: Segment, cores: set[int]) -> None:
    """Start the producer, read and check all its records."""
    peer, reader = start_peer(ring, num_records=NUM_RECORDS), StepReader(ring)
    try:
        assert os.sched_getaffinity(peer.pid) == os.sched_getaffinity(0) == cores
        assert isinstance(read_one(reader, peer), Message)
        for n in range(NUM_RECORDS):
            record = read_one(reader, peer)
            assert isinstance(record, StepRecord)
            check(record, n)
        assert peer.wait(timeout=30) == 0
    finally:
        peer.kill()
        peer.wait()
    assert (reader.consumer.num_pending, ring.free.value) == (0, CONFIG.num_step_slots)


def test_every_record_arrives_with_both_processes_on_one_core(ring: Segment, one_core: set[int]) -> None:
    exchange(ring, one_core)


def test_every_record_arrives_with_a_busy_process_on_the_same_core(
    ring: Segment, one_core: set[int], busy_process: subprocess.Popen[bytes]
) -> None:
    exchange(ring, one_core)
    assert busy_process.poll() is None


def test_every_record_arrives_with_a_busy_process_on_the_machine(
    ring: Segment, busy_process: subprocess.Popen[bytes]
) -> None:
    exchange(ring, os.sched_getaffinity(0))
    assert busy_process.poll() is None
