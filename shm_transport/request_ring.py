"""The request ring, both ends: the server's outbox, which never waits, and the engine's inbox."""

import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ringserve.shm_transport.errors import RecordError
from ringserve.shm_transport.messages import AddRequest
from ringserve.shm_transport.records import RecordFlag, RecordKind, RingKind
from ringserve.shm_transport.ring import HEADER, HEADER_BYTES, Consumer, Producer
from ringserve.shm_transport.segment import Segment

_MORE = int(RecordFlag.MORE)
_CALL_ID = struct.Struct("<Q")
_KINDS = frozenset((RecordKind.ADD, RecordKind.ABORT, RecordKind.CALL))


@dataclass(slots=True, frozen=True)
class Abort:
    """The engine drops these requests."""

    handles: list[int]


@dataclass(slots=True, frozen=True)
class Call:
    """A rare control message; the engine answers with a REPLY of the same id."""

    call_id: int
    body: bytes  # JSON


InMessage = AddRequest | Abort | Call


@dataclass(slots=True)
class _Outgoing:
    kind: RecordKind
    body: bytearray | bytes
    sent: int = 0
    is_started: bool = False
    handles: set[int] = field(default_factory=set)  # of an ADD: those that are not aborted yet


class Outbox:
    """The server's end. Appending never waits and never fails for a full ring; `flush` writes what there is room for.

    Called by the event loop's thread alone. The owner calls `flush` again (each reader wake, each millisecond) for as
    long as `is_empty` is False, so that the two rings can never wait for each other in a circle.
    """

    def __init__(self, segment: Segment) -> None:
        assert segment.header.ring == RingKind.REQUEST
        self._producer = Producer(segment)
        self._slots = [segment.slot(i) for i in range(segment.header.num_slots)]
        self._max_body = segment.header.slot_bytes - HEADER_BYTES
        self._queue: deque[_Outgoing] = deque()
        self._unsent_adds: dict[int, _Outgoing] = {}
        self.num_aborted = 0  # handles in ABORT records, those that have not left yet included

    @property
    def is_empty(self) -> bool:
        """Whether everything is on the ring."""
        return not self._queue

    def add(self, request: AddRequest) -> None:
        """Queue a request, with its forks, for the engine."""
        handles = {request.handle, *(fork.handle for fork in request.forks)}
        outgoing = _Outgoing(RecordKind.ADD, request.encode(), handles=handles)
        self._unsent_adds |= dict.fromkeys(handles, outgoing)
        self._queue.append(outgoing)

    def abort(self, handles: Iterable[int]) -> None:
        """Queue an abort; those that wait coalesce into one record.

        An ADD that has not left yet is dropped once all its handles are aborted; until then their abort follows it.
        """
        sent = []
        for handle in handles:
            add = self._unsent_adds.pop(handle, None)
            if add is None:
                sent.append(handle)
                continue
            add.handles.remove(handle)
            if add.handles:
                sent.append(handle)
            else:
                self._queue.remove(add)
        if not sent:
            return
        self.num_aborted += len(sent)
        body = np.array(sent, "<u8").tobytes()
        last = self._queue[-1] if self._queue else None
        if last is not None and last.kind == RecordKind.ABORT and not last.is_started:
            last.body += body
        else:
            self._queue.append(_Outgoing(RecordKind.ABORT, bytearray(body)))

    def call(self, call_id: int, body: bytes) -> None:
        """Queue a control message."""
        self._queue.append(_Outgoing(RecordKind.CALL, _CALL_ID.pack(call_id) + body))

    def flush(self) -> None:
        """Write as many records as the ring has room for."""
        while self._queue and self._producer.try_claim():
            outgoing = self._queue[0]
            self._push(outgoing)
            if outgoing.sent == len(outgoing.body):
                self._queue.popleft()

    def _push(self, outgoing: _Outgoing) -> None:
        if not outgoing.is_started:
            outgoing.is_started = True
            for handle in outgoing.handles:
                del self._unsent_adds[handle]
        chunk = outgoing.body[outgoing.sent : outgoing.sent + self._max_body]
        outgoing.sent += len(chunk)
        flags = _MORE if outgoing.sent < len(outgoing.body) else 0
        slot = self._slots[self._producer.slot]
        slot[HEADER_BYTES : HEADER_BYTES + len(chunk)] = chunk
        HEADER.pack_into(
            slot, 0, self._producer.sequence, outgoing.kind, flags, len(chunk), len(outgoing.body),
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip
        self._producer.publish()


class Inbox:
    """The engine's end; called by the engine loop's thread alone."""

    def __init__(self, segment: Segment) -> None:
        assert segment.header.ring == RingKind.REQUEST
        self._consumer = Consumer(segment)
        self._slots = [segment.slot(i) for i in range(segment.header.num_slots)]
        self._max_body = segment.header.slot_bytes - HEADER_BYTES
        self._partial: list[bytes] = []

    def wait(self, timeout_s: float) -> list[InMessage]:
        """Wait up to `timeout_s` for a first message, then return all that are there; [] on a time-out."""
        if not self._consumer.wait(timeout_s):
            return []
        first = self._read()
        return ([] if first is None else [first]) + self.drain()

    def drain(self) -> list[InMessage]:
        """Return the messages that are there, without waiting."""
        messages = []
        while self._consumer.try_wait():
            message = self._read()
            if message is not None:
                messages.append(message)
        return messages

    def _read(self) -> InMessage | None:
        slot = self._slots[self._consumer.slot]
        try:
            sequence, kind, flags, body_bytes, message_bytes, *_ = HEADER.unpack_from(slot)
            self._consumer.check(sequence)
            if kind not in _KINDS:
                raise RecordError(f"a record of kind {kind} has no business in the request ring")
            if body_bytes > self._max_body:
                raise RecordError(f"a record claims a body of {body_bytes} bytes, a slot holds {self._max_body}")
            self._partial.append(bytes(slot[HEADER_BYTES : HEADER_BYTES + body_bytes]))
        finally:
            self._consumer.release()
        if flags & _MORE:
            return None
        body, self._partial = b"".join(self._partial), []
        if len(body) != message_bytes:
            raise RecordError(f"a message of {message_bytes} bytes arrived with {len(body)}")
        return _decode(RecordKind(kind), body)


def _decode(kind: RecordKind, body: bytes) -> InMessage:
    if kind == RecordKind.ADD:
        return AddRequest.decode(body)
    if (len(body) % 8 and kind == RecordKind.ABORT) or len(body) < 8:
        raise RecordError(f"a {kind.name} of {len(body)} bytes is not made of 8-byte words")
    if kind == RecordKind.ABORT:
        return Abort(np.frombuffer(body, "<u8").tolist())
    return Call(_CALL_ID.unpack_from(body)[0], body[_CALL_ID.size :])
