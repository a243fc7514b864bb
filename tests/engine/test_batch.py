import numpy as np

from engine.batch import pack
from engine.request import Request
from engine.slot_pool import PADDING_SLOT, SlotPool
from shm_transport.messages import AddRequest


def _request(pool: SlotPool, handle: int, prompt: list[int], output: list[int]) -> Request:
    add = AddRequest(handle=handle, prompt_token_ids=np.array(prompt, np.int32), max_tokens=9)
    request = Request(add, queued_ns=0, output_token_ids=output)
    request.num_computed_tokens = max(0, request.num_tokens - 1) if output else 0
    pool.try_allocate(handle, 6)
    return request


def test_decodes_come_first_and_every_token_knows_its_place() -> None:
    pool = SlotPool(50)
    decodes = [_request(pool, 1, [10, 11], [12]), _request(pool, 2, [20], [21, 22, 23])]
    prefills = [_request(pool, 3, [30, 31, 32], []), _request(pool, 4, [40], [])]
    batch = pack(decodes, prefills, pool)
    assert batch.token_ids.tolist() == [12, 23, 30, 31, 32, 40]
    assert batch.positions.tolist() == [2, 3, 0, 1, 2, 0]
    assert batch.slot_mapping.tolist() == [3, 10, 13, 14, 15, 19]
    assert batch.decode_slots.tolist() == [[1, 2, 3, PADDING_SLOT], [7, 8, 9, 10]]
    assert batch.decode_lengths.tolist() == [3, 4]
    assert batch.prefill_bounds == [(2, 5), (5, 6)]
    assert batch.last_rows.tolist() == [0, 1, 4, 5]


def test_an_empty_batch_keeps_integer_arrays() -> None:
    batch = pack([], [], SlotPool(1))
    for array in (batch.token_ids, batch.positions, batch.slot_mapping, batch.last_rows, batch.decode_lengths):
        assert array.dtype == np.int64
        assert array.shape == (0,)
    assert batch.decode_slots.shape == (0, 0)
