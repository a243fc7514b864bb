"""The byte map in ARCHITECTURE.md is the contract for engines in other languages: it must say what the dtypes say."""

import enum
import re
from pathlib import Path

import numpy as np
import pytest

from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.layout import step_columns
from ringserve.shm_transport.records import (
    ADD_FIELDS,
    DATA_FIELDS,
    RECORD_HEADER,
    SEGMENT_HEADER,
    FinishReason,
    RecordFlag,
    RecordKind,
)

DOCUMENT = Path(__file__).parents[2] / "ARCHITECTURE.md"


@pytest.fixture(scope="module")
def byte_map() -> str:
    _, after = DOCUMENT.read_text().split("\n## Byte map\n")
    return after.split("\n## ")[0]


def section(byte_map: str, title: str) -> tuple[int, list[tuple[str, ...]]]:
    """The size in bytes that a table's heading gives, and the table's rows without the meaning."""
    heading, body = re.search(rf"^### ({title},.*)\n([^#]*)", byte_map, re.MULTILINE).groups()
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-2]) for line in body.splitlines() if line[:1] == "|"]
    return int(re.search(r"(\d+) bytes", heading)[1]), rows[2:]


def short(dtype: np.dtype | str) -> str:
    return np.dtype(dtype).str.lstrip("<|")


@pytest.mark.parametrize(
    ("title", "dtype"),
    [
        ("SEGMENT_HEADER", SEGMENT_HEADER),
        ("RECORD_HEADER", RECORD_HEADER),
        ("ADD_FIELDS", ADD_FIELDS),
        ("DATA_FIELDS", DATA_FIELDS),
    ],
)
def test_the_tables_have_every_field_of_the_dtypes(byte_map: str, title: str, dtype: np.dtype) -> None:
    fields = [(str(dtype.fields[name][1]), short(dtype.fields[name][0]), name) for name in dtype.names]
    assert section(byte_map, title) == (dtype.itemsize, fields)


def test_the_step_table_has_every_column_of_the_default_ring(byte_map: str) -> None:
    config = RingConfig()
    columns, slot_bytes = step_columns(config.max_rows, config.max_tokens, config.max_logprob_entries)
    rows = [(str(c.offset), short(c.dtype), str(c.length), name) for name, c in columns.items()]
    assert section(byte_map, "STEP columns") == (slot_bytes, rows)
    assert slot_bytes == config.step_slot_bytes


@pytest.mark.parametrize(
    ("title", "values"), [("Kinds", RecordKind), ("Flags", RecordFlag), ("Finish reasons", FinishReason)]
)
def test_the_lists_have_every_value_of_the_enums(byte_map: str, title: str, values: type[enum.IntEnum]) -> None:
    line = re.search(rf"^- {title}: (.*)\.$", byte_map, re.MULTILINE)[1]
    assert line.split(", ") == [f"{int(value)} {value.name}" for value in values]


def test_every_number_is_little_endian() -> None:
    for dtype in (SEGMENT_HEADER, RECORD_HEADER, ADD_FIELDS, DATA_FIELDS):
        assert all(field[0].str[0] in "<|" for field in dtype.fields.values())
