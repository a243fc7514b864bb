from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringserve.engine.interface import RequestFailedError
from ringserve.engine.schedule.block_pool import BlockPool
from ringserve.engine.schedule.chunk_budget import ChunkBudget
from ringserve.engine.schedule.prompt_queue import by_size
from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Finish, Plan, Scheduler
from ringserve.shm_transport.messages import AddRequest, Fork
from ringserve.shm_transport.records import FinishReason, Pooling

SIZE = 4


class FixedBudget(ChunkBudget):
    """As many prompt tokens as a test says, whatever the steps cost."""

    def __init__(self, alone: int = 1000, beside_decodes: int = 1000) -> None:
        super().__init__(alone)
        self.sizes = {False: alone, True: beside_decodes}

    def tokens(self, *, num_decodes: int, num_prompts: int) -> int:  # noqa: ARG002  # ChunkBudget's
        return self.sizes[num_decodes > 0]


def request(handle: int, prompt: int | list[int] = 4, **params: Any) -> Request:
    """Make a request; a number as prompt makes so many tokens that no other request has."""
    token_ids = [handle * 100 + n for n in range(prompt)] if isinstance(prompt, int) else prompt
    params = {"max_tokens": 8, **params}
    return Request(AddRequest(handle=handle, prompt_token_ids=np.array(token_ids, np.int32), **params), queued_ns=1)


def handles(requests: list[Request]) -> list[int]:
    return [one.handle for one in requests]


def chunks(plan: Plan) -> list[tuple[int, int]]:
    return [(chunk.request.handle, chunk.num_tokens) for chunk in plan.chunks]


def finish_step(scheduler: Scheduler, plan: Plan, token_id: int = 7) -> list[Finish]:
    """Give everyone who is due the same token."""
    finishes = scheduler.commit(plan, plan.sampled, [token_id] * len(plan.sampled))
    scheduler.settle(plan)
    return finishes


def step(scheduler: Scheduler, token_id: int = 7) -> Plan:
    plan = scheduler.schedule(0)
    finish_step(scheduler, plan, token_id)
    return plan


MakeScheduler = Callable[..., Scheduler]


@pytest.fixture
def make() -> MakeScheduler:
    """Build a scheduler: `num_blocks` to give out, budgets, limits."""

    def build(num_blocks: int = 100, budget: ChunkBudget | None = None, **limits: int) -> Scheduler:
        limits = {"max_num_seqs": 4, "max_num_waiting": 50, "max_model_len": 200, "vocab_size": 10_000, **limits}
        return Scheduler(pool=BlockPool(num_blocks + 1, SIZE), budget=budget or FixedBudget(), **limits)

    return build


def test_a_step_takes_decodes_first_then_new_prompts(make: MakeScheduler) -> None:
    scheduler = make()
    scheduler.add(request(1))
    plan = scheduler.schedule(now_ns=5)
    assert (handles(plan.decodes), chunks(plan)) == ([], [(1, 4)])
    finish_step(scheduler, plan)
    scheduler.add(request(2))
    plan = scheduler.schedule(now_ns=6)
    assert (handles(plan.decodes), chunks(plan)) == ([1], [(2, 4)])
    assert (handles(plan.sampled), plan.sampled_rows) == ([1, 2], [0, 4])
    assert [one.first_scheduled_ns for one in plan.sampled] == [5, 6]
    assert plan.decodes[0].token_ids_between(4, 5).tolist() == [7]


def test_a_long_prompt_goes_in_chunks_and_gets_its_token_after_the_last(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=10))
    scheduler.add(request(1, 25))
    plans = [step(scheduler) for _ in range(4)]
    assert [chunks(plan) for plan in plans] == [[(1, 10)], [(1, 10)], [(1, 5)], []]
    assert [handles(plan.sampled) for plan in plans] == [[], [], [1], [1]]


def test_the_budget_beside_decodes_is_one_of_its_own(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=100, beside_decodes=6))
    scheduler.add(request(1))
    step(scheduler)
    scheduler.add(request(2, 14))
    assert [chunks(step(scheduler)) for _ in range(3)] == [[(2, 6)], [(2, 6)], [(2, 2)]]


def test_what_a_last_chunk_leaves_of_the_budget_goes_to_the_next(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=10, beside_decodes=10))
    for handle, length in ((1, 6), (2, 7), (3, 8)):
        scheduler.add(request(handle, length))
    assert chunks(step(scheduler)) == [(1, 6), (2, 4)]
    assert chunks(step(scheduler)) == [(2, 3), (3, 7)]


def test_a_short_prompt_goes_before_long_ones_under_way_and_the_oldest_keeps_a_fourth(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=12, beside_decodes=12))
    for handle in (1, 2):
        scheduler.add(request(handle, 60))
    assert chunks(step(scheduler)) == [(1, 12)]
    scheduler.add(request(3, 5))
    scheduler.add(request(4, 20))
    assert chunks(step(scheduler)) == [(1, 3), (3, 5), (4, 4)]
    assert chunks(step(scheduler)) == [(1, 3), (4, 9)]
    assert chunks(step(scheduler)) == [(1, 5), (4, 7)]
    assert chunks(step(scheduler)) == [(1, 12)]


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_the_oldest_has_no_more_than_a_fourth_of_small_steps(make: MakeScheduler, budget: int) -> None:
    scheduler = make(budget=FixedBudget(alone=budget, beside_decodes=budget))
    scheduler.add(request(1, 100))
    step(scheduler)
    scheduler.add(request(2, 60, max_tokens=1))
    taken: Counter[int] = Counter()
    while scheduler.is_live(2):
        taken.update(dict(chunks(step(scheduler))))
    assert abs(taken[1] - taken[2] / 3) <= budget


def test_the_oldest_is_let_in_by_a_step_that_has_no_part_for_it(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=1))
    scheduler.add(request(1, 1, max_tokens=1))
    step(scheduler)  # whose one token was the oldest's part of the next three too
    passed = request(2, 5)
    passed.num_passed_tokens = 100  # so nobody may pass it any more
    scheduler.add(passed)
    assert chunks(step(scheduler)) == [(2, 1)]


@pytest.mark.parametrize("goes_first", [{"key_number": 1}, {"priority": -1}])
def test_a_prompt_without_room_is_passed_by_other_keys_and_priorities_with_one_seat_left(
    make: MakeScheduler, goes_first: dict[str, int]
) -> None:
    scheduler = make(num_blocks=20, max_num_seqs=2)
    scheduler.add(request(1, 40))
    step(scheduler)
    scheduler.add(request(2, 60, **goes_first))
    for handle in (3, 4):
        scheduler.add(request(handle, 32, max_tokens=1, key_number=2))
    assert chunks(step(scheduler)) == [(3, 32)]


def test_what_the_prefix_cache_has_of_a_prompt_counts_as_done(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=30, beside_decodes=8))
    scheduler.add(request(1, list(range(28)), max_tokens=1))
    step(scheduler)
    scheduler.add(request(2, 40))
    step(scheduler)
    scheduler.add(request(3, 7))
    scheduler.add(request(4, [*range(28), 99]))  # one left
    assert [handle for handle, _ in chunks(step(scheduler))] == [2, 4, 3]


def test_a_waiting_prompt_comes_up_sooner_once_another_has_computed_its_beginning(make: MakeScheduler) -> None:
    budget = FixedBudget(alone=21)
    scheduler = make(budget=budget)
    scheduler.add(request(1, [*range(20), 50], max_tokens=1, priority=-1))
    scheduler.add(request(2, 15))
    scheduler.add(request(3, [*range(20), 60]))
    assert chunks(step(scheduler)) == [(1, 21)]
    budget.sizes[False] = 8
    assert chunks(step(scheduler)) == [(2, 7), (3, 1)]


def test_the_key_with_the_fewest_tokens_waiting_goes_first_within_a_priority(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=8, beside_decodes=8), max_num_seqs=20)
    for handle in range(1, 10):
        scheduler.add(request(handle, 4, max_tokens=1, key_number=1))
    assert chunks(step(scheduler)) == [(1, 4), (2, 4)]
    scheduler.add(request(20, 14, max_tokens=1, key_number=2))
    scheduler.add(request(21, 2, max_tokens=1, key_number=2, priority=1))
    assert chunks(step(scheduler)) == [(3, 2), (20, 6)]
    scheduler.add(request(30, 3, max_tokens=1, key_number=3))
    assert chunks(step(scheduler)) == [(3, 2), (30, 3), (20, 3)]
    scheduler.add(request(40, 5, max_tokens=1, key_number=1, priority=-1))
    assert chunks(step(scheduler)) == [(40, 5), (20, 3)]


def test_the_prompts_of_one_call_count_together(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=8, beside_decodes=8), max_num_seqs=20)
    for handle in range(1, 10):
        scheduler.add(request(handle, 4, max_tokens=1, num_sibling_tokens=32))
    assert chunks(step(scheduler)) == [(1, 4), (2, 4)]
    scheduler.add(request(10, 6, max_tokens=1))
    assert chunks(step(scheduler)) == [(3, 2), (10, 6)]
    assert chunks(step(scheduler)) == [(3, 2), (4, 4), (5, 2)]


@pytest.mark.parametrize("wish", [{}, {"num_prompt_logprobs": 0}, {"pooling": Pooling.LAST}])
def test_few_prompts_are_under_way_and_short_ones_pass_them(wish: dict[str, Any], make: MakeScheduler) -> None:
    scheduler = make(num_blocks=400, budget=FixedBudget(alone=9, beside_decodes=9), max_num_seqs=20)
    most = 0
    for handle in range(1, 12):  # each shorter than what is left of those before
        scheduler.add(request(handle, 195 - 10 * handle, **wish))
        step(scheduler)
        most = max(most, sum(not one.is_decoding for one in scheduler._running))
    assert most == 4
    scheduler.add(request(20, 5))
    assert 20 in handles(step(scheduler).sampled)


def test_prompts_under_way_do_not_keep_a_long_one_of_a_lower_priority_number_from_beginning(
    make: MakeScheduler,
) -> None:
    scheduler = make(num_blocks=400, budget=FixedBudget(alone=9, beside_decodes=9), max_num_seqs=20)
    for handle in range(1, 8):
        scheduler.add(request(handle, 90 - 4 * handle))
        step(scheduler)
    scheduler.add(request(9, 90, priority=-1))
    assert chunks(step(scheduler)) == [(9, 9)]


def test_prompts_under_way_leave_half_of_the_cache_to_others(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=40, budget=FixedBudget(alone=8, beside_decodes=8))
    for handle, length in ((1, 72), (2, 56), (3, 52), (4, 7)):  # 18 blocks, 14, 13 and 2
        scheduler.add(request(handle, length))
        step(scheduler)
    assert handles(scheduler._running) == [1, 4]


def test_short_prompts_pass_one_that_has_no_room_for_three_times_its_length(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=12, budget=FixedBudget(alone=40, beside_decodes=40), max_num_seqs=9)
    scheduler.add(request(1, 8, max_tokens=40))
    step(scheduler)
    scheduler.add(request(2, 37))  # 10 blocks of 12
    passing = 0
    for handle in range(10, 40):
        scheduler.add(request(handle, 7, max_tokens=1))
        passing += handle in handles(step(scheduler).sampled)
    assert 3 * 37 <= 7 * passing < 3 * 37 + 7
    while scheduler.is_live(1):
        step(scheduler)
    assert 2 in [handle for handle, _ in chunks(step(scheduler))]


def test_in_a_long_queue_few_are_looked_up_in_a_step(make: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(max_num_waiting=2000, vocab_size=10**6, budget=FixedBudget(alone=4, beside_decodes=4))
    for handle in range(1000):
        scheduler.add(request(handle, 8, max_tokens=50))
    looked_up: list[int] = []
    find_prefix = scheduler._find_prefix
    monkeypatch.setattr(scheduler, "_find_prefix", lambda one: looked_up.append(one.handle) or find_prefix(one))
    step(scheduler)
    assert 0 < len(looked_up) <= 16 + 2 * 4
    for _ in range(80):
        step(scheduler)
    assert len(set(looked_up)) > 990  # all come up in turn


def test_of_a_prompt_whose_logprobs_are_wanted_a_step_takes_few_tokens(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.engine.schedule.prompt_queue._MAX_SCORED_TOKENS", 5)
    scheduler = make()
    scheduler.add(request(1, 12, num_prompt_logprobs=0))
    scheduler.add(request(2, 9))
    assert [chunks(step(scheduler)) for _ in range(3)] == [[(1, 5), (2, 9)], [(1, 5)], [(1, 2)]]


def test_all_prompts_whose_logprobs_are_wanted_share_those_few_tokens(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.engine.schedule.prompt_queue._MAX_SCORED_TOKENS", 5)
    scheduler = make(max_num_seqs=9)
    for handle, num_tokens in ((1, 3), (2, 7), (3, 4)):
        scheduler.add(request(handle, num_tokens, num_prompt_logprobs=0, max_tokens=1))
    scheduler.add(request(4, 9, priority=1))
    steps = [chunks(step(scheduler)) for _ in range(4)]
    assert steps == [[(1, 3), (3, 2), (4, 9)], [(2, 3), (3, 2)], [(2, 4)], []]
    assert scheduler.num_running == 1


def test_a_lower_priority_number_goes_first_and_equal_ones_by_arrival(make: MakeScheduler) -> None:
    scheduler = make(max_num_seqs=1)
    for handle, priority in ((1, 0), (2, 5), (3, -1), (4, 0)):
        scheduler.add(request(handle, priority=priority, max_tokens=1))
    assert [handles(step(scheduler).sampled) for _ in range(4)] == [[3], [1], [4], [2]]


def test_a_long_prompt_under_way_does_not_hold_up_one_of_a_lower_priority_number(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=10, beside_decodes=10))
    scheduler.add(request(1, 35, priority=1))
    assert chunks(step(scheduler)) == [(1, 10)]
    for handle, priority in ((2, 1), (3, 0), (4, -1)):
        scheduler.add(request(handle, 6, priority=priority))
    assert chunks(step(scheduler)) == [(4, 6), (3, 4)]
    scheduler.drop([4])
    assert chunks(step(scheduler)) == [(3, 2), (2, 6), (1, 2)]


def test_seats_are_given_in_order_and_again_once_free(make: MakeScheduler) -> None:
    scheduler = make(max_num_seqs=3)
    for handle in range(5):
        scheduler.add(request(handle))
    assert chunks(step(scheduler)) == [(0, 4), (1, 4), (2, 4)]
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)
    scheduler.drop([1])
    assert chunks(step(scheduler)) == [(3, 4)]


def test_a_request_holds_the_blocks_of_its_prompt_and_takes_more_as_it_grows(make: MakeScheduler) -> None:
    scheduler = make()
    scheduler.add(request(1, 7, max_tokens=20))
    step(scheduler)
    used = []
    for _ in range(6):
        step(scheduler)
        used.append(scheduler._pool.num_used)
    assert used == [2, 3, 3, 3, 3, 4]  # the tokens at 7, 8, ... 12


def test_a_dropped_request_that_waits_is_never_scheduled(make: MakeScheduler) -> None:
    scheduler = make()
    scheduler.add(request(1))
    scheduler.drop([1, 2, 3])
    assert scheduler.schedule(0).sampled == []
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_a_drop_frees_at_once(make: MakeScheduler) -> None:
    scheduler = make()
    scheduler.add(request(1, 30))
    step(scheduler)
    scheduler.drop([1])
    assert scheduler._pool.num_used == 0


def test_what_ends_loses_its_seat_with_its_token_and_its_blocks_when_the_step_is_settled(make: MakeScheduler) -> None:
    scheduler = make()
    scheduler.add(request(1, max_tokens=1))
    scheduler.add(request(2, max_tokens=2))
    plan = scheduler.schedule(0)
    finishes = scheduler.commit(plan, plan.sampled, [5, 5])
    assert finishes == [Finish(FinishReason.LENGTH), Finish(FinishReason.NONE)]
    assert (scheduler.num_running, scheduler._pool.num_used) == (1, 2)
    scheduler.settle(plan)
    assert scheduler._pool.num_used == 1


@pytest.mark.parametrize(
    ("params", "token_id", "finish"),
    [
        ({"eos_token_id": 9, "stop_token_ids": (9,), "max_tokens": 1}, 9, Finish(FinishReason.STOP)),
        ({"eos_token_id": 8, "stop_token_ids": (7, 9), "max_tokens": 1}, 9, Finish(FinishReason.STOP, 9)),
        ({"eos_token_id": -1, "max_tokens": 1}, 9, Finish(FinishReason.LENGTH)),
        ({"eos_token_id": -1, "max_tokens": 2}, 9, Finish(FinishReason.NONE)),
    ],
)
def test_eos_beats_a_stop_token_which_beats_the_length(
    params: dict[str, object], token_id: int, finish: Finish, make: MakeScheduler
) -> None:
    scheduler = make()
    scheduler.add(request(1, **params))
    assert finish_step(scheduler, scheduler.schedule(0), token_id) == [finish]


def test_a_prompt_one_short_of_the_context_gets_one_token(make: MakeScheduler) -> None:
    scheduler = make(max_model_len=50)
    scheduler.add(request(1, 49, max_tokens=99))
    assert finish_step(scheduler, scheduler.schedule(0)) == [Finish(FinishReason.LENGTH)]


def test_a_pool_smaller_than_the_context_ends_a_request_that_has_filled_it(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=3)  # 12 tokens
    scheduler.add(request(1, 9, max_tokens=99))
    plans = [scheduler.schedule(0)]
    while finish_step(scheduler, plans[-1]) == [Finish(FinishReason.NONE)]:
        plans.append(scheduler.schedule(0))
    assert len(plans) == 3
    assert scheduler._pool.num_used == 0


@pytest.mark.parametrize(
    ("one", "match"),
    [
        (request(1, 0), "the prompt is empty"),
        (request(1, 200), "200 tokens, max_model_len is 200"),
        (request(1, 80), "80 tokens, the KV cache holds 80"),
        (request(1, forks=(Fork(1, 5),)), "in use"),
        (request(1, forks=(Fork(9, 5),)), "in use"),
        (request(1, forks=(Fork(2, 1), Fork(3, 2), Fork(4, 3))), "1 requests wait, max_num_waiting is 4"),
        (request(1, max_tokens=0), "max_tokens is 0"),
        (request(1, frequency_penalty=float("nan")), "nan"),
    ],
)
def test_a_request_that_can_never_run_is_refused_and_leaves_nothing(
    one: Request, match: str, make: MakeScheduler
) -> None:
    scheduler = make(num_blocks=20, max_num_waiting=4)
    scheduler.add(request(9))
    with pytest.raises(RequestFailedError, match=match):
        scheduler.add(one)
    assert scheduler.num_waiting == 1
    assert handles(step(scheduler).sampled) == [9]


def test_a_prompt_that_was_computed_before_is_found_up_to_its_last_token(make: MakeScheduler) -> None:
    scheduler = make()
    for handle in (1, 2, 3):
        scheduler.add(request(handle, list(range(12)), max_tokens=1))
        step(scheduler)
    scheduler.add(request(4, list(range(13)), max_tokens=1))
    plan = scheduler.schedule(0)
    assert chunks(plan) == [(4, 1)]
    assert plan.sampled[0].num_cached_tokens == 12
    finish_step(scheduler, plan)
    counters = scheduler._pool.counters
    assert (counters.num_queried_tokens, counters.num_hit_tokens) == (3 * 12 + 13, 0 + 8 + 8 + 12)


def test_generated_tokens_are_found_too(make: MakeScheduler) -> None:
    scheduler = make()
    scheduler.add(request(1, [1, 2, 3], max_tokens=6))
    for _ in range(6):
        step(scheduler)
    scheduler.add(request(2, [1, 2, 3, 7, 7, 7, 7, 7, 50]))  # the last token that was sampled was never computed
    assert chunks(step(scheduler)) == [(2, 1)]


def test_only_what_has_been_computed_is_found(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=6, beside_decodes=100))
    scheduler.add(request(1, list(range(12))))
    step(scheduler)  # 6 tokens: one block and a half
    scheduler.add(request(2, list(range(12))))
    scheduler.drop([1])
    assert step(scheduler).chunks[0].request.num_cached_tokens == 4


@pytest.mark.parametrize("params", [{"cache_salt": "a"}, {"adapter": "a"}, {"num_prompt_logprobs": 0}])
def test_another_salt_or_adapter_or_a_wish_for_prompt_logprobs_finds_nothing(
    params: dict[str, Any], make: MakeScheduler
) -> None:
    scheduler = make()
    scheduler.add(request(1, list(range(12))))
    step(scheduler)
    other = request(2, list(range(12)), **params)
    other.adapter = 1 if "adapter" in params else 0  # as the core finds it by name
    scheduler.add(other)
    assert chunks(step(scheduler)) == [(2, 12)]


def test_admission_leaves_each_who_runs_a_block_to_grow_into(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=4)
    for handle in (1, 2, 3):
        scheduler.add(request(handle, 5, max_tokens=2))  # two blocks each
    assert chunks(step(scheduler)) == [(1, 5)]  # with 2 seated too, none would be left for 1
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_the_newest_loses_its_blocks_when_they_run_out_and_goes_on_from_the_cache_later(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=6)
    for handle in (1, 2):
        scheduler.add(request(handle, 7, max_tokens=20))
    _, second = step(scheduler).sampled
    while not scheduler.num_preemptions:
        plan = step(scheduler)
    assert handles(plan.decodes) == [1]
    assert (second.num_preemptions, second.block_ids) == (1, [])
    tokens = list(second.output_token_ids)
    assert scheduler.num_waiting == 1
    scheduler.add(request(3, 1))
    scheduler.drop([1])
    plan = step(scheduler)
    assert handles(plan.sampled) == [2, 3]  # it stands before those that came after it
    assert plan.chunks[0].num_tokens < 7 + len(tokens)  # not all again
    assert second.output_token_ids == [*tokens, 7]


def test_what_a_request_computed_before_it_was_preempted_does_not_count_as_found(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=9, budget=FixedBudget(alone=100, beside_decodes=2))
    scheduler.add(request(1, list(range(4)), max_tokens=1))
    step(scheduler)
    scheduler.add(request(2, 7, max_tokens=20))
    step(scheduler)
    scheduler.add(request(3, list(range(21))))
    while scheduler.num_preemptions == 0 and scheduler.is_live(2):
        step(scheduler)
    scheduler.drop([2])
    plan = step(scheduler)
    assert plan.chunks[0].num_tokens < 21 - 4
    assert [(one.handle, one.num_preemptions, one.num_cached_tokens) for one in plan.sampled] == [(3, 1, 4)]


def test_of_those_who_run_the_one_of_the_least_priority_is_preempted(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=6)
    for handle, priority in ((1, 3), (2, 0)):
        scheduler.add(request(handle, 7, max_tokens=20, priority=priority))
        step(scheduler)
    while not scheduler.num_preemptions:
        plan = step(scheduler)
    assert handles(plan.decodes) == [2]


def test_nobody_is_seated_in_the_step_that_preempts(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=6)
    for handle in (1, 2):
        scheduler.add(request(handle, 7, max_tokens=20))
    step(scheduler)
    scheduler.add(request(3, 1, priority=-1))
    scheduler._max_num_seqs = 2
    while not scheduler.num_preemptions:
        plan = step(scheduler)
    assert plan.chunks == []


FORKS = (Fork(11, 5), Fork(12, 6))


def test_forks_share_one_prefill_and_get_a_token_each_from_its_last_row(make: MakeScheduler) -> None:
    scheduler = make()
    scheduler.add(request(10, 6, seed=4, forks=FORKS))
    assert scheduler.num_waiting == 3
    plan = scheduler.schedule(0)
    assert chunks(plan) == [(10, 6)]
    assert (handles(plan.sampled), plan.sampled_rows) == ([10, 11, 12], [5, 5, 5])
    assert [one.seed for one in plan.sampled] == [4, 5, 6]
    finish_step(scheduler, plan)
    assert scheduler._pool.num_used == 2
    plan = step(scheduler)
    assert handles(plan.decodes) == [10, 11, 12]
    assert [len(plan.copies), scheduler._pool.num_used] == [
        2,
        4,
    ]  # the last one keeps the block that they had in common
    tables = [one.block_ids for one in plan.decodes]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert {source for source, _ in plan.copies} == {tables[2][1]}


def test_forks_tell_of_the_preemption_that_their_prompt_has_been_through(make: MakeScheduler) -> None:
    scheduler = make(num_blocks=8, budget=FixedBudget(alone=20, beside_decodes=2))
    scheduler.add(request(1, 7, max_tokens=20))
    step(scheduler)
    scheduler.add(request(10, 20, forks=FORKS))
    while not scheduler.num_preemptions:
        step(scheduler)
    scheduler.drop([1])
    plan = step(scheduler)
    assert [(one.handle, one.num_preemptions) for one in plan.sampled] == [(10, 1), (11, 1), (12, 1)]


def test_forks_of_a_prompt_of_whole_blocks_copy_nothing(make: MakeScheduler) -> None:
    scheduler = make()
    scheduler.add(request(10, 8, forks=FORKS))
    step(scheduler)
    plan = step(scheduler)
    assert plan.copies == []
    assert scheduler._pool.num_used == 2 + 3


def test_forks_without_a_seat_wait_and_find_their_prompt_computed(make: MakeScheduler) -> None:
    scheduler = make(max_num_seqs=2)
    scheduler.add(request(10, 9, max_tokens=2, forks=FORKS))
    scheduler.add(request(20, 3))
    assert handles(step(scheduler).sampled) == [10, 11]
    step(scheduler)
    plan = step(scheduler)
    assert chunks(plan) == [(12, 1), (20, 3)]


def test_a_request_with_forks_counts_all_their_seats_before_others_get_one(make: MakeScheduler) -> None:
    scheduler = make(max_num_seqs=3, budget=FixedBudget(alone=4, beside_decodes=4))
    scheduler.add(request(10, 2, forks=FORKS))
    scheduler.add(request(20, 2))
    assert chunks(step(scheduler)) == [(10, 2)]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("dropped", [[10], [11], [10, 11], [12, 10], [10, 11, 12]])
def test_each_fork_is_dropped_by_its_own_handle_at_any_time(
    num_steps: int, dropped: list[int], make: MakeScheduler
) -> None:
    scheduler = make(budget=FixedBudget(alone=4))  # two steps of prefill
    scheduler.add(request(10, 6, seed=4, forks=FORKS))
    for _ in range(num_steps):
        step(scheduler)
    scheduler.drop(dropped)
    left = sorted({10, 11, 12} - set(dropped))
    assert scheduler.num_waiting + scheduler.num_running == len(left)
    plans = [step(scheduler) for _ in range(3)]
    assert handles(plans[-1].sampled) == left
    assert [one.seed for one in plans[-1].sampled] == [handle - 6 for handle in left]
    scheduler.drop(left)
    assert scheduler._pool.num_used == 0


def test_a_step_that_failed_is_dropped_with_the_forks_that_waited_for_it(make: MakeScheduler) -> None:
    scheduler = make(budget=FixedBudget(alone=4))
    scheduler.add(request(10, 6, forks=FORKS))
    scheduler.add(request(20, 6))
    plan = scheduler.schedule(0)
    assert plan.handles() == [10, 11, 12]
    scheduler.drop(plan.handles())
    scheduler.settle(plan)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler._pool.num_used) == (0, 1, 0)


_BEGINNINGS = ([0, 1] * 15, [0, 1, 1] * 10, [1] * 30)


def _prompts() -> st.SearchStrategy[list[int]]:
    """Prompts that often begin alike, so that the cache is hit."""
    tails = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    starts = st.tuples(st.sampled_from(_BEGINNINGS), st.integers(0, 30))
    return st.builds(lambda start, tail: start[0][: start[1]] + tail, starts, tails)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests over a tiny pool, stepped with made-up tokens; what has been computed is tracked by block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=9, block_size=SIZE)
        self.budget = FixedBudget()
        self.scheduler = Scheduler(
            max_num_seqs=4, max_num_waiting=8, max_model_len=40, vocab_size=3, pool=self.pool, budget=self.budget
        )
        self.next_handle = 1
        self.live: set[int] = set()
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}  # block, offset -> all tokens up to there

    @rule(
        prompt=_prompts(),
        max_tokens=st.integers(1, 12),
        num_forks=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        salt=st.sampled_from(["", "", "a"]),
        key=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def add(self, prompt: list[int], max_tokens: int, num_forks: int, priority: int, salt: str, key: int) -> None:
        first, self.next_handle = self.next_handle, self.next_handle + num_forks + 1
        forks = tuple(Fork(first + n, n) for n in range(1, num_forks + 1))
        one = request(
            first, prompt, max_tokens=max_tokens, forks=forks, priority=priority, cache_salt=salt, key_number=key
        )
        num_waiting = self.scheduler.num_waiting
        try:
            self.scheduler.add(one)
        except RequestFailedError:
            assert num_waiting + num_forks + 1 > 8 or len(prompt) >= 32
        else:
            self.live |= {first, *(fork.handle for fork in forks)}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        dropped = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=3, unique=True))
        self.scheduler.drop([*dropped, 10**9])
        self.live -= set(dropped)

    @rule(alone=st.integers(1, 40), beside=st.integers(0, 20), tokens=st.lists(st.integers(0, 2), min_size=8))
    def step(self, alone: int, beside: int, tokens: list[int]) -> None:
        self.budget.sizes = {False: alone, True: beside}
        plan = self.scheduler.schedule(1)
        assert plan.sampled or plan.chunks or not self.live  # as long as anyone is there, something happens
        self.compute(plan)
        token_ids = [tokens[n % len(tokens)] for n in range(len(plan.sampled))]
        finishes = self.scheduler.commit(plan, plan.sampled, token_ids)
        for one, finish in zip(plan.sampled, finishes, strict=True):
            assert one.handle in self.live
            if finish.reason:
                self.live.remove(one.handle)
        self.scheduler.settle(plan)

    @rule(alone=st.integers(1, 40), failing=st.integers(0, 4))
    def step_that_fails(self, alone: int, failing: int) -> None:
        """All of it before a token is known, or a single row."""
        self.budget.sizes = {False: alone, True: alone}
        plan = self.scheduler.schedule(1)
        if failing >= len(plan.sampled):
            handles_ = plan.handles()
            assert len(set(handles_)) == len(handles_)
            self.scheduler.drop(handles_)
            self.live -= set(handles_)
        else:
            self.compute(plan)
            bad = plan.sampled[failing]
            self.scheduler.drop([bad.handle])
            self.live.remove(bad.handle)
            good = [one for one in plan.sampled if one is not bad]
            for one, finish in zip(good, self.scheduler.commit(plan, good, [2] * len(good)), strict=True):
                self.live -= {one.handle} if finish.reason else set()
        self.scheduler.settle(plan)

    def compute(self, plan: Plan) -> None:
        """Do what a forward does to the cache, and see that every row finds its own tokens there."""
        assert len(set(plan.sampled)) == len(plan.sampled) == len(plan.sampled_rows)
        destinations = [destination for _, destination in plan.copies]
        assert len(set(destinations)) == len(destinations)
        assert not set(destinations) & {source for source, _ in plan.copies}
        for source, destination in plan.copies:
            for offset in range(SIZE):
                self.cache[destination, offset] = self.cache.get((source, offset), ())
        spans = [(one, 1) for one in plan.decodes] + [(chunk.request, chunk.num_tokens) for chunk in plan.chunks]
        written: set[tuple[int, int]] = set()
        for one, count in spans:
            for index in range(one.num_computed_tokens, one.num_computed_tokens + count):
                slot = (one.block_ids[index // SIZE], index % SIZE)
                assert slot not in written
                written.add(slot)
                self.cache[slot] = self.content(one, index)
        for one, count in spans:
            for index in range(one.num_computed_tokens + count):
                assert self.cache[one.block_ids[index // SIZE], index % SIZE] == self.content(one, index)

    @staticmethod
    def content(one: Request, index: int) -> tuple[int, ...]:
        salt = -1 if one.params.cache_salt else -2
        return (salt, *one.token_ids_between(0, index + 1).tolist())

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        scheduler = self.scheduler
        waiting = [one for parent in scheduler._waiting for one in (parent, *parent.forks)]
        pending = [fork for one in scheduler._running for fork in one.forks]
        everyone = [one.handle for one in (*waiting, *scheduler._running, *pending)]
        assert sorted(everyone) == sorted(self.live) == sorted(scheduler._live)
        assert all(scheduler._live[one.handle] is one for one in (*waiting, *scheduler._running, *pending))
        assert scheduler._running == sorted(scheduler._running, key=lambda one: one.rank)
        assert list(scheduler._waiting) == sorted(scheduler._waiting, key=lambda one: one.rank)
        lines = scheduler._waiting._by_size
        assert all(line == sorted(line, key=by_size) for line in lines.values())
        assert sorted(handles(scheduler._waiting.order([], 99))) == sorted(one.handle for one in scheduler._waiting)
        num_tokens: Counter[int] = Counter()
        for one in scheduler._waiting:
            num_tokens[one.params.key_number] += one.num_tokens
        assert num_tokens == scheduler._waiting._num_tokens
        assert scheduler.num_running <= 4
        assert not any(one.block_ids for one in (*waiting, *pending))

    @invariant()
    def the_reference_counts_are_those_of_the_running(self) -> None:
        held = [block_id for one in self.scheduler._running for block_id in one.block_ids]
        free = [*self.pool._blank, *self.pool._cached]
        assert self.pool._ref_counts == [held.count(block_id) for block_id in range(9)]
        assert sorted({*held, *free}) == list(range(1, 9))
        assert not set(held) & set(free)
        assert all(len(set(one.block_ids)) == len(one.block_ids) for one in self.scheduler._running)

    def teardown(self) -> None:
        """Everyone that is left ends within bounded time, and every block is free again."""
        for _ in range(500):
            if self.live:
                self.step(alone=16, beside=16, tokens=[1])
        assert not self.live
        assert self.pool.num_used == 0


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
