import time
from dataclasses import replace

import numpy as np
import pytest

from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import RecordError
from ringserve.shm_transport.messages import AddRequest, Fork
from ringserve.shm_transport.request_ring import Abort, Call, Inbox, Outbox
from ringserve.shm_transport.ring import HEADER
from ringserve.shm_transport.segment import Segment


def request(handle: int, num_prompt_tokens: int = 4) -> AddRequest:
    return AddRequest(handle=handle, prompt_token_ids=np.arange(num_prompt_tokens, dtype=np.int32), max_tokens=3)


def kinds(messages: list[AddRequest | Abort | Call]) -> list[tuple[str, object]]:
    fields = {AddRequest: "handle", Abort: "handles", Call: "body"}
    return [(type(m).__name__, getattr(m, fields[type(m)])) for m in messages]


def test_messages_arrive_in_order(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    outbox.add(request(1))
    outbox.call(5, b"{}")
    outbox.flush()
    outbox.abort([1])
    outbox.flush()
    assert kinds(inbox.drain()) == [("AddRequest", 1), ("Call", b"{}"), ("Abort", [1])]
    assert outbox.is_empty


def test_an_abort_of_an_unsent_add_drops_both(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    outbox.add(request(1))
    outbox.add(request(2))
    outbox.abort([1])
    outbox.flush()
    assert kinds(inbox.drain()) == [("AddRequest", 2)]


def test_aborts_coalesce_into_one_record(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    for handle in range(10):
        outbox.abort([handle])
    outbox.flush()
    assert kinds(inbox.drain()) == [("Abort", list(range(10)))]


def test_a_chat_behind_a_call_of_256_prompts_reaches_the_engine_before_its_next_step() -> None:
    requests = segment.create(segment.new_base_name(), segment.request_header(RingConfig(), epoch=7))
    requests.unlink()
    outbox, inbox = Outbox(requests), Inbox(requests)
    for handle in range(256):
        outbox.add(request(handle, 500))
    outbox.add(request(1000, 40))
    outbox.flush()
    assert kinds(inbox.drain())[-1] == ("AddRequest", 1000)


def test_a_full_ring_never_blocks_the_outbox_and_loses_nothing(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    started = time.monotonic()
    for handle in range(100):
        outbox.add(request(handle))
        outbox.flush()
    assert time.monotonic() - started < 5
    assert not outbox.is_empty
    got = []
    while not outbox.is_empty or got[-1:] != [99]:
        got += [m.handle for m in inbox.drain()]
        outbox.flush()
    assert got == list(range(100))


def test_a_prompt_longer_than_the_whole_ring_arrives_whole(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    outbox.add(request(1, num_prompt_tokens=5000))
    got: list[AddRequest] = []
    while not got:
        outbox.flush()
        got += inbox.drain()
    assert got[0].prompt_token_ids.tolist() == list(range(5000))


def test_an_abort_behind_a_half_sent_add_follows_it(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    outbox.add(request(1, num_prompt_tokens=500))
    outbox.flush()
    outbox.abort([1])
    got = []
    while not outbox.is_empty:
        got += inbox.drain()
        outbox.flush()
    assert kinds(got + inbox.drain()) == [("AddRequest", 1), ("Abort", [1])]


def test_waiting_ends_with_a_message_or_the_time_out(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    assert inbox.wait(timeout_s=0.01) == []
    outbox.abort([3])
    outbox.flush()
    assert kinds(inbox.wait(timeout_s=5)) == [("Abort", [3])]


@pytest.mark.parametrize(("field", "value", "message"), [(1, 1, "kind 1"), (3, 999, "999 bytes, a slot holds 128")])
def test_a_damaged_record_is_an_error(request_segment: Segment, field: int, value: int, message: str) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    outbox.abort([1])
    outbox.flush()
    fields = list(HEADER.unpack_from(request_segment.slot(0)))
    fields[field] = value
    HEADER.pack_into(request_segment.slot(0), 0, *fields)
    with pytest.raises(RecordError, match=message):
        inbox.drain()


def test_an_abort_of_some_of_an_unsent_adds_handles_follows_it_and_spares_the_others(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    outbox.add(replace(request(1), forks=(Fork(2, 0), Fork(3, 0))))
    outbox.abort([1])
    outbox.abort([3])
    outbox.flush()
    assert kinds(inbox.drain()) == [("AddRequest", 1), ("Abort", [1, 3])]
    outbox.abort([2])
    outbox.flush()
    assert kinds(inbox.drain()) == [("Abort", [2])]


def test_an_abort_of_all_of_an_unsent_adds_handles_drops_it(request_segment: Segment) -> None:
    outbox, inbox = Outbox(request_segment), Inbox(request_segment)
    outbox.add(replace(request(1), forks=(Fork(2, 0),)))
    outbox.add(request(5))
    outbox.abort([2])
    outbox.abort([1])
    outbox.flush()
    got = kinds(inbox.drain())
    assert ("AddRequest", 1) not in got
    assert ("AddRequest", 5) in got
