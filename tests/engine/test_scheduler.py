import numpy as np
import pytest

from engine.interface import RequestFailedError
from engine.request import Request
from engine.scheduler import Finish, Scheduler
from engine.slot_pool import SlotPool
from shm_transport.messages import AddRequest
from shm_transport.records import FinishReason


def _request(handle: int, num_prompt_tokens: int = 4, **params: object) -> Request:
    settings = {"max_tokens": 8, **params}
    prompt = np.ones(num_prompt_tokens, np.int32)
    return Request(AddRequest(handle=handle, prompt_token_ids=prompt, **settings), queued_ns=1)  # type: ignore[arg-type]


def _handles(requests: list[Request]) -> list[int]:
    return [request.handle for request in requests]


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(1000)


@pytest.fixture
def scheduler(pool: SlotPool) -> Scheduler:
    return Scheduler(max_num_seqs=3, max_num_batched_tokens=10, max_model_len=50, vocab_size=100, pool=pool)


def test_a_step_mixes_decodes_and_new_prompts(scheduler: Scheduler) -> None:
    scheduler.add(_request(1))
    plan = scheduler.schedule(now_ns=5)
    assert (_handles(plan.decodes), _handles(plan.prefills)) == ([], [1])
    scheduler.commit(plan.requests, [7])
    scheduler.add(_request(2))
    plan = scheduler.schedule(now_ns=6)
    assert (_handles(plan.decodes), _handles(plan.prefills)) == ([1], [2])
    assert [request.first_scheduled_ns for request in plan.requests] == [5, 6]
    assert plan.decodes[0].pending_token_ids().tolist() == [7]
    assert plan.prefills[0].pending_token_ids().tolist() == [1, 1, 1, 1]


def test_the_budget_bounds_the_prompts_of_one_step_and_keeps_their_order(scheduler: Scheduler) -> None:
    for handle, length in ((1, 6), (2, 6), (3, 4)):
        scheduler.add(_request(handle, length))
    assert _handles(scheduler.schedule(0).prefills) == [1]  # 3 would fit, but nobody overtakes
    assert _handles(scheduler.schedule(0).prefills) == [2, 3]


def test_a_prompt_above_the_budget_goes_alone(scheduler: Scheduler) -> None:
    scheduler.add(_request(1, 40))
    scheduler.add(_request(2, 1))
    assert _handles(scheduler.schedule(0).prefills) == [1]
    assert _handles(scheduler.schedule(0).prefills) == [2]


def test_seats_are_given_in_order_and_again_once_free(scheduler: Scheduler, pool: SlotPool) -> None:
    for handle in range(5):
        scheduler.add(_request(handle, 1))
    plan = scheduler.schedule(0)
    assert _handles(plan.prefills) == [0, 1, 2]
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)
    scheduler.drop([1])
    assert pool.num_used == 18
    assert _handles(scheduler.schedule(0).prefills) == [3]


def test_a_dropped_request_that_waits_is_never_scheduled(scheduler: Scheduler) -> None:
    scheduler.add(_request(1))
    scheduler.drop([1, 2, 3])
    assert scheduler.schedule(0).requests == []


def test_what_ends_is_freed_at_once(scheduler: Scheduler, pool: SlotPool) -> None:
    scheduler.add(_request(1, max_tokens=1))
    scheduler.add(_request(2, max_tokens=2))
    plan = scheduler.schedule(0)
    finishes = scheduler.commit(plan.requests, [5, 5])
    assert finishes == [Finish(FinishReason.LENGTH), Finish(FinishReason.NONE)]
    assert (scheduler.num_running, pool.num_used) == (1, 6)


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
    params: dict[str, object], token_id: int, finish: Finish, scheduler: Scheduler
) -> None:
    scheduler.add(_request(1, **params))
    assert scheduler.commit(scheduler.schedule(0).requests, [token_id]) == [finish]


def test_a_prompt_one_short_of_the_context_gets_one_token(scheduler: Scheduler) -> None:
    scheduler.add(_request(1, 49, max_tokens=99))
    assert scheduler.commit(scheduler.schedule(0).requests, [5]) == [Finish(FinishReason.LENGTH)]


@pytest.mark.parametrize("length", [0, 50, 51])
def test_a_prompt_that_leaves_no_room_or_is_empty_is_refused(length: int, scheduler: Scheduler) -> None:
    with pytest.raises(RequestFailedError):
        scheduler.add(_request(1, length))
    assert scheduler.num_waiting == 0
