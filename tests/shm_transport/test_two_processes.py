import array
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from ringserve.shm_transport import process, segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step_ring import Message, StepReader, StepRecord

PEER = Path(__file__).with_name("ring_peer.py")
CONFIG = RingConfig(num_step_slots=8, max_rows=8, max_tokens=64, max_logprob_entries=64)


@pytest.fixture
def ring() -> Segment:
    created = segment.create(segment.new_base_name() + "-step", segment.step_header(CONFIG, epoch=77))
    yield created
    created.unlink()


def start_peer(ring: Segment, **options: object) -> subprocess.Popen[bytes]:
    config = {"name": ring.name, "epoch": 77, "parent": os.getpid(), "seed": 1, **options}
    return subprocess.Popen([sys.executable, str(PEER), json.dumps(config)])


def read_one(reader: StepReader, peer: subprocess.Popen[bytes]) -> StepRecord | Message | None:
    deadline = time.monotonic() + 60
    while not reader.consumer.wait(timeout_s=0.1):
        if peer.poll() is not None and reader.consumer.num_pending == 0:
            return None
        assert time.monotonic() < deadline, "the ring is silent"
    return reader.read()


def check(record: StepRecord, n: int) -> None:
    tokens = array.array("i", record.token_ids)
    assert record.header.step == n
    assert record.handles[0] == zlib.crc32(tokens)
    assert set(record.handles[1:]) <= {n}
    assert record.header.num_running == n % 1000


@pytest.mark.parametrize(
    "num_records", [100_000, pytest.param(10_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_every_record_arrives_once_in_order_and_untorn(ring: Segment, num_records: int) -> None:
    peer, reader = start_peer(ring, num_records=num_records), StepReader(ring)
    assert isinstance(read_one(reader, peer), Message)
    ring.unlink()
    for n in range(num_records):
        record = read_one(reader, peer)
        assert isinstance(record, StepRecord)
        check(record, n)
    assert peer.wait(timeout=30) == 0


def test_a_killed_producer_leaves_what_it_posted(ring: Segment) -> None:
    peer, reader = start_peer(ring, num_records=6, kill_self=True), StepReader(ring)
    assert peer.wait(timeout=30) == -signal.SIGKILL
    assert isinstance(read_one(reader, peer), Message)
    for n in range(6):
        record = read_one(reader, peer)
        assert isinstance(record, StepRecord)
        check(record, n)
    assert read_one(reader, peer) is None


def test_a_stopped_consumer_makes_the_producer_wait_and_loses_nothing(ring: Segment) -> None:
    peer, reader = start_peer(ring, num_records=200), StepReader(ring)
    deadline = time.monotonic() + 30
    while reader.consumer.num_pending < CONFIG.num_step_slots:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert peer.poll() is None
    assert isinstance(read_one(reader, peer), Message)
    for n in range(200):
        record = read_one(reader, peer)
        assert isinstance(record, StepRecord)
        check(record, n)
    assert peer.wait(timeout=30) == 0


def test_the_producer_dies_with_the_process_that_started_it(ring: Segment) -> None:
    code = f"""
import json, os, subprocess, sys, time
config = {{"name": {ring.name!r}, "epoch": 77, "parent": os.getpid(), "seed": 1, "num_records": 10**9}}
print(subprocess.Popen([sys.executable, {str(PEER)!r}, json.dumps(config)]).pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.stdout.close()
    reader = StepReader(ring)
    deadline = time.monotonic() + 30
    while reader.consumer.num_pending == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while process.start_time(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
