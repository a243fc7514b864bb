"""What is not the expected ring is refused by an error that says what was found and what was expected."""

import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import (
    RecordError,
    SegmentError,
    SegmentMismatchError,
    SegmentMissingError,
    SharedMemoryFullError,
)
from ringserve.shm_transport.layout import struct_of
from ringserve.shm_transport.records import LAYOUT_VERSION, MAGIC, SEGMENT_HEADER, RingKind
from ringserve.shm_transport.request_ring import Inbox
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step_ring import StepReader, StepRecord

SHM = Path("/dev/shm")
ROOT = Path(__file__).parents[2]
HEADER = struct_of(SEGMENT_HEADER)
EPOCH = 7
BOTH_VALUES = re.compile(r"is 0x[0-9a-f]+, expected 0x[0-9a-f]+|is \d+, expected one of \[1, 2\]|expected 1 or more of")
IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
CREATE = """
import os
from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import SegmentError
try:
    segment.create("/ringserve-x", segment.step_header(RingConfig(), epoch=1))
except SegmentError as error:
    print(type(error).__name__, error, os.listdir("/dev/shm"))
"""


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A path in /dev/shm for what is not a ring."""
    path = SHM / (segment.new_base_name()[1:] + "-foreign")
    yield path
    with contextlib.suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" * 10_000, "magic is 0x7878787878787878, expected 0x767273676e6972"),
        (b"not a ring", "has 10 bytes, a ring's header alone 4096"),
        (b"", "has 0 bytes, a ring's header alone 4096"),
    ],
)
def test_a_foreign_file_is_refused(foreign: Path, content: bytes, message: str) -> None:
    foreign.write_bytes(content)
    with pytest.raises(SegmentMismatchError, match=message):
        segment.attach(f"/{foreign.name}", RingKind.STEP, EPOCH)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/hostname")])
def test_what_is_not_a_plain_file_is_refused(foreign: Path, make: Callable[[Path], None]) -> None:
    make(foreign)
    with pytest.raises(SegmentError, match=foreign.name):
        segment.attach(f"/{foreign.name}", RingKind.STEP, EPOCH)


@pytest.mark.parametrize("name", ["", "/", "/a/b", "/" + 300 * "x"])
def test_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(SegmentError, match="segment"):
        segment.attach(name, RingKind.STEP, EPOCH)


@pytest.mark.parametrize("num_more_bytes", [1, 4096, 2**30])
def test_an_oversized_segment_is_refused(step_segment: Segment, num_more_bytes: int) -> None:
    size = step_segment.header.segment_bytes
    os.truncate(SHM / step_segment.name[1:], size + num_more_bytes)
    with pytest.raises(SegmentMismatchError, match=f"file size is {size + num_more_bytes:#x}, expected {size:#x}"):
        segment.attach(step_segment.name, RingKind.STEP, EPOCH)


@pytest.mark.parametrize("semaphore", ["filled", "free"])
def test_a_segment_with_a_missing_or_foreign_semaphore_is_refused(step_segment: Segment, semaphore: str) -> None:
    path = SHM / f"sem.{step_segment.name[1:]}-{semaphore}"
    path.unlink()
    with pytest.raises(SegmentMissingError, match="has lost its semaphores"):
        segment.attach(step_segment.name, RingKind.STEP, EPOCH)
    path.mkdir()
    with pytest.raises(SegmentError, match=f"cannot open the semaphores of the segment {step_segment.name}"):
        segment.attach(step_segment.name, RingKind.STEP, EPOCH)
    path.rmdir()


@pytest.fixture(scope="module")
def victim() -> Iterator[Segment]:
    """A ring whose header the tests overwrite."""
    config = RingConfig(num_step_slots=2, max_rows=8, max_tokens=16, max_logprob_entries=64)
    created = segment.create(segment.new_base_name() + "-step", segment.step_header(config, EPOCH))
    yield created
    created.unlink()


def attach_or_refuse(name: str, ring: RingKind) -> Segment | None:
    """Attach; None if that is refused by an error with both values in it. Anything else is a bug."""
    try:
        return segment.attach(name, ring, EPOCH)
    except SegmentMismatchError as error:
        message = str(error)
    assert BOTH_VALUES.search(message), message
    return None


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 64), st.binary(min_size=64, max_size=64), st.integers(0, 2**32 - 1))
def test_garbage_in_the_header_is_refused_or_does_not_matter(
    victim: Segment, kept: int, line: bytes, seed: int
) -> None:
    """Garbage from byte `kept` on: the earlier it begins, the earlier the check that must see it."""
    good = victim.header.pack()
    victim.map[:4096] = good[:kept] + line[kept:] + np.random.default_rng(seed).bytes(4096 - 64)
    attached = attach_or_refuse(victim.name, RingKind.STEP)
    if attached is not None:
        assert attached.header.pack()[:40] == good[:40]  # the limits that follow may be any that fit a slot
        StepReader(attached)
        attached.close()


geometries = st.tuples(
    st.sampled_from([0, 1, 1, 1, 2, 2, 3, 2**32 - 1]),  # ring
    st.integers(0, 4),  # num_slots
    st.integers(0, 64).map(lambda n: 64 * n) | st.integers(0, 4096),  # slot_bytes
    *(st.integers(0, 20) | st.sampled_from([0, 2**31, 2**32 - 1]) for _ in range(3)),  # rows, tokens, entries
)


@settings(deadline=None, max_examples=300)
@given(geometries, st.integers(0, 2**32 - 1))
def test_a_ring_of_any_geometry_is_refused_or_can_be_read(
    victim: Segment, geometry: tuple[int, ...], seed: int
) -> None:
    """The sizes agree with each other, so that it is for the later checks to see what cannot be."""
    ring, num_slots, slot_bytes, *limits = geometry
    size, rng = 4096 + num_slots * slot_bytes, np.random.default_rng(seed)
    os.truncate(SHM / victim.name[1:], size)
    fields = (MAGIC, LAYOUT_VERSION, ring, num_slots, slot_bytes, size, EPOCH, *limits, 0, 0, 0, 0, 0)
    (SHM / victim.name[1:]).write_bytes(HEADER.pack(*fields) + rng.bytes(size - 4096))
    expected = RingKind.REQUEST if ring == RingKind.REQUEST else RingKind.STEP
    attached = attach_or_refuse(victim.name, expected)
    if attached is None:
        return
    attached.slot(0)[:10] = bytes(8) + rng.choice([1, 2, 16, 17, 99]).astype("<u2").tobytes()  # sequence 0, some kind
    attached.filled.release()
    with contextlib.suppress(RecordError):
        if expected == RingKind.REQUEST:
            Inbox(attached).drain()
        else:
            reader = StepReader(attached)
            assert reader.consumer.try_wait()
            assert isinstance(reader.read(), StepRecord | None)
    assert attached.filled.value == 0
    attached.close()


def create_in(size: str) -> str:
    """Create the default step ring in a /dev/shm of that size, in a namespace of its own; return what came of it."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 77; exec "$0" -c "$1"'
    command = [*IN_NAMESPACE, script, sys.executable, CREATE]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if ended.returncode == 77 or ended.stderr.startswith("unshare"):
        pytest.skip(f"no tmpfs may be mounted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_too_small_shared_memory_is_an_error_naming_both_sizes() -> None:
    needed = segment.step_header(RingConfig(), epoch=1).segment_bytes
    message = f"the ring needs {needed} bytes of shared memory and 3 files, /dev/shm has {4 * 2**20} bytes"
    result = create_in("4m")
    assert result.startswith(f"SharedMemoryFullError {message}")
    assert result.endswith(" []")  # nothing is left in it


@pytest.mark.parametrize("num_files", [0, 1, 2])
def test_a_shared_memory_without_room_for_every_name_is_an_error_that_says_so(num_files: int) -> None:
    result = create_in(f"64m,nr_inodes={num_files + 1}")  # one is the directory's
    assert result.startswith("SharedMemoryFullError the ring needs ")
    assert re.search(r"and 3 files, /dev/shm has \d+ bytes and [01] files free: enlarge it", result)
    assert result.endswith(" []")


def test_a_shared_memory_without_room_for_the_semaphores_is_an_error() -> None:
    result = create_in(str(segment.step_header(RingConfig(), epoch=1).segment_bytes))
    assert result.startswith("SharedMemoryFullError the ring needs ")
    assert result.endswith(" []")


def test_the_kernels_refusal_to_reserve_is_an_error_naming_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no tmpfs may be mounted: the same, with the call faked."""
    header, name = segment.step_header(RingConfig(), epoch=1), segment.new_base_name() + "-step"
    for number, error in ((errno.ENOSPC, SharedMemoryFullError), (errno.EINTR, SegmentError)):

        def refuse(*_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(error, match=f"{header.segment_bytes} bytes"):
            segment.create(name, header)
        assert not list(SHM.glob(f"*{name[1:]}*"))
