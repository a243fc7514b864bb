import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import RecordError, SequenceError
from ringserve.shm_transport.records import FinishReason, RecordKind
from ringserve.shm_transport.ring import HEADER
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step import FirstRowColumns, LogprobColumns, Step
from ringserve.shm_transport.step_ring import Message, StepReader, StepRecord, StepWriter


class RingFullError(Exception):
    """Raised in place of waiting for ever."""


def never_full() -> None:
    raise RingFullError


def rows_of(record: StepRecord) -> list[tuple[int, list[int]]]:
    counts = record.num_tokens or [1] * len(record.handles)
    offsets = record.token_offsets or range(len(record.handles))
    return [
        (handle, record.token_ids[offset : offset + count])
        for handle, offset, count in zip(record.handles, offsets, counts, strict=True)
    ]


def one_token_step(num_rows: int) -> Step:
    return Step(handles=np.arange(num_rows, dtype=np.uint64), token_ids=np.arange(100, 100 + num_rows, dtype=np.int32))


def read_all(reader: StepReader) -> list[StepRecord | Message]:
    records = []
    while reader.consumer.try_wait():
        record = reader.read()
        if record is not None:
            records.append(record)
    return records


def test_a_step_of_one_token_rows_arrives_as_lists(step_segment: Segment) -> None:
    writer, reader = StepWriter(step_segment, never_full), StepReader(step_segment)
    writer.publish(replace(one_token_step(3), num_running=3, num_waiting=1, scheduled_ns=11, forward_done_ns=22))
    (record,) = read_all(reader)
    assert isinstance(record, StepRecord)
    assert rows_of(record) == [(0, [100]), (1, [101]), (2, [102])]
    assert record.finish_reasons is None
    assert record.num_tokens is None
    assert record.header[10:12] + record.header[13:15] == (11, 22, 3, 1)
    assert record.header.published_ns > 0


def test_a_full_ring_makes_the_producer_wait_and_keeps_what_it_holds(step_segment: Segment) -> None:
    writer, reader = StepWriter(step_segment, never_full), StepReader(step_segment)
    for n in range(step_segment.header.num_slots):
        writer.publish(one_token_step(n))
    with pytest.raises(RingFullError):
        writer.publish(one_token_step(7))
    assert writer.num_stalls == 1
    assert writer.stall_ns >= 40_000_000
    assert [len(record.handles) for record in read_all(reader)] == [0, 1, 2, 3]
    writer.publish(one_token_step(7))
    assert [len(record.handles) for record in read_all(reader)] == [7]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    num_rows = draw(st.integers(0, 40))
    counts = np.array(draw(st.lists(st.integers(0, 60), min_size=num_rows, max_size=num_rows)), np.uint32)
    num_tokens = int(counts.sum())
    entries = np.array(draw(st.lists(st.integers(0, 21), min_size=num_rows, max_size=num_rows)), np.uint8)
    num_entries = int((entries * counts).sum())
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    column = FirstRowColumns(
        num_cached_tokens=np.arange(num_rows, dtype=np.uint32),
        queued_ns=np.arange(num_rows, dtype=np.uint64) + 1,
        first_scheduled_ns=np.arange(num_rows, dtype=np.uint64) + 2,
        num_preemptions=np.arange(num_rows, dtype=np.uint32) + 3,
    )
    logprobs = LogprobColumns(
        num_entries=entries,
        token_ids=rng.integers(0, 1000, num_entries).astype(np.int32),
        logprobs=-rng.random(num_entries).astype(np.float32),
        sampled_ranks=rng.integers(1, 9, num_tokens).astype(np.int32),
    )
    return Step(
        handles=np.arange(num_rows, dtype=np.uint64) + 2**40,
        token_ids=rng.integers(0, 50000, num_tokens).astype(np.int32),
        num_tokens=counts,
        finish_reasons=rng.integers(0, 5, num_rows).astype(np.uint8),
        stop_token_ids=rng.integers(-1, 9, num_rows).astype(np.int32),
        first=column if draw(st.booleans()) else None,
        logprobs=logprobs if draw(st.booleans()) else None,
    )


@settings(deadline=None, max_examples=30)
@given(steps())
def test_a_step_of_any_size_arrives_whole_in_several_records(step: Step) -> None:
    config = RingConfig(num_step_slots=512, max_rows=8, max_tokens=16, max_logprob_entries=64)
    created = segment.create(segment.new_base_name() + "-step", segment.step_header(config, epoch=1))
    created.unlink()
    writer, reader = StepWriter(created, never_full), StepReader(created)
    writer.publish(step)
    records = read_all(reader)
    assert [record.is_last for record in records] == [False] * (len(records) - 1) + [True]

    rows = [row for record in records for row in rows_of(record)]
    tokens: dict[int, list[int]] = {}
    for handle, ids in rows:
        tokens.setdefault(handle, []).extend(ids)
    ends = np.cumsum(step.num_tokens)
    assert tokens == {
        int(h): step.token_ids[end - count : end].tolist()
        for h, count, end in zip(step.handles, step.num_tokens, ends, strict=True)
    }
    finishes = {
        h: reason
        for r in records
        for h, reason in zip(r.handles, r.finish_reasons or [0] * len(r.handles), strict=True)
    }
    assert finishes == dict(zip(step.handles.tolist(), step.finish_reasons.tolist(), strict=True))
    if step.first is not None:
        queued = [q for r in records for q in (r.first.queued_ns if r.first else [])]
        assert queued == step.first.queued_ns.tolist()
    if step.logprobs is not None:
        assert [i for r in records for i in r.logprobs.token_ids] == step.logprobs.token_ids.tolist()
        assert [i for r in records for i in r.logprobs.logprobs] == step.logprobs.logprobs.tolist()
        assert [i for r in records for i in r.logprobs.sampled_ranks] == step.logprobs.sampled_ranks.tolist()


def test_a_message_longer_than_a_slot_arrives_once_whole(step_segment: Segment) -> None:
    writer, reader = StepWriter(step_segment, never_full), StepReader(step_segment)
    body = json.dumps(list(range(450))).encode()
    assert len(body) > step_segment.header.slot_bytes
    writer.publish_message(RecordKind.ATTACHED)
    writer.publish_message(RecordKind.READY, body)
    assert read_all(reader) == [Message(RecordKind.ATTACHED, b""), Message(RecordKind.READY, body)]


def test_an_over_posted_semaphore_is_an_error_naming_both_numbers(step_segment: Segment) -> None:
    writer, reader = StepWriter(step_segment, never_full), StepReader(step_segment)
    for _ in range(5):
        writer.publish(one_token_step(1))
        assert reader.consumer.try_wait()
        reader.read()
    step_segment.filled.release()
    assert reader.consumer.try_wait()
    with pytest.raises(SequenceError, match="record 1 where record 5"):
        reader.read()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (1, 99, "kind 99"),
        (5, 9, "claims 9 rows, 3 tokens and 0 logprobs, a slot holds 8, 16 and 64"),
        (6, 17, "claims 3 rows, 17 tokens"),
        (7, 65, "3 tokens and 65 logprobs"),
        (6, 5, "3 rows of one token, and 5 tokens"),
    ],
)
def test_a_damaged_header_is_an_error_and_the_slot_is_given_back(
    step_segment: Segment, field: int, value: int, message: str
) -> None:
    writer, reader = StepWriter(step_segment, never_full), StepReader(step_segment)
    writer.publish(one_token_step(3))
    fields = list(HEADER.unpack_from(step_segment.slot(0)))
    fields[field] = value
    HEADER.pack_into(step_segment.slot(0), 0, *fields)
    assert reader.consumer.try_wait()
    with pytest.raises(RecordError, match=message):
        reader.read()
    assert step_segment.free.value == step_segment.header.num_slots


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=128, max_size=600))
def test_random_bytes_in_a_slot_are_an_error_or_a_record_never_a_crash(garbage: bytes) -> None:
    config = RingConfig(num_step_slots=1, max_rows=8, max_tokens=16, max_logprob_entries=64)
    created = segment.create(segment.new_base_name() + "-step", segment.step_header(config, epoch=1))
    created.unlink()
    reader = StepReader(created)
    slot = created.slot(0)
    slot[: len(garbage)] = garbage[: len(slot)]
    slot[:8] = bytes(8)  # the right sequence number, so that the rest is looked at
    slot[8:10] = bytes((garbage[8] % 8, 0))
    created.filled.release()
    assert reader.consumer.try_wait()
    with contextlib.suppress(RecordError):
        reader.read()
    assert created.free.value == 2


def test_finish_columns_are_read_only_when_some_row_finished(step_segment: Segment) -> None:
    writer, reader = StepWriter(step_segment, never_full), StepReader(step_segment)
    writer.publish(replace(one_token_step(2), finish_reasons=np.array([0, FinishReason.LENGTH], np.uint8)))
    (record,) = read_all(reader)
    assert record.finish_reasons == [FinishReason.NONE, FinishReason.LENGTH]
    assert record.stop_token_ids == [-1, -1]
