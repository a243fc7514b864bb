"""Rings for the tests of this folder."""

from collections.abc import Callable, Iterator

import pytest

from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.segment import Segment


@pytest.fixture
def make_rings() -> Iterator[Callable[[RingConfig, int], tuple[Segment, Segment]]]:
    """Create a step ring and a request ring of one name; their names are unlinked at the test's end."""
    made: list[Segment] = []

    def make(config: RingConfig, epoch: int) -> tuple[Segment, Segment]:
        name = segment.new_base_name()
        steps = segment.create(name + "-step", segment.step_header(config, epoch))
        requests = segment.create(name + "-request", segment.request_header(config, epoch))
        made.extend((steps, requests))
        return steps, requests

    yield make
    for created in made:
        created.unlink()
