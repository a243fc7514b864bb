"""Who waits how long, on a virtual clock: scheduler and budget drive steps whose costs are made up."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.engine.schedule.block_pool import BlockPool
from ringserve.engine.schedule.chunk_budget import ChunkBudget
from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Scheduler
from ringserve.shm_transport.messages import AddRequest
from ringserve.shm_transport.records import Pooling

TOKEN_NS, DECODE_NS, ROW_NS = 2_000_000, 15_000_000, 4_000_000  # of a prompt token; of a step that decodes, and a row
SPEED = 1e9 / TOKEN_NS  # prompt tokens a second
KNOBS = [(0.02, 0.0), (0.25, 0.5), (0.25, 0.9), (1.0, 0.25), (5.0, 0.0)]  # target_gap_s, min_prefill_share


@dataclass
class Arrival:
    """One prompt."""

    at_ns: int
    num_tokens: int
    max_tokens: int = 1
    wishes: dict[str, Any] = field(default_factory=dict)  # further parameters
    num_ahead: int = 0  # tokens of prompts that were not computed when it came
    first_ns: int = 0  # when its first token was there


@dataclass
class Clock:
    """Runs steps; time passes by their costs alone."""

    target_gap_s: float = 0.25
    min_prefill_share: float = 0.5
    now_ns: int = 0
    steps_ns: list[int] = field(default_factory=lambda: [0])
    num_step_tokens: int = 0  # of the last step
    most_under_way: int = 0

    def __post_init__(self) -> None:
        self.budget = ChunkBudget(512, target_gap_s=self.target_gap_s, min_prefill_share=self.min_prefill_share)
        self.scheduler = Scheduler(
            max_num_seqs=64, max_num_waiting=4096, max_model_len=8192, vocab_size=2**31 - 1,
            pool=BlockPool(4000, 32), budget=self.budget,
        )  # fmt: skip
        self.arrivals: dict[int, Arrival] = {}
        self.left: dict[int, Request] = {}

    def run(self, arrivals: list[Arrival]) -> None:
        """Run until every prompt is computed."""
        coming = deque(sorted(arrivals, key=lambda one: one.at_ns))
        while coming or self.left:
            if not self.left and not self.scheduler.num_running:
                self.now_ns = max(self.now_ns, coming[0].at_ns)
            while coming and coming[0].at_ns <= self.now_ns:
                self.add(coming.popleft())
            self.step()

    def add(self, arrival: Arrival) -> None:
        """Queue a prompt that came while the last step ran, whose tokens were ahead of it too."""
        handle = len(self.arrivals) + 1
        token_ids = np.arange(handle * 10_000, handle * 10_000 + arrival.num_tokens, dtype=np.int32)
        params = {"max_tokens": arrival.max_tokens, **arrival.wishes}
        request = Request(AddRequest(handle=handle, prompt_token_ids=token_ids, **params), queued_ns=0)
        arrival.num_ahead = sum(one.num_tokens_left for one in self.left.values())
        if arrival.at_ns > self.now_ns - self.steps_ns[-1]:
            arrival.num_ahead += self.num_step_tokens
        self.arrivals[handle], self.left[handle] = arrival, request
        self.scheduler.add(request)

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now_ns)
        elapsed_ns = TOKEN_NS * plan.num_chunk_tokens + bool(plan.decodes) * DECODE_NS + ROW_NS * len(plan.decodes)
        self.now_ns += elapsed_ns
        self.num_step_tokens = plan.num_chunk_tokens
        self.steps_ns.append(elapsed_ns)
        for chunk in plan.chunks:
            if chunk.is_last:
                del self.left[chunk.request.handle]
                self.arrivals[chunk.request.handle].first_ns = self.now_ns
        self.scheduler.commit(plan, plan.sampled, [7] * len(plan.sampled))
        self.scheduler.settle(plan)
        self.budget.note(num_decodes=len(plan.decodes), num_tokens=plan.num_chunk_tokens, elapsed_ns=elapsed_ns)
        under_way = [one for one in self.scheduler._running if not one.is_decoding]
        self.most_under_way = max(self.most_under_way, len(under_way))


def short_prompts(load: float, seconds: float, seed: int, most: int = 100) -> list[Arrival]:
    """Return short prompts that come at random and ask for `load` of the prefill speed."""
    draws, arrivals, at_s = random.Random(seed), [], 0.0
    while at_s < seconds:
        num_tokens = draws.randint(10, most)
        arrivals.append(Arrival(int(at_s * 1e9), num_tokens))
        at_s += draws.expovariate(load * SPEED / ((10 + most) / 2))
    return arrivals


def is_late(arrival: Arrival, clock: Clock) -> bool:
    """Whether a prompt took more than five times what its tokens and those ahead of it take, and one step."""
    work_ns = TOKEN_NS * (arrival.num_tokens + arrival.num_ahead)
    return arrival.first_ns - arrival.at_ns > 5 * work_ns + max(clock.steps_ns)


@pytest.mark.parametrize(("target_gap_s", "min_prefill_share"), KNOBS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_prompt_keeps_a_fourth_of_the_speed_at_any_load_of_short_ones(
    seed: int, target_gap_s: float, min_prefill_share: float
) -> None:
    clock, long = Clock(target_gap_s, min_prefill_share), Arrival(2 * 10**9, 6000)
    clock.run([*short_prompts(0.9, 60.0, seed), long])
    speed = 6000 / ((long.first_ns - long.at_ns) / 1e9)
    assert speed >= SPEED / 4 * 0.97  # it waits for the step under way at its arrival


@pytest.mark.parametrize(("target_gap_s", "min_prefill_share"), KNOBS)
@pytest.mark.parametrize("load", [0.5, 0.9, 1.3])
def test_nobody_waits_five_times_as_long_as_those_ahead_take(
    load: float, target_gap_s: float, min_prefill_share: float
) -> None:
    clock, draws = Clock(target_gap_s, min_prefill_share), random.Random(4)
    longs = [Arrival(draws.randrange(20 * 10**9), draws.randint(500, 6000)) for _ in range(3)]
    arrivals = [*short_prompts(load, 20.0, 5), *longs]
    clock.run(arrivals)
    assert not [one for one in arrivals if is_late(one, clock)]
    assert clock.most_under_way <= 5


@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(1, 4000)), min_size=1, max_size=40),
    st.sampled_from(KNOBS),
)
@settings(max_examples=60, deadline=None)
def test_nobody_starves_however_prompts_come(prompts: list[tuple[int, int]], knobs: tuple[float, float]) -> None:
    arrivals = [Arrival(at_ns, num_tokens) for at_ns, num_tokens in prompts]
    clock = Clock(*knobs)
    clock.run(arrivals)
    assert not [one for one in arrivals if is_late(one, clock)]


@pytest.mark.parametrize("num_streams", [0, 1, 8])
@pytest.mark.parametrize("num_long", [4, 16])
def test_a_short_prompt_is_not_held_up_by_long_ones(num_long: int, num_streams: int) -> None:
    clock = Clock()
    streams = [Arrival(0, 10, max_tokens=4000) for _ in range(num_streams)]
    longs = [Arrival(5 * 10**9, 2000) for _ in range(num_long)]
    shorts = [Arrival(int((5.3 + 0.45 * n) * 1e9), 40) for n in range(15)]
    clock.run([*streams, *longs, *shorts])
    assert max(one.first_ns - one.at_ns for one in shorts) <= 0.75e9
    assert [one.first_ns for one in longs] == sorted(one.first_ns for one in longs)  # each done before the next


@pytest.mark.parametrize(
    "others",
    [
        [Arrival(0, 12, wishes={"pooling": Pooling.LAST, "num_sibling_tokens": 2047 * 12}) for _ in range(2048)],
        [Arrival(0, 500, wishes={"pooling": Pooling.MEAN, "num_sibling_tokens": 39 * 500}) for _ in range(40)],
        [Arrival(0, 3000, wishes={"num_prompt_logprobs": 5})],
        [Arrival(0, 20, wishes={"num_sibling_tokens": 127 * 20}) for _ in range(128)],
        [Arrival(n * 10**8, 30, wishes={"key_number": 1}) for n in range(300)],
        [Arrival(0, 2000, wishes={"key_number": 1}) for _ in range(16)],
    ],
    ids=["2048 embeddings", "40 long embeddings", "a scored prompt", "128 completions", "a key's many", "a key's long"],
)
def test_a_chat_is_not_held_up_by_calls_with_many_prompts_nor_by_another_key(others: list[Arrival]) -> None:
    clock, key_number = Clock(), 2 * others[0].wishes.get("key_number", 0)
    chats = [Arrival(int((1.05 + 0.4 * n) * 1e9), 40, wishes={"key_number": key_number}) for n in range(10)]
    clock.run([*others, *chats])
    assert max(one.first_ns - one.at_ns for one in chats) <= 0.55e9
    assert not [one for one in others if is_late(one, clock)]


def test_many_short_prompts_at_once_take_a_few_middle_sized_steps() -> None:
    clock = Clock()
    chats = [Arrival(10**9, 30, max_tokens=50) for _ in range(32)]
    clock.run(chats)
    times_s = sorted((one.first_ns - one.at_ns) / 1e9 for one in chats)
    assert len(clock.steps_ns) <= 15
    assert times_s[16] <= 0.7 * 32 * 30 / SPEED
    assert times_s[-1] <= 1.7 * 32 * 30 / SPEED  # with the tokens that those who are done get meanwhile


def test_beside_a_stream_prompts_have_half_of_the_speed_and_the_stream_has_a_bounded_gap() -> None:
    clock = Clock()
    stream, long = Arrival(0, 10, max_tokens=4000), Arrival(2 * 10**9, 2000)
    clock.run([stream, long])
    assert 2000 / ((long.first_ns - long.at_ns) / 1e9) >= 0.5 * SPEED
    assert max(clock.steps_ns[5:]) <= DECODE_NS + ROW_NS + 32 * TOKEN_NS
