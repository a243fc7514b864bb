import json

from hypothesis import given
from hypothesis import strategies as st

from ringserve.server.api.response_store import ResponseStore, StoredResponse, encode_items


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
