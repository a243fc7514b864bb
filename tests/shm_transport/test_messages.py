import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_transport.errors import RecordError
from shm_transport.messages import AddRequest

u64 = st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)


@given(u64, u64, st.lists(i32, max_size=50), st.lists(i32, max_size=5), st.binary(max_size=20), st.floats(0, 2))
def test_an_add_survives_encoding(
    handle: int, seed: int, prompt: list[int], stops: list[int], tail: bytes, temperature: float
) -> None:
    sent = AddRequest(
        handle=handle, seed=seed, prompt_token_ids=np.array(prompt, np.int32), max_tokens=2**32 - 1, min_tokens=3,
        temperature=temperature, top_p=0.25, top_k=40, min_p=0.125, eos_token_id=-1, stop_token_ids=tuple(stops),
        num_logprobs=20, tail=tail,
    )  # fmt: skip
    got = AddRequest.decode(sent.encode())
    for name in AddRequest.__slots__:
        if name == "prompt_token_ids":
            assert got.prompt_token_ids.tolist() == prompt
        else:
            assert getattr(got, name) == getattr(sent, name)


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_both_sizes(body: bytes) -> None:
    with pytest.raises(RecordError, match=r"\d+ bytes .*\d+ bytes"):
        AddRequest.decode(body)
