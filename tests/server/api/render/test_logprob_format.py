import json
from typing import Any

import numpy as np

from ringserve.server.api.render.logprob_format import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from ringserve.server.generation.outputs import TokenLogprobs
from ringserve.server.text.token_names import TokenNames
from ringserve.shm_transport.records import DataContent

BYTES = {
    1: b"a",
    2: b" b",
    3: "🙂".encode()[:2],
    4: "🙂".encode()[2:],
    5: b'"\n',
    6: b"",
    7: "\u2028é".encode(),
    8: b"a",
}
NAMES = TokenNames(BYTES.__getitem__)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def parsed(data: bytes) -> Any:
    assert len(data.decode().splitlines()) == 1
    return json.loads(data, parse_constant=refuse_constant, object_pairs_hook=without_doubles)


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def logprobs(width: int, ids: list[int], values: list[float | None] | None = None) -> TokenLogprobs:
    given = [-float(n) for n in range(len(ids))] if values is None else values
    return TokenLogprobs(width, ids, given, [1] * (len(ids) // width))


def test_chat_entries_hold_raw_bytes_and_the_most_likely_tokens() -> None:
    answer = parsed(ChatLogprobs(NAMES).to_json(0, logprobs(3, [3, 2, 7, 4, 4, 5])))
    assert answer["refusal"] is None
    first, second = answer["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("bytes:\\xf0\\x9f", [0xF0, 0x9F], 0)
    assert first["top_logprobs"] == [
        {"token": " b", "logprob": -1, "bytes": [32, 98]},
        {"token": "\u2028é", "logprob": -2, "bytes": list("\u2028é".encode())},
    ]
    assert [top["token"] for top in second["top_logprobs"]] == [second["token"], '"\n']
    assert bytes(first["bytes"] + second["bytes"]).decode() == "🙂"


def test_without_alternatives_an_entry_has_an_empty_list_of_them() -> None:
    assert parsed(ChatLogprobs(NAMES).to_json(0, logprobs(1, [1, 6]))) == {
        "content": [
            {"token": "a", "logprob": 0, "bytes": [97], "top_logprobs": []},
            {"token": "", "logprob": -1, "bytes": [], "top_logprobs": []},
        ],
        "refusal": None,
    }
    assert parsed(ChatLogprobs(NAMES).to_json(0, logprobs(2, [])))["content"] == []


def test_completions_have_parallel_lists_and_each_choice_its_own_offsets() -> None:
    form = CompletionLogprobs(NAMES)
    assert parsed(form.to_json(0, logprobs(2, [1, 2, 3, 5]))) == {
        "text_offset": [0, 1],
        "token_logprobs": [0, -2],
        "tokens": ["a", "bytes:\\xf0\\x9f"],
        "top_logprobs": [{"a": 0, " b": -1}, {"bytes:\\xf0\\x9f": -2, '"\n': -3}],
    }
    assert parsed(form.to_json(0, logprobs(1, [4, 2])))["text_offset"] == [2, 2]
    assert parsed(form.to_json(1, logprobs(1, [2, 1])))["text_offset"] == [0, 2]
    assert parsed(form.to_json(0, logprobs(1, [1])))["text_offset"] == [4]


def test_a_name_stands_once_among_the_most_likely_and_the_sampled_token_wins() -> None:
    assert parsed(CompletionLogprobs(NAMES).to_json(0, logprobs(3, [1, 8, 1])))["top_logprobs"] == [{"a": 0}]


def test_what_json_cannot_hold_becomes_a_finite_floor() -> None:
    values = [float("-inf"), float("nan"), -10_000.0, -1e-7]
    answer = parsed(CompletionLogprobs(NAMES).to_json(0, logprobs(1, [1, 2, 5, 7], values)))
    assert answer["token_logprobs"] == [-9999.0, -9999.0, -9999.0, -1e-7]
    [entry] = parsed(ChatLogprobs(NAMES).to_json(0, logprobs(2, [1, 2], [float("-inf"), float("nan")])))["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_tokens_can_be_named_by_id_and_keep_their_bytes() -> None:
    names = TokenNames(BYTES.__getitem__, as_ids=True)
    [entry] = parsed(ChatLogprobs(names).to_json(0, logprobs(1, [7])))["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:7", list("\u2028é".encode()))


def prompt(num_rows: int = 2) -> PromptLogprobs:
    arrays = {
        DataContent.PROMPT_TOKEN_IDS: np.array([[2, 1, 7], [5, 5, 2]], np.int32)[:num_rows],
        DataContent.PROMPT_LOGPROBS: np.array([[-3, -1, -2], [-0.5, -0.5, -4]], np.float32)[:num_rows],
        DataContent.PROMPT_RANKS: np.array([9, 1], np.int32)[:num_rows],
    }
    known = PromptLogprobs.of(arrays)
    assert known is not None
    return known


def test_a_prompt_s_logprobs_begin_with_nothing_for_its_first_token() -> None:
    assert PromptLogprobs.of({}) is None
    assert parsed(prompt().to_json(2, NAMES)) == [
        None,
        {
            "2": {"logprob": -3, "rank": 9, "decoded_token": " b"},
            "1": {"logprob": -1, "rank": 1, "decoded_token": "a"},
            "7": {"logprob": -2, "rank": 2, "decoded_token": "\u2028é"},
        },
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": '"\n'},
            "2": {"logprob": -4, "rank": 2, "decoded_token": " b"},
        },
    ]
    assert [list(row) for row in parsed(prompt().to_json(0, NAMES))[1:]] == [["2"], ["5"]]


def test_a_prompt_as_output_has_null_where_its_first_token_has_no_logprob() -> None:
    answer = parsed(CompletionLogprobs(NAMES).to_json(0, prompt().as_output(1, 1)))
    assert answer["tokens"] == ["a", " b", '"\n']
    assert answer["token_logprobs"] == [None, -3, -0.5]
    assert answer["top_logprobs"] == [None, {" b": -3, "a": -1}, {'"\n': -0.5}]
    alone = parsed(CompletionLogprobs(NAMES).to_json(0, prompt(0).as_output(1, 1)))
    assert (alone["tokens"], alone["token_logprobs"]) == (["a"], [None])
