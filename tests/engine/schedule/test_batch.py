import numpy as np

from ringserve.engine.schedule.batch import pack
from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Chunk, Plan, PromptRows
from ringserve.shm_transport.messages import AddRequest


def _request(prompt: list[int], output: list[int], block_ids: list[int], **state: int) -> Request:
    add = AddRequest(handle=block_ids[0], prompt_token_ids=np.array(prompt, np.int32), max_tokens=9)
    request = Request(add, queued_ns=0, output_token_ids=output, block_ids=block_ids)
    request.num_computed_tokens = request.num_tokens - 1 if output else 0
    for name, value in state.items():
        setattr(request, name, value)
    return request


def test_decodes_come_first_and_every_token_knows_its_place() -> None:
    decodes = [_request([10, 11], [12], [7, 9]), _request([20], [21, 22, 23], [4, 2, 8])]
    chunks = [
        Chunk(_request([30, 31, 32], [], [5, 3]), 3, is_last=True),
        Chunk(_request([40, 41, 42, 43, 44], [], [6, 1, 11], num_computed_tokens=1), 3, is_last=False),
    ]
    plan = Plan(decodes, chunks, sampled_rows=[0, 1, 4, 4])
    batch = pack(plan, block_size=2)
    assert batch.num_decodes == 2
    assert batch.token_ids.tolist() == [12, 23, 30, 31, 32, 41, 42, 43]
    assert batch.positions.tolist() == [2, 3, 0, 1, 2, 1, 2, 3]
    assert batch.slot_mapping.tolist() == [18, 5, 10, 11, 6, 13, 2, 3]
    assert batch.block_tables.tolist() == [[7, 9], [4, 2]]
    assert batch.decode_lengths.tolist() == [3, 4]
    assert [(chunk.start, chunk.end, chunk.num_context) for chunk in batch.chunks] == [(2, 5, 0), (5, 8, 1)]
    assert [chunk.block_table.tolist() for chunk in batch.chunks] == [[5, 3], [6, 1]]
    assert batch.last_rows.tolist() == [0, 1, 4, 4]  # a fork samples from its parent's row
    assert batch.adapters is None


def test_shorter_block_tables_are_filled_up_with_the_padding_block() -> None:
    batch = pack(Plan([_request([1], [2], [5, 6]), _request([1, 2, 3], [4], [7, 8])]), block_size=2)
    assert batch.block_tables.tolist() == [[5, 0], [7, 8]]


def test_logits_beyond_the_sampled_and_hidden_states_are_named_row_by_row() -> None:
    request = _request([1, 2, 3, 4], [], [1, 2])
    plan = Plan(
        chunks=[Chunk(request, 4, is_last=True)],
        sampled_rows=[3],
        scored=[PromptRows(request, 0, 2)],
        pooled=[PromptRows(request, 1, 4)],
    )
    batch = pack(plan, block_size=2)
    assert batch.last_rows.tolist() == [3, 0, 1]
    assert batch.hidden_rows.tolist() == [1, 2, 3]


def test_each_row_knows_its_adapter_once_anybody_has_one() -> None:
    plan = Plan([_request([1], [2], [1])], [Chunk(_request([1, 2], [], [2], adapter=3), 2, is_last=True)])
    adapters = pack(plan, block_size=2).adapters
    assert adapters is not None
    assert adapters.tolist() == [0, 3, 3]


def test_a_step_of_beginnings_alone_keeps_integer_arrays() -> None:
    batch = pack(Plan(chunks=[Chunk(_request([1, 2, 3], [], [1, 2]), 2, is_last=False)]), block_size=2)
    assert batch.last_rows.dtype == batch.decode_lengths.dtype == np.int64
    assert batch.last_rows.shape == batch.decode_lengths.shape == (0,)
    assert batch.block_tables.shape == (0, 0)
