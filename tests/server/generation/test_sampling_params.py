from typing import Any

import pytest

from ringserve.server.errors import RequestError
from ringserve.server.generation.sampling_params import (
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 0), ("n", MAX_N + 1), ("max_tokens", -1), ("min_tokens", -1), ("temperature", -0.001), ("temperature", NAN),
     ("temperature", 2.001), ("temperature", float("inf")), ("top_p", 0.0), ("top_p", 1.001), ("top_p", NAN),
     ("top_k", -2), ("top_k", 2**31), ("min_p", -0.1), ("min_p", 1.1), ("min_p", NAN), ("seed", 2**63),
     ("seed", -(2**63) - 1), ("stop", ("a",) * (MAX_STOP_STRINGS + 1)), ("stop", ("a", "")),
     ("stop", ("x" * (MAX_STOP_STRING_CHARS + 1),)), ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1))],
)  # fmt: skip
def test_a_value_out_of_its_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", MAX_N), ("max_tokens", 1), ("max_tokens", None), ("temperature", 2.0), ("top_p", 1e-9), ("top_p", 1.0),
     ("top_k", -1), ("top_k", 2**31 - 1), ("min_p", 1.0), ("seed", 2**63 - 1), ("seed", -(2**63)),
     ("stop", ("x" * MAX_STOP_STRING_CHARS,) * MAX_STOP_STRINGS), ("stop_token_ids", (1,) * MAX_STOP_TOKEN_IDS)],
)  # fmt: skip
def test_a_value_at_its_limit_is_taken(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_nan_is_shown_as_what_it_is() -> None:
    with pytest.raises(RequestError, match="temperature is nan"):
        SamplingParams(temperature=NAN)


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_a_temperature_near_zero_is_greedy_and_then_n_is_1(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy == is_greedy
    if is_greedy:
        with pytest.raises(RequestError, match="n is 2"):
            SamplingParams(temperature=temperature, n=2)
    else:
        SamplingParams(temperature=temperature, n=2)


def test_a_seed_gives_each_sequence_the_next_one() -> None:
    assert SamplingParams(seed=7, n=3).seeds() == [7, 8, 9]
    assert SamplingParams(seed=7).seeds() == SamplingParams(seed=7, n=3).seeds()[:1]
    assert SamplingParams(seed=-2, n=3).seeds() == [2**64 - 2, 2**64 - 1, 0]
    assert SamplingParams(seed=0).seeds() == [0]


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_every_request_draws_its_own(seed: int | None) -> None:
    params = SamplingParams(seed=seed, n=2)
    drawn = [value for _ in range(20) for value in params.seeds()]
    assert len(set(drawn)) == 40
    assert all(0 <= value < 2**64 for value in drawn)


def test_a_list_that_is_too_long_is_told_by_its_length() -> None:
    with pytest.raises(RequestError, match=r"^stop is a list of 65 strings: at most 64$"):
        SamplingParams(stop=("a",) * 65)
    with pytest.raises(RequestError, match=r"^stop is or holds a string of 1025 characters: at most 1024$"):
        SamplingParams(stop=("a" * 1025,))
