"""Arithmetic over the dtypes of records.py: where each column of a slot lies, and struct codecs for headers."""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringserve.shm_transport.records import (
    CACHE_LINE_BYTES,
    RECORD_HEADER,
    STEP_LOGPROB_COLUMNS,
    STEP_ROW_COLUMNS,
    STEP_TOKEN_COLUMNS,
)

_STRUCT_CODES = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i4": "i", "i8": "q", "f4": "f", "f8": "d", "S2": "2s"}


@dataclass(slots=True, kw_only=True, frozen=True)
class Column:
    """One column of a STEP slot: numpy dtype string, length in items, byte offset in the slot."""

    dtype: str
    length: int
    offset: int


def align(num_bytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def step_columns(max_rows: int, max_tokens: int, max_logprob_entries: int) -> tuple[dict[str, Column], int]:
    """Lay out a STEP slot; return its columns by name, and its size in bytes."""
    columns: dict[str, Column] = {}
    offset = align(RECORD_HEADER.itemsize)
    groups = (
        (STEP_ROW_COLUMNS, max_rows),
        (STEP_TOKEN_COLUMNS, max_tokens),
        (STEP_LOGPROB_COLUMNS, max_logprob_entries),
    )
    for group, length in groups:
        for name, dtype in group:
            columns[name] = Column(dtype=dtype, length=length, offset=offset)
            offset += align(np.dtype(dtype).itemsize * length)
    return columns, offset


def column_views(slot: memoryview, columns: dict[str, Column]) -> dict[str, NDArray[np.generic]]:
    """Return a numpy view of each column of one slot; made once, at attach."""
    return {name: np.frombuffer(slot, c.dtype, c.length, c.offset) for name, c in columns.items()}


def struct_of(dtype: np.dtype[np.void]) -> struct.Struct:
    """Return the struct codec of a record dtype, padding included; ten times faster than a numpy scalar record.

    Source: the field table of the dtype itself, so that the layout is written down once.
    """
    assert dtype.fields is not None
    assert dtype.names is not None
    codes, end = "<", 0
    for name in dtype.names:
        field_dtype, offset = dtype.fields[name][:2]
        codes += f"{offset - end}x" if offset > end else ""
        codes += _STRUCT_CODES[field_dtype.str.lstrip("<|")]
        end = offset + field_dtype.itemsize
    return struct.Struct(codes + f"{dtype.itemsize - end}x")
