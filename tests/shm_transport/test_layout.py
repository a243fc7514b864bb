import numpy as np

from ringserve.shm_transport.layout import step_columns, struct_of
from ringserve.shm_transport.records import CACHE_LINE_BYTES, RECORD_HEADER, SEGMENT_HEADER


def test_columns_are_aligned_and_do_not_overlap() -> None:
    columns, slot_bytes = step_columns(max_rows=5, max_tokens=9, max_logprob_entries=33)
    end = RECORD_HEADER.itemsize
    for column in columns.values():
        assert column.offset % CACHE_LINE_BYTES == 0
        assert column.offset >= end
        end = column.offset + np.dtype(column.dtype).itemsize * column.length
    assert end <= slot_bytes


def test_struct_codec_agrees_with_numpy_on_every_field() -> None:
    for dtype in (RECORD_HEADER, SEGMENT_HEADER):
        values = tuple(range(1, len(dtype.names) + 1))
        record = np.frombuffer(struct_of(dtype).pack(*values), dtype)[0]
        assert tuple(int(record[name]) for name in dtype.names) == values
