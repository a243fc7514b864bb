"""The step ring, both ends: engine steps and byte messages in, Python lists out.

The numpy views of a slot's columns are made once, at attach.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ringserve.shm_transport.errors import RecordError, RecordTooLargeError
from ringserve.shm_transport.layout import column_views, step_columns
from ringserve.shm_transport.records import RecordFlag, RecordKind, RingKind
from ringserve.shm_transport.ring import HEADER, HEADER_BYTES, Consumer, Producer, RecordHeader
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step import FirstRowColumns, LogprobColumns, Step

_MORE = int(RecordFlag.MORE)
_ANY_FINISHED = int(RecordFlag.ANY_FINISHED)
_ANY_MULTI_TOKEN = int(RecordFlag.ANY_MULTI_TOKEN)
_ANY_FIRST = int(RecordFlag.ANY_FIRST)
_ANY_LOGPROBS = int(RecordFlag.ANY_LOGPROBS)
_ANY_OPTIONAL = _ANY_FINISHED | _ANY_MULTI_TOKEN | _ANY_FIRST | _ANY_LOGPROBS
_STEP = int(RecordKind.STEP)
_BYTE_KINDS = frozenset(RecordKind) - {RecordKind.STEP, RecordKind.ADD, RecordKind.ABORT, RecordKind.CALL}
_STALL_SLICE_S = 0.05  # how often a waiting producer looks whether the consumer still lives

Views = dict[str, NDArray[np.generic]]


class StepSlot:
    """One slot of a step ring: its bytes, and the views of its columns; the two that every step has by name."""

    __slots__ = ("columns", "handle", "memory", "token_id")

    def __init__(self, memory: memoryview, columns: Views) -> None:
        self.memory = memory
        self.columns = columns
        self.handle = columns["handle"]
        self.token_id = columns["token_id"]


def _step_slots(segment: Segment) -> list[StepSlot]:
    header = segment.header
    columns, _ = step_columns(header.max_rows, header.max_tokens, header.max_logprob_entries)
    memories = [segment.slot(i) for i in range(header.num_slots)]
    return [StepSlot(memory, column_views(memory, columns)) for memory in memories]


@dataclass(slots=True, kw_only=True)
class FirstRows:
    """FirstRowColumns as lists."""

    num_cached_tokens: list[int]
    queued_ns: list[int]
    first_scheduled_ns: list[int]
    num_preemptions: list[int]


@dataclass(slots=True, kw_only=True)
class Logprobs:
    """LogprobColumns as lists."""

    num_entries: list[int]
    starts: list[int]  # each row's first entry
    token_ids: list[int]
    logprobs: list[float]
    sampled_ranks: list[int]


@dataclass(slots=True)
class StepRecord:
    """One STEP record, copied out of its slot. Columns are None where the flags say that they do not matter."""

    header: RecordHeader
    handles: list[int]  # the same list as in the record before, if the rows are the same: not to be changed
    token_ids: list[int]
    token_offsets: list[int] | None = None
    num_tokens: list[int] | None = None  # None: one token in each row
    finish_reasons: list[int] | None = None
    stop_token_ids: list[int] | None = None
    first: FirstRows | None = None
    logprobs: Logprobs | None = None

    @property
    def is_last(self) -> bool:
        """Whether this is the last record of its step."""
        return not self.header.flags & _MORE


@dataclass(slots=True, frozen=True)
class Message:
    """A whole byte message of a kind other than STEP."""

    kind: RecordKind
    body: bytes


class StepWriter:
    """The engine's end. `publish` and `publish_message` are called by the engine loop's thread alone.

    Args:
        segment: A step ring.
        on_full: Called every 50 ms while the ring is full: keep the request ring drained, raise if the server died.
    """

    def __init__(self, segment: Segment, on_full: Callable[[], None]) -> None:
        assert segment.header.ring == RingKind.STEP
        header = segment.header
        self._producer = Producer(segment)
        self._slots = _step_slots(segment)
        self._limits = (header.max_rows, header.max_tokens, header.max_logprob_entries)
        self._max_body = header.slot_bytes - HEADER_BYTES
        self._on_full = on_full
        self._step = 0
        self.num_stalls = 0
        self.stall_ns = 0
        self.num_aborted = 0  # by the owner: handles that the server had it drop, known or not, and the last time
        self.aborted_ns = 0

    def publish(self, step: Step) -> int:
        """Write one step, as one record if it fits, and signal it. Waits while the ring is full; drops nothing.

        Returns:
            The last record's `published_ns`.
        """
        if self._fits(step):
            published_ns = self._publish_part(step, 0)
        else:
            parts = list(self._split(step))
            for part in parts[:-1]:
                self._publish_part(part, _MORE)
            published_ns = self._publish_part(parts[-1], 0)
        self._step += 1
        return published_ns

    def publish_message(self, kind: RecordKind, body: bytes = b"") -> None:
        """Write one byte message of any size, in as many records as it needs."""
        assert kind in _BYTE_KINDS
        for start in range(0, max(len(body), 1), self._max_body):
            chunk = body[start : start + self._max_body]
            flags = _MORE if start + len(chunk) < len(body) else 0
            if not self._producer.try_claim():
                self._wait_for_slot()
            slot = self._slots[self._producer.slot].memory
            slot[HEADER_BYTES : HEADER_BYTES + len(chunk)] = chunk
            HEADER.pack_into(
                slot, 0, self._producer.sequence, kind, flags, len(chunk), len(body),
                0, 0, 0, 0, 0, 0, 0, time.monotonic_ns(), 0, 0, 0, 0, 0, 0, 0,
            )  # fmt: skip
            self._producer.publish()

    def _wait_for_slot(self) -> None:
        started, before_ns, is_claimed = time.monotonic_ns(), self.stall_ns, False
        self.num_stalls += 1
        while not is_claimed:
            is_claimed = self._producer.wait_claim(_STALL_SLICE_S)
            self.stall_ns = before_ns + time.monotonic_ns() - started
            if not is_claimed:
                self._on_full()

    def _publish_part(self, step: Step, flags: int) -> int:
        producer = self._producer
        if not producer.try_claim():
            self._wait_for_slot()
        slot = self._slots[producer.slot]
        num_rows, num_tokens, num_entries = len(step.handles), len(step.token_ids), 0
        slot.handle[:num_rows] = step.handles
        slot.token_id[:num_tokens] = step.token_ids
        if not step.is_plain:
            flags |= _fill_optional(slot.columns, step)
            num_entries = 0 if step.logprobs is None else len(step.logprobs.token_ids)
        published_ns = time.monotonic_ns()
        HEADER.pack_into(
            slot.memory, 0, producer.sequence, _STEP, flags, 0, 0,
            num_rows, num_tokens, num_entries, step.num_prefill_tokens,
            self._step, step.scheduled_ns, step.forward_done_ns, published_ns,
            step.num_running, step.num_waiting, step.num_blocks_used, step.num_blocks, step.num_preemptions,
            self.num_aborted, self.aborted_ns,
        )  # fmt: skip
        producer.publish()
        return published_ns

    def _fits(self, step: Step) -> bool:
        max_rows, max_tokens, max_entries = self._limits
        num_entries = 0 if step.logprobs is None else len(step.logprobs.token_ids)
        return len(step.handles) <= max_rows and len(step.token_ids) <= max_tokens and num_entries <= max_entries

    def _split(self, step: Step) -> Iterator[Step]:
        """Halve a step until each part fits: between rows, or, if there is only one, between its tokens."""
        if self._fits(step):
            yield step
            return
        num_rows = len(step.handles)
        if num_rows > 1:
            halves = _halve_rows(step, num_rows // 2)
        elif len(step.token_ids) > 1:
            halves = _halve_tokens(step, len(step.token_ids) // 2)
        else:
            raise RecordTooLargeError(f"one token with its logprobs exceeds {self._limits[2]} max_logprob_entries")
        for half in halves:
            yield from self._split(half)


def _fill_optional(views: Views, step: Step) -> int:
    """Copy the columns that not every step has into a slot; return the flags that name them."""
    num_rows, num_tokens, flags = len(step.handles), len(step.token_ids), 0
    if step.num_tokens is not None:
        views["num_tokens"][:num_rows] = step.num_tokens
        views["token_offset"][:num_rows] = np.cumsum(step.num_tokens) - step.num_tokens
        flags |= _ANY_MULTI_TOKEN
    if step.finish_reasons is not None:
        views["finish_reason"][:num_rows] = step.finish_reasons
        views["stop_token_id"][:num_rows] = -1 if step.stop_token_ids is None else step.stop_token_ids
        flags |= _ANY_FINISHED
    if step.first is not None:
        views["num_cached_tokens"][:num_rows] = step.first.num_cached_tokens
        views["queued_ns"][:num_rows] = step.first.queued_ns
        views["first_scheduled_ns"][:num_rows] = step.first.first_scheduled_ns
        views["num_preemptions"][:num_rows] = step.first.num_preemptions
        flags |= _ANY_FIRST
    if step.logprobs is not None:
        num_entries = len(step.logprobs.token_ids)
        views["num_logprobs"][:num_rows] = step.logprobs.num_entries
        views["sampled_rank"][:num_tokens] = step.logprobs.sampled_ranks
        views["logprob_token_id"][:num_entries] = step.logprobs.token_ids
        views["logprob"][:num_entries] = step.logprobs.logprobs
        flags |= _ANY_LOGPROBS
    return flags


def _tokens_in_rows(step: Step) -> NDArray[np.uint32]:
    return np.ones(len(step.handles), np.uint32) if step.num_tokens is None else step.num_tokens


def _halve_rows(step: Step, row: int) -> tuple[Step, Step]:
    counts = _tokens_in_rows(step)
    token = int(counts[:row].sum())
    entry = 0 if step.logprobs is None else int((counts * step.logprobs.num_entries)[:row].sum())
    rows, tokens, entries = (
        (slice(row), slice(row, None)),
        (slice(token), slice(token, None)),
        (slice(entry), slice(entry, None)),
    )
    first, second = (_take(step, r, t, e) for r, t, e in zip(rows, tokens, entries, strict=True))
    return first, second


def _halve_tokens(step: Step, token: int) -> tuple[Step, Step]:
    """Split a one-row step; the finish belongs to the last part, the first-row columns to the first."""
    entry = 0 if step.logprobs is None else token * int(step.logprobs.num_entries[0])
    first = _take(step, slice(None), slice(token), slice(entry))
    second = _take(step, slice(None), slice(token, None), slice(entry, None))
    counts = [np.array([len(part.token_ids)], np.uint32) for part in (first, second)]
    return (
        replace(first, num_tokens=counts[0], finish_reasons=None, stop_token_ids=None),
        replace(second, num_tokens=counts[1], first=None),
    )


def _take(step: Step, rows: slice, tokens: slice, entries: slice) -> Step:
    first, logprobs = step.first, step.logprobs
    return replace(
        step,
        handles=step.handles[rows],
        token_ids=step.token_ids[tokens],
        num_tokens=None if step.num_tokens is None else step.num_tokens[rows],
        finish_reasons=None if step.finish_reasons is None else step.finish_reasons[rows],
        stop_token_ids=None if step.stop_token_ids is None else step.stop_token_ids[rows],
        first=None if first is None else FirstRowColumns(
            num_cached_tokens=first.num_cached_tokens[rows], queued_ns=first.queued_ns[rows],
            first_scheduled_ns=first.first_scheduled_ns[rows], num_preemptions=first.num_preemptions[rows],
        ),
        logprobs=None if logprobs is None else LogprobColumns(
            num_entries=logprobs.num_entries[rows], token_ids=logprobs.token_ids[entries],
            logprobs=logprobs.logprobs[entries], sampled_ranks=logprobs.sampled_ranks[tokens],
        ),
    )  # fmt: skip


class StepReader:
    """The server's end. Who calls `read` holds a `filled` token (Consumer.try_wait, or the loop's BlockWaiter)."""

    def __init__(self, segment: Segment) -> None:
        assert segment.header.ring == RingKind.STEP
        header = segment.header
        self.consumer = Consumer(segment)
        self._slots = _step_slots(segment)
        self._max_rows, self._max_tokens = header.max_rows, header.max_tokens
        self._max_logprob_entries = header.max_logprob_entries
        self._max_body = header.slot_bytes - HEADER_BYTES
        self._partial: list[bytes] = []
        self._packed_handles = b""
        self._handles: list[int] = []  # what they unpack to
        self.num_records = 0  # STEP records read, and the tokens in them
        self.num_tokens = 0

    def read(self) -> StepRecord | Message | None:
        """Copy the next record out of its slot and give the slot back.

        Returns:
            A StepRecord; a Message once its last record is there; None for the earlier records of a long message.

        Raises:
            SequenceError: If the record is not the next one.
            RecordError: If its kind or counts cannot be.
        """
        consumer = self.consumer
        slot = self._slots[consumer.slot]
        try:
            header = RecordHeader._make(HEADER.unpack_from(slot.memory))
            consumer.check(header.sequence)
            return self._read_step(slot, header) if header.kind == _STEP else self._read_message(slot.memory, header)
        finally:
            consumer.release()

    def _read_step(self, slot: StepSlot, header: RecordHeader) -> StepRecord:
        num_rows, num_tokens, num_entries = header.num_rows, header.num_tokens, header.num_logprob_entries
        if num_rows > self._max_rows or num_tokens > self._max_tokens or num_entries > self._max_logprob_entries:
            raise RecordError(
                f"a STEP record claims {num_rows} rows, {num_tokens} tokens and {num_entries} logprobs, "
                f"a slot holds {self._max_rows}, {self._max_tokens} and {self._max_logprob_entries}"
            )
        # Most steps have the rows of the step before: comparing 256 handles takes a tenth of making them Python ints.
        packed = slot.handle[:num_rows].tobytes()
        if packed != self._packed_handles:
            self._packed_handles, self._handles = packed, slot.handle[:num_rows].tolist()
        record = StepRecord(header, self._handles, slot.token_id[:num_tokens].tolist())
        if header.flags & _ANY_OPTIONAL:
            self._read_optional(slot.columns, record)
        if num_rows != num_tokens and record.num_tokens is None:
            raise RecordError(f"a STEP record has {num_rows} rows of one token, and {num_tokens} tokens")
        self.num_records += 1
        self.num_tokens += num_tokens
        return record

    def _read_optional(self, views: Views, record: StepRecord) -> None:
        """Copy out the columns that the flags name."""
        flags, n = record.header.flags, record.header.num_rows
        if flags & _ANY_MULTI_TOKEN:
            offsets, counts = views["token_offset"][:n].tolist(), views["num_tokens"][:n].tolist()
            if any(offset + count > record.header.num_tokens for offset, count in zip(offsets, counts, strict=True)):
                raise RecordError(f"a row of a STEP record points beyond its {record.header.num_tokens} tokens")
            record.token_offsets, record.num_tokens = offsets, counts
        if flags & _ANY_FINISHED:
            record.finish_reasons = views["finish_reason"][:n].tolist()
            record.stop_token_ids = views["stop_token_id"][:n].tolist()
        if flags & _ANY_FIRST:
            record.first = _first_rows(views, n)
        if flags & _ANY_LOGPROBS:
            record.logprobs = _logprobs(views, record.header, record.num_tokens)

    def _read_message(self, slot: memoryview, header: RecordHeader) -> Message | None:
        kind, body_bytes, message_bytes = header.kind, header.body_bytes, header.message_bytes
        if kind not in _BYTE_KINDS:
            raise RecordError(f"a record of kind {kind} has no business in the step ring")
        if body_bytes > self._max_body:
            raise RecordError(f"a record claims a body of {body_bytes} bytes, a slot holds {self._max_body}")
        self._partial.append(bytes(slot[HEADER_BYTES : HEADER_BYTES + body_bytes]))
        if header.flags & _MORE:
            return None
        body, self._partial = b"".join(self._partial), []
        if len(body) != message_bytes:
            raise RecordError(f"a message of {message_bytes} bytes arrived with {len(body)}")
        return Message(RecordKind(kind), body)


def _first_rows(views: Views, num_rows: int) -> FirstRows:
    return FirstRows(
        num_cached_tokens=views["num_cached_tokens"][:num_rows].tolist(),
        queued_ns=views["queued_ns"][:num_rows].tolist(),
        first_scheduled_ns=views["first_scheduled_ns"][:num_rows].tolist(),
        num_preemptions=views["num_preemptions"][:num_rows].tolist(),
    )


def _logprobs(views: Views, header: RecordHeader, counts: list[int] | None) -> Logprobs:
    num_entries = header.num_logprob_entries
    entries: list[int] = views["num_logprobs"][: header.num_rows].tolist()
    sizes = entries if counts is None else [e * c for e, c in zip(entries, counts, strict=True)]
    *starts, needed = accumulate(sizes, initial=0)
    if needed != num_entries:
        raise RecordError(f"the rows of a STEP record need {needed} logprob entries, it has {num_entries}")
    return Logprobs(
        num_entries=entries,
        starts=starts,
        token_ids=views["logprob_token_id"][:num_entries].tolist(),
        logprobs=views["logprob"][:num_entries].tolist(),
        sampled_ranks=views["sampled_rank"][: header.num_tokens].tolist(),
    )
