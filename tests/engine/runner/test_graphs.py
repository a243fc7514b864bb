import dataclasses

import numpy as np
import pytest
import torch

from ringserve.engine.attention.model_inputs import fill_in, upload
from ringserve.engine.runner.graphs import Views, bucket_sizes, choose_bucket, is_plain_decode, lay_out
from ringserve.engine.schedule.batch import Batch, ChunkSpan
from ringserve.engine.transfer import send

CPU = torch.device("cpu")


def decode_batch(num_rows: int, num_blocks: int = 3) -> Batch:
    rng = np.random.default_rng(num_rows)
    return Batch(
        token_ids=rng.integers(0, 99, num_rows), positions=rng.integers(0, 99, num_rows),
        slot_mapping=rng.integers(4, 99, num_rows),
        block_tables=rng.integers(1, 25, (num_rows, num_blocks)).astype(np.int32),
        decode_lengths=rng.integers(1, 12, num_rows), last_rows=np.arange(num_rows),
        sources=rng.integers(-1, num_rows, num_rows),
    )  # fmt: skip


def test_buckets_are_fine_where_steps_are_small_and_end_at_what_is_needed() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(5) == [1, 2, 4, 8]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert bucket_sizes(65)[-2:] == [64, 80]
    assert bucket_sizes(1000)[-3:] == [224, 240, 256]


@pytest.mark.parametrize("max_rows", [1, 7, 64, 200, 256])
def test_every_number_of_rows_up_to_the_limit_has_the_smallest_bucket_with_room(max_rows: int) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    for num_rows in range(1, max_rows + 1):
        bucket = choose_bucket(sizes, num_rows)
        assert bucket is not None
        assert bucket >= num_rows
        assert all(size < num_rows for size in sizes if size < bucket)
    assert choose_bucket(sizes, sizes[-1] + 1) is None


def test_a_laid_out_batch_is_read_back_with_padding_that_touches_only_block_0() -> None:
    batch = decode_batch(3)
    buffer = torch.full((1000,), 77, dtype=torch.int32)
    flat = torch.from_numpy(lay_out(batch, 4, 5))
    buffer[: len(flat)] = flat
    views = Views.of(buffer, 4, 5)
    for name in ("token_ids", "positions", "slot_mapping", "sources"):
        np.testing.assert_array_equal(getattr(views, name)[:3], getattr(batch, name))
    np.testing.assert_array_equal(views.lengths[:3], batch.decode_lengths)
    np.testing.assert_array_equal(views.block_tables[:3, :3], batch.block_tables)
    assert not views.block_tables[:, 3:].any()
    padding = [
        int(getattr(views, name)[3]) for name in ("token_ids", "positions", "slot_mapping", "sources", "lengths")
    ]
    assert padding == [0, 0, 0, -1, 1]
    assert not views.block_tables[3].any()
    assert buffer[len(flat) :].eq(77).all()


def test_a_graphs_inputs_are_those_of_an_upload() -> None:
    batch, last_tokens = decode_batch(4), torch.tensor([500, 501, 502, 503])
    views = Views.of(torch.from_numpy(lay_out(batch, 4, 3)), 4, 3)
    recorded, plain = views.inputs(last_tokens, 64), upload(batch, CPU, last_tokens, max_length=64)
    for own, other in zip(recorded, plain, strict=True):
        for field in dataclasses.fields(own):
            found, wanted = getattr(own, field.name), getattr(other, field.name)
            if isinstance(found, torch.Tensor):
                assert found.dtype == wanted.dtype
                assert torch.equal(found, wanted)


def test_only_decodes_that_are_sampled_in_order_and_nothing_else_are_for_graphs() -> None:
    batch = decode_batch(2)
    rows = np.array([0])
    assert is_plain_decode(batch)
    assert not is_plain_decode(decode_batch(0))
    assert not is_plain_decode(dataclasses.replace(batch, chunks=[ChunkSpan(2, 3, 0, np.array([1], np.int32))]))
    assert not is_plain_decode(dataclasses.replace(batch, hidden_rows=rows))
    assert not is_plain_decode(dataclasses.replace(batch, adapters=np.array([0, 1])))
    assert not is_plain_decode(dataclasses.replace(batch, last_rows=rows))


def test_inputs_come_from_the_step_before_where_a_source_is_named() -> None:
    token_ids = torch.tensor([7, 8, 9])
    fill_in(token_ids, torch.tensor([1, -1, 0]), torch.tensor([40, 41]))
    assert token_ids.tolist() == [41, 8, 40]


def test_sent_arrays_keep_their_shapes_and_empty_ones_too() -> None:
    arrays = (np.arange(6).reshape(2, 3), np.empty((0, 4), np.int32), np.array([2**31 - 1]))
    sent = send(arrays, CPU)
    assert [tuple(each.shape) for each in sent] == [(2, 3), (0, 4), (1,)]
    assert all(each.dtype == torch.int32 for each in sent)
    for own, array in zip(sent, arrays, strict=True):
        np.testing.assert_array_equal(own, array)
