from hypothesis import given
from hypothesis import strategies as st

from engine.slot_pool import PADDING_SLOT, SlotPool


def test_slots_are_reserved_whole_or_not_at_all() -> None:
    pool = SlotPool(10)
    assert pool.try_allocate(1, 7)
    assert not pool.try_allocate(2, 4)
    assert pool.num_used == 7
    assert pool.try_allocate(2, 3)
    pool.free(1)
    assert pool.num_used == 3


def test_freeing_what_is_not_held_is_ignored() -> None:
    pool = SlotPool(4)
    pool.free(9)
    assert pool.try_allocate(1, 4)
    pool.free(1)
    pool.free(1)
    assert pool.num_used == 0


def test_freed_slots_are_taken_first() -> None:
    pool = SlotPool(100)
    pool.try_allocate(1, 5)
    first = pool.slots_of(1).tolist()
    pool.free(1)
    pool.try_allocate(2, 5)
    assert pool.slots_of(2).tolist() == first == [1, 2, 3, 4, 5]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=60))
def test_no_slot_is_ever_held_twice(actions: list[tuple[int, int]]) -> None:
    pool = SlotPool(30)
    held: dict[int, list[int]] = {}
    for handle, capacity in actions:
        if handle in held:
            pool.free(handle)
            del held[handle]
        elif pool.try_allocate(handle, capacity):
            held[handle] = pool.slots_of(handle).tolist()
            assert len(held[handle]) == capacity
        slots = [slot for own in held.values() for slot in own]
        assert len(set(slots)) == len(slots) == pool.num_used
        assert all(PADDING_SLOT < slot <= 30 for slot in slots)
