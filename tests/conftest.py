"""Fixtures that several folders share."""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.segment import Segment

ROOT = Path(__file__).parents[1]
SMALL = RingConfig(
    num_step_slots=4, max_rows=8, max_tokens=16, max_logprob_entries=64, num_request_slots=4, request_slot_bytes=256
)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch in a worker, before it is imported: workers share the cores


@pytest.fixture(autouse=True, scope="session")
def _one_name_for_everything() -> Iterator[None]:
    """Hold, when all tests have run, that they have imported each file by one name, the installed one."""
    yield
    assert wrongly_named(sys.modules) == []


def wrongly_named(modules: Mapping[str, ModuleType]) -> list[str]:
    """Return modules of the product that are not named ringserve.*, or whose file is imported by another name too."""
    folders = [ROOT / top for top in ("server", "engine", "shm_transport")]
    files = {name: Path(getattr(module, "__file__", None) or "/").resolve() for name, module in modules.items()}
    ours = {name: file for name, file in files.items() if any(file.is_relative_to(folder) for folder in folders)}
    counts = Counter(ours.values())
    return [name for name, file in ours.items() if counts[file] > 1 or not name.startswith("ringserve.")]


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
