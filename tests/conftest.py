"""Fixtures that several folders share."""

import os
from collections.abc import Iterator

import pytest

from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.segment import Segment

SMALL = RingConfig(
    num_step_slots=4, max_rows=8, max_tokens=16, max_logprob_entries=64, num_request_slots=4, request_slot_bytes=256
)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch in a worker, before it is imported: workers share the cores


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
