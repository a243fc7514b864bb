"""A C program that knows only the byte map speaks to both rings."""

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.messages import AddRequest
from ringserve.shm_transport.records import FinishReason, RecordKind
from ringserve.shm_transport.request_ring import Outbox
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step_ring import Message, StepReader, StepRecord

SOURCE = Path(__file__).with_name("producer.c")
CONFIG = RingConfig(num_step_slots=2, max_rows=5, max_tokens=9, num_request_slots=2)  # columns that end inside a line
EPOCH = segment.new_epoch()
HANDLE = 2**40 + 7
PROMPT = np.array([11, 22, 33, 2**31 - 1], np.int32)


@pytest.fixture(scope="module")
def producer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    program = tmp_path_factory.mktemp("c") / "producer"
    flags = ["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", "-O2", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(program), "-lrt"], check=True, timeout=60)
    return program


@pytest.fixture
def rings(make_rings) -> tuple[Segment, Segment]:
    return make_rings(CONFIG, EPOCH)


def run_to_end(producer: Path, rings: tuple[Segment, Segment], epoch: int = EPOCH) -> subprocess.CompletedProcess[str]:
    command = [str(producer), rings[0].name, rings[1].name, str(epoch)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=30, check=False)


def read_one(reader: StepReader) -> StepRecord | Message | None:
    assert reader.consumer.try_wait(), "nothing was posted"
    return reader.read()


def test_a_c_program_publishes_a_step_and_reads_a_request(producer: Path, rings: tuple[Segment, Segment]) -> None:
    steps, requests = rings
    outbox, reader, before_ns = Outbox(requests), StepReader(steps), time.monotonic_ns()
    outbox.add(AddRequest(handle=HANDLE, prompt_token_ids=PROMPT, max_tokens=8, stop_token_ids=(5,)))
    outbox.flush()
    ended = run_to_end(producer, rings)
    assert (ended.returncode, ended.stderr) == (0, "")

    assert read_one(reader) == Message(RecordKind.ATTACHED, b"")
    record = read_one(reader)
    assert isinstance(record, StepRecord)
    assert record.handles == [HANDLE, HANDLE + 1, HANDLE + 2]
    assert record.token_ids == [len(PROMPT), 11, 2**31 - 1]
    assert record.finish_reasons == [FinishReason.NONE, FinishReason.NONE, FinishReason.STOP]
    assert record.stop_token_ids == [-1, -1, 2**31 - 1]
    assert (record.is_last, record.header.step) == (True, 0)
    assert (record.num_tokens, record.first, record.logprobs) == (None, None, None)
    assert before_ns <= record.header.published_ns <= time.monotonic_ns()
    assert (reader.consumer.num_pending, steps.free.value) == (0, CONFIG.num_step_slots)
    assert (requests.filled.value, requests.free.value) == (0, CONFIG.num_request_slots)


def test_a_c_program_refuses_a_ring_of_another_epoch(producer: Path, rings: tuple[Segment, Segment]) -> None:
    ended = run_to_end(producer, rings, epoch=99)
    assert ended.returncode == 1
    assert ended.stderr == f"epoch is {EPOCH:#x}, expected 0x63\n"


@pytest.mark.parametrize(("offset", "field"), [(0, "magic"), (8, "version"), (12, "ring"), (24, "file size")])
def test_a_c_program_refuses_a_damaged_header(
    producer: Path, rings: tuple[Segment, Segment], offset: int, field: str
) -> None:
    rings[1].map[offset] ^= 0xFF
    ended = run_to_end(producer, rings)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{field} is 0x")
    assert ", expected 0x" in ended.stderr


def test_a_c_program_names_a_ring_that_is_not_there(producer: Path, rings: tuple[Segment, Segment]) -> None:
    rings[1].unlink()
    ended = run_to_end(producer, rings)
    assert (ended.returncode, ended.stderr) == (1, f"no ring named {rings[1].name}\n")


def test_the_program_is_short() -> None:
    assert len(SOURCE.read_text().splitlines()) < 100
