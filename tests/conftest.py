"""Fixtures that several folders share, and the turns of tests that need the machine for themselves."""

import contextlib
import fcntl
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.segment import Segment

SMALL = RingConfig(
    num_step_slots=4, max_rows=8, max_tokens=16, max_logprob_entries=64, num_request_slots=4, request_slot_bytes=256
)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch in a worker, before it is imported: workers share the cores

# Files that are there anyway, locked by the workers of a run.
ROOM = Path(__file__)
DOOR = Path(__file__).parent


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test that is marked `alone` while the other workers are between two tests; their idle servers stay."""
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with contextlib.ExitStack() as stay:
        with _locked(DOOR, fcntl.LOCK_EX):  # who waits for the room keeps the others out, so that it does empty
            stay.enter_context(_locked(ROOM, kind))
        return (yield)


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


@pytest.fixture
def step_segment() -> Iterator[Segment]:
    """A step ring with small slots, so that tests reach its limits."""
    yield from _segment("-step", segment.step_header(SMALL, epoch=7))


@pytest.fixture
def request_segment() -> Iterator[Segment]:
    """A request ring with small slots."""
    yield from _segment("-request", segment.request_header(SMALL, epoch=7))


def _segment(suffix: str, header: segment.SegmentHeader) -> Iterator[Segment]:
    created = segment.create(segment.new_base_name() + suffix, header)
    yield created
    created.unlink()
