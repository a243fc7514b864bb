import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from ringserve.engine.schedule.block_pool import PADDING_BLOCK, BlockPool, Salt

SIZE = 4
NOBODY = Salt("", 0)


def tokens(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def register_all(pool: BlockPool, block_ids: list[int], token_ids: NDArray[np.int32], salt: Salt = NOBODY) -> None:
    parent: int | Salt = salt
    for index, block_id in enumerate(block_ids[: len(token_ids) // SIZE]):
        parent = pool.register(block_id, parent, token_ids[index * SIZE : (index + 1) * SIZE])


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=9, block_size=SIZE)


def test_every_block_but_the_padding_block_is_given_once(pool: BlockPool) -> None:
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (8, 8, 0)
    assert sorted(pool.allocate(8)) == list(range(PADDING_BLOCK + 1, 9))
    assert (pool.num_free, pool.num_used) == (0, 8)


def test_a_registered_beginning_is_found_as_far_as_it_agrees(pool: BlockPool) -> None:
    block_ids = pool.allocate(3)
    register_all(pool, block_ids, tokens(*range(12)))
    assert pool.find_prefix(tokens(*range(12)), NOBODY).block_ids == block_ids
    assert pool.find_prefix(tokens(*range(11)), NOBODY).block_ids == block_ids[:2]
    assert pool.find_prefix(tokens(0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11), NOBODY).block_ids == block_ids[:1]
    assert pool.find_prefix(tokens(4, 5, 6, 7), NOBODY).block_ids == []  # the same tokens at another place


def test_what_is_not_registered_is_not_found(pool: BlockPool) -> None:
    block_ids = pool.allocate(2)
    pool.register(block_ids[0], NOBODY, tokens(0, 1, 2, 3))
    assert pool.find_prefix(tokens(*range(8)), NOBODY).block_ids == block_ids[:1]


@pytest.mark.parametrize("salt", [Salt("other", 0), Salt("", 1)])
def test_requests_of_different_salts_or_adapters_share_nothing(pool: BlockPool, salt: Salt) -> None:
    block_ids = pool.allocate(1)
    register_all(pool, block_ids, tokens(0, 1, 2, 3), salt)
    assert pool.find_prefix(tokens(0, 1, 2, 3), NOBODY).block_ids == []
    assert pool.find_prefix(tokens(0, 1, 2, 3), salt).block_ids == block_ids


def test_a_second_block_of_the_same_content_is_not_found_but_what_follows_it_is(pool: BlockPool) -> None:
    first, second = pool.allocate(1), pool.allocate(2)
    register_all(pool, first, tokens(*range(4)))
    register_all(pool, second, tokens(*range(8)))
    assert pool.find_prefix(tokens(*range(8)), NOBODY).block_ids == [first[0], second[1]]
    pool.release(second)
    assert pool.allocate(1) == [second[0]]  # it was never registered: it goes first


def test_a_freed_block_is_found_until_its_room_is_needed(pool: BlockPool) -> None:
    block_ids = pool.allocate(2)
    register_all(pool, block_ids, tokens(*range(8)))
    pool.release(block_ids)
    assert pool.num_used == 0
    assert pool.find_prefix(tokens(*range(8)), NOBODY).block_ids == block_ids
    others = pool.allocate(6)
    assert not set(others) & set(block_ids)  # blank ones first
    assert pool.allocate(1) == [block_ids[1]]  # then the tail
    assert pool.find_prefix(tokens(*range(8)), NOBODY).block_ids == block_ids[:1]
    assert pool.counters.num_evictions == 1


def test_the_least_recently_used_gives_way_first(pool: BlockPool) -> None:
    old, new = pool.allocate(1), pool.allocate(1)
    register_all(pool, old, tokens(0, 0, 0, 0))
    register_all(pool, new, tokens(1, 1, 1, 1))
    pool.release(old)
    pool.release(new)
    pool.hold(old)  # used again
    pool.release(old)
    pool.allocate(6)
    assert pool.allocate(1) == new
    assert pool.allocate(1) == old


def test_a_found_block_that_is_held_outlives_its_first_owner(pool: BlockPool) -> None:
    block_ids = pool.allocate(1)
    register_all(pool, block_ids, tokens(0, 1, 2, 3))
    pool.hold(block_ids)
    assert pool.is_shared(block_ids[0])
    pool.release(block_ids)
    assert not pool.is_shared(block_ids[0])
    assert pool.num_used == 1
    assert pool.num_free_without(block_ids) == 7
    pool.release(block_ids)
    assert pool.num_free_without(block_ids) == 7


def test_content_that_came_back_into_another_block_has_another_name(pool: BlockPool) -> None:
    block_ids = pool.allocate(1)
    first = pool.register(block_ids[0], NOBODY, tokens(0, 1, 2, 3))
    pool.release(block_ids)
    everything = pool.allocate(8)  # evicts it
    assert pool.register(everything[0], NOBODY, tokens(0, 1, 2, 3)) != first


class PoolMachine(RuleBasedStateMachine):
    """Requests with tokens of their own over a small pool; `written` is what each block's keys would be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=8, block_size=2)
        self.requests: list[tuple[list[int], NDArray[np.int32]]] = []  # block ids, tokens
        self.written: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    @rule(numbers=st.lists(st.integers(0, 1), min_size=1, max_size=9), is_computed=st.booleans())
    def start(self, numbers: list[int], is_computed: bool) -> None:
        token_ids = tokens(*numbers)
        found = self.pool.find_prefix(token_ids[:-1], NOBODY)
        num_new = -(-len(numbers) // 2) - len(found.block_ids)
        for index, block_id in enumerate(found.block_ids):
            assert self.written[block_id] == tuple(numbers[: 2 * index + 2])  # a hit is never wrong
        if num_new > self.pool.num_free_without(found.block_ids):
            return
        self.pool.hold(found.block_ids)
        block_ids = found.block_ids + self.pool.allocate(num_new)
        parent: int | Salt = found.content_id or NOBODY
        for index in range(len(found.block_ids), len(block_ids)):
            self.written[block_ids[index]] = tuple(numbers[: 2 * index + 2])
            if is_computed and 2 * index + 2 <= len(numbers):
                parent = self.pool.register(block_ids[index], parent, token_ids[2 * index : 2 * index + 2])
        self.requests.append((block_ids, token_ids))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        block_ids, token_ids = data.draw(st.sampled_from(self.requests))
        self.pool.hold(block_ids)
        self.requests.append((block_ids.copy(), token_ids))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.pool.release(self.requests.pop(index)[0])

    @invariant()
    def no_block_is_lost_doubled_or_both_held_and_free(self) -> None:
        held = [block_id for block_ids, _ in self.requests for block_id in block_ids]
        free = [*self.pool._blank, *self.pool._cached]
        assert sorted({*held, *free}) == list(range(1, 8))
        assert len(free) == len(set(free)) == self.pool.num_free
        assert not set(held) & set(free)
        assert len(set(held)) == self.pool.num_used
        assert self.pool._ref_counts == [held.count(block_id) for block_id in range(8)]

    @invariant()
    def the_index_and_the_blocks_agree(self) -> None:
        indexed = {block_id: content for content, (block_id, _) in self.pool._index.items()}
        assert indexed == {n: content for n, content in enumerate(self.pool._contents) if content is not None}
        assert set(self.pool._cached) <= set(indexed)
        assert not set(self.pool._blank) & set(indexed)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
