from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.shm_transport.errors import RecordError
from ringserve.shm_transport.messages import AddRequest, Data, Fork
from ringserve.shm_transport.records import ADD_FIELDS, DATA_FIELDS, DataContent, Pooling

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
ids = st.lists(i32, max_size=5).map(tuple)
number = st.floats(allow_nan=False)
both_sizes = r"\d+ bytes .*\d+ bytes"

adds = st.builds(
    AddRequest,
    handle=u64, prompt_token_ids=st.lists(i32, max_size=50).map(lambda prompt: np.array(prompt, np.int32)),
    num_sibling_tokens=u32, key_number=u32,
    max_tokens=u32, min_tokens=u32, temperature=number, top_p=number, top_k=i32, min_p=number,
    repetition_penalty=number, frequency_penalty=number, presence_penalty=number, seed=u64, eos_token_id=i32,
    stop_token_ids=ids, allowed_token_ids=ids, bad_token_ids=ids,
    logit_bias=st.lists(st.tuples(i32, st.floats(width=32, allow_nan=False)), max_size=5).map(tuple),
    num_logprobs=i32, num_prompt_logprobs=i32, priority=i32, forks=st.lists(st.builds(Fork, u64, u64)).map(tuple),
    cache_salt=st.text(), adapter=st.text(), grammar=st.text(), pooling=st.sampled_from(Pooling),
    is_normalized=st.booleans(),
)  # fmt: skip
datas = st.builds(
    Data,
    handle=u64,
    content=st.sampled_from(DataContent),
    array=st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from([np.dtype("<i4"), np.dtype("<f4")])).map(
        lambda shape_dtype: np.arange(np.prod(shape_dtype[0])).astype(shape_dtype[1]).reshape(shape_dtype[0])
    ),
)


def same(first: AddRequest | Data, second: AddRequest | Data) -> bool:
    for field in fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True


@given(adds)
def test_an_add_survives_encoding(sent: AddRequest) -> None:
    assert same(AddRequest.decode(sent.encode()), sent)


@given(datas)
def test_a_data_survives_encoding(sent: Data) -> None:
    assert same(Data.decode(sent.encode()), sent)


def test_a_plain_add_is_its_fields_and_its_prompt() -> None:
    body = AddRequest(handle=7, prompt_token_ids=np.array([1, 2, 3], np.int32), max_tokens=9).encode()
    assert len(body) == ADD_FIELDS.itemsize + 12
    fields = np.frombuffer(body, ADD_FIELDS, 1)[0]
    assert (fields["handle"], fields["max_tokens"], fields["num_prompt_tokens"]) == (7, 9, 3)
    assert (fields["repetition_penalty"], fields["num_prompt_logprobs"], fields["pooling"]) == (1.0, -1, 0)


def test_every_section_of_an_add_lies_where_the_layout_says() -> None:
    body = AddRequest(
        handle=7, prompt_token_ids=np.array([1, 2], np.int32), max_tokens=9, stop_token_ids=(3,),
        allowed_token_ids=(4, 5), bad_token_ids=(6,), logit_bias=((8, 0.5), (9, -2.0)), forks=(Fork(10, 11),),
        cache_salt="salt", adapter="a", grammar="start",
    ).encode()  # fmt: skip
    expected = np.array([10, 11], "<u8").tobytes() + np.array([1, 2, 3, 4, 5, 6], "<i4").tobytes()
    expected += np.array([(8, 0.5), (9, -2.0)], "<i4,<f4").tobytes() + b"saltastart"
    assert body[ADD_FIELDS.itemsize :] == expected


@given(st.one_of(adds, datas), st.data())
def test_a_body_of_another_size_is_refused_with_both_sizes(sent: AddRequest | Data, data: st.DataObject) -> None:
    body = sent.encode()
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    for wrong in (cut, body + b"\0"):
        with pytest.raises(RecordError, match=both_sizes):
            type(sent).decode(wrong)


@given(st.one_of(st.binary(max_size=400), st.binary(min_size=136, max_size=136).map(lambda start: start + bytes(64))))
def test_garbage_is_refused_or_means_what_it_says(body: bytes) -> None:
    for kind in (AddRequest, Data):
        try:
            message = kind.decode(body)
        except RecordError:
            continue
        assert len(message.encode()) == len(body)


@pytest.mark.parametrize("field", ["num_forks", "num_prompt_tokens", "num_logit_biases", "adapter_bytes"])
def test_an_add_whose_count_is_too_large_is_refused_with_both_sizes(field: str) -> None:
    body = np.zeros(1, ADD_FIELDS)
    body[field] = 2**32 - 1
    with pytest.raises(RecordError, match=both_sizes):
        AddRequest.decode(body.tobytes())


@pytest.mark.parametrize(("field", "value"), [("pooling", 3), ("is_normalized", 2)])
def test_an_add_with_an_unknown_choice_is_refused_by_name(field: str, value: int) -> None:
    body = np.zeros(1, ADD_FIELDS)
    body[field] = value
    with pytest.raises(RecordError, match=f"{field} {value}"):
        AddRequest.decode(body.tobytes())


def test_an_add_whose_text_is_not_utf_8_is_refused() -> None:
    body = np.zeros(1, ADD_FIELDS)
    body["cache_salt_bytes"] = 2
    with pytest.raises(RecordError, match="2 bytes of a record's text are not UTF-8"):
        AddRequest.decode(body.tobytes() + b"\xff\xfe")


@pytest.mark.parametrize(("field", "value"), [("content", 9), ("dtype", b"f8"), ("num_dimensions", 9)])
def test_a_data_of_unknown_content_or_dtype_is_refused_by_value(field: str, value: object) -> None:
    body = np.array([(1, 1, b"f4", 0)], DATA_FIELDS)
    body[field] = value
    with pytest.raises(RecordError, match=str(value)):
        Data.decode(body.tobytes() + bytes(200))


def test_a_data_without_items_but_with_a_huge_side_is_refused() -> None:
    body = np.array([(1, 1, b"f4", 2)], DATA_FIELDS).tobytes() + np.array([0, 2**63], "<u8").tobytes()
    with pytest.raises(RecordError, match="shape"):
        Data.decode(body)
