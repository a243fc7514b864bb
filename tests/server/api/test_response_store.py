import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.server.api.response_store import ResponseStore, StoredResponse, encode_items, find_items, output_ids
from ringserve.server.errors import RequestError


def stored(num_bytes: int = 10) -> StoredResponse:
    return StoredResponse(b"x" * num_bytes, b"")


def test_a_response_comes_back_as_it_was_put() -> None:
    store = ResponseStore()
    response = json.dumps({"id": "resp_1", "output": [{"type": "message", "id": "msg_2"}]}).encode()
    store.put("resp_1", StoredResponse(response, encode_items([{"type": "message", "id": "msg_1"}])))
    found = store.get("resp_1")
    assert found is not None
    assert found.response == response
    assert found.items() == [{"type": "message", "id": "msg_1"}]
    assert [item["id"] for item in found.conversation()] == ["msg_1", "msg_2"]


def test_the_least_recently_used_response_makes_room_for_a_new_one() -> None:
    store = ResponseStore(max_responses=2)
    store.put("a", stored())
    store.put("b", stored())
    assert store.get("a") is not None  # used: b is the oldest now
    store.put("c", stored())
    assert store.get("b") is None
    assert store.get("a") is not None
    assert store.get("c") is not None


def test_bytes_are_bounded() -> None:
    store = ResponseStore(max_bytes=1600)
    for name in range(17):
        store.put(str(name), stored(100))
    assert (len(store), store.num_bytes) == (16, 1600)
    assert store.get("0") is None


def test_a_store_of_no_responses_keeps_none() -> None:
    store = ResponseStore(max_responses=0)
    assert not store.is_enabled
    store.put("a", stored())
    assert store.get("a") is None
    assert store.num_bytes == 0


def test_a_deleted_response_is_gone_and_gives_its_bytes_back() -> None:
    store = ResponseStore()
    store.put("a", stored())
    assert store.delete("a")
    assert not store.delete("a")
    assert store.get("a") is None
    assert store.num_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.booleans()), max_size=40))
def test_neither_limit_is_ever_exceeded_and_the_count_of_bytes_is_right(steps: list[tuple[str, int, bool]]) -> None:
    store = ResponseStore(max_responses=3, max_bytes=960)
    for name, num_bytes, is_put in steps:
        if is_put:
            store.put(name, stored(num_bytes))
        else:
            store.delete(name)
        kept = [found for name in "abcdef" if (found := store.get(name)) is not None]
        assert len(store) == len(kept) <= 3
        assert store.num_bytes == sum(one.num_bytes for one in kept) <= 960


def test_a_response_above_its_share_is_not_kept_and_pushes_nothing_out() -> None:
    store = ResponseStore(max_bytes=1600)
    store.put("a", stored(100))
    store.put("b", stored(101))
    store.put("c", stored(5000))
    assert store.get("a") is not None
    assert (len(store), store.num_bytes) == (1, 100)


def holding(*names: str, text: str = "") -> StoredResponse:
    """Return a response whose output are items of these names; each came from an item of the name with _in."""
    items = [[{"id": name + suffix, "text": text} for name in names] for suffix in ("", "_in")]
    response = json.dumps({"id": "resp", "output": items[0]}).encode()
    return StoredResponse(response, encode_items(items[1]), (*output_ids(response), *(f"{name}_in" for name in names)))


def test_an_item_is_found_by_its_id_as_long_as_the_response_that_it_came_with() -> None:
    store = ResponseStore(max_responses=2)
    store.put("r1", holding("a", "b"))
    store.put("r2", holding("c"))
    wanted = ("a", "c_in", "b_in", "nothing")
    assert sorted(find_items(store.holders(wanted), wanted)) == ["a", "b_in", "c_in"]
    assert len(store.holders(["c", "c_in"])) == 1
    store.holders(["a"])  # a use: r2 is the oldest now
    store.put("r3", holding("d"))
    assert store.holders(["c", "c_in"]) == []
    assert store.delete("r1")
    assert store.holders(["a", "b", "a_in"]) == []
    assert len(store.holders(["d"])) == 1


def test_a_response_that_is_put_again_has_its_new_items_alone() -> None:
    store = ResponseStore()
    store.put("r", holding("a"))
    store.put("r", holding("b"))
    assert store.holders(["a"]) == []
    assert len(store.holders(["b"])) == 1


def test_items_that_are_referred_to_are_bounded_together() -> None:
    text = "x" * (4 << 20)
    holders = [holding(str(number), text=text) for number in range(5)]
    assert len(find_items(holders, ["0", "1", "2"])) == 3
    with pytest.raises(RequestError, match=r"^input refers to items of more than 16777216 bytes"):
        find_items(holders, ["0", "1", "2", "3", "4"])
