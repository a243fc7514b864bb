import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringserve.shm_transport import process, segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import (
    RecordTooLargeError,
    SegmentError,
    SegmentMismatchError,
    SegmentMissingError,
    SharedMemoryFullError,
)
from ringserve.shm_transport.records import RingKind
from ringserve.shm_transport.segment import Segment

SHM = Path("/dev/shm")


def files_of(name: str) -> list[Path]:
    return [path for path in SHM.iterdir() if name.lstrip("/") in path.name]


def test_names_are_private_to_the_user_and_gone_after_unlink(step_segment: Segment) -> None:
    files = files_of(step_segment.name)
    assert len(files) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    step_segment.unlink()
    step_segment.unlink()
    assert files_of(step_segment.name) == []


def test_attach_sees_what_the_creator_wrote(step_segment: Segment) -> None:
    attached = segment.attach(step_segment.name, RingKind.STEP, epoch=7)
    step_segment.slot(1)[:5] = b"hello"
    assert attached.header == step_segment.header
    assert bytes(attached.slot(1)[:5]) == b"hello"
    assert attached.free.value == step_segment.header.num_slots


def test_attach_to_a_missing_segment_names_it() -> None:
    with pytest.raises(SegmentMissingError, match="ringserve-nowhere"):
        segment.attach("/ringserve-nowhere", RingKind.STEP, epoch=1)


@pytest.mark.parametrize(
    ("ring", "epoch", "message"),
    [(RingKind.STEP, 8, "epoch is 0x7, expected 0x8"), (RingKind.REQUEST, 7, "ring is 0x1, expected 0x2")],
)
def test_attach_to_the_wrong_ring_names_both_values(
    step_segment: Segment, ring: RingKind, epoch: int, message: str
) -> None:
    with pytest.raises(SegmentMismatchError, match=message):
        segment.attach(step_segment.name, ring, epoch)


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 20, 24, 40])
def test_a_damaged_header_is_refused(step_segment: Segment, offset: int) -> None:
    step_segment.map[offset] ^= 0xFF
    with pytest.raises(SegmentMismatchError, match="expected"):
        segment.attach(step_segment.name, RingKind.STEP, epoch=7)


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_truncated_segment_is_refused(step_segment: Segment, size: int) -> None:
    os.truncate(SHM / step_segment.name[1:], size)
    with pytest.raises(SegmentMismatchError, match=r"bytes|size"):
        segment.attach(step_segment.name, RingKind.STEP, epoch=7)


def test_a_ring_larger_than_shared_memory_is_a_start_up_error_naming_both_sizes() -> None:
    config = RingConfig(num_step_slots=2**31)
    header = segment.step_header(config, epoch=1)
    name = segment.new_base_name() + "-step"
    with pytest.raises(SharedMemoryFullError, match=rf"needs {header.segment_bytes} bytes .* has \d+ bytes"):
        segment.create(name, header)
    assert files_of(name) == []


def test_a_machine_without_shared_memory_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match=f"mount a tmpfs at {tmp_path}/shm"):
        segment.unlink_stale(tmp_path / "shm")


def test_the_default_rings_fit_the_shared_memory_of_a_container() -> None:
    assert RingConfig().total_bytes < 64 * 2**20


def test_sizes_that_hold_no_record_are_refused() -> None:
    with pytest.raises(RecordTooLargeError, match="max_rows is 0"):
        RingConfig(max_rows=0)
    with pytest.raises(RecordTooLargeError, match="request_slot_bytes is 100"):
        RingConfig(request_slot_bytes=100)


def test_the_next_start_removes_what_a_killed_server_left() -> None:
    code = """
import os, signal
from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
name = segment.new_base_name() + "-step"
segment.create(name, segment.step_header(RingConfig(num_step_slots=1), epoch=1))
print(name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    name = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    assert len(files_of(name)) == 3
    segment.unlink_stale()
    assert files_of(name) == []


def test_the_segments_of_a_living_process_are_not_stale(step_segment: Segment) -> None:
    segment.unlink_stale()
    assert len(files_of(step_segment.name)) == 3


def test_a_process_is_known_by_pid_and_start_time() -> None:
    started = process.start_time(os.getpid())
    assert started is not None
    assert process.is_alive(os.getpid(), started)
    assert not process.is_alive(os.getpid(), started + 1)
    assert process.start_time(2**22 + 1) is None
