import pytest

from ringserve.engine.schedule.chunk_budget import ChunkBudget

MS = 1_000_000


def learn(
    budget: ChunkBudget, *, decode_ms: float, token_ms: float, num_steps: int, chunk: int = 0, num_decodes: int = 1
) -> None:
    """Tell of steps with decodes, each with `chunk` prompt tokens."""
    for _ in range(num_steps):
        elapsed_ns = int((decode_ms + chunk * token_ms) * MS)
        budget.note(num_decodes=num_decodes, num_tokens=chunk, elapsed_ns=elapsed_ns)


def taught(*, decode_ms: float = 60, token_ms: float = 0.6, num_decodes: int = 1, **goals: float) -> ChunkBudget:
    """Return a budget that knows what decodes and prompt tokens cost."""
    budget = ChunkBudget(512, **goals)
    learn(budget, decode_ms=decode_ms, token_ms=token_ms, num_steps=10, num_decodes=num_decodes)
    learn(budget, decode_ms=decode_ms, token_ms=token_ms, num_steps=10, chunk=64, num_decodes=num_decodes)
    return budget


def test_before_anything_is_known_a_step_takes_little() -> None:
    assert ChunkBudget(512).tokens(num_decodes=1, num_prompts=1) == 32
    assert ChunkBudget(5).tokens(num_decodes=1, num_prompts=1) == 5
    assert ChunkBudget(512).tokens(num_decodes=0, num_prompts=1) == 128


def test_without_decodes_a_step_takes_as_long_as_the_target() -> None:
    budget = ChunkBudget(512, target_gap_s=0.2)
    budget.note(num_decodes=0, num_tokens=128, elapsed_ns=256 * MS)
    assert 97 <= budget.tokens(num_decodes=0, num_prompts=1) <= 100
    for _ in range(20):
        budget.note(num_decodes=0, num_tokens=500, elapsed_ns=5 * MS)
    assert budget.tokens(num_decodes=0, num_prompts=1) == 512


def test_one_prompt_beside_one_stream_gets_half_of_a_step() -> None:
    step_ms = 60 + 0.6 * taught().tokens(num_decodes=1, num_prompts=1)
    assert 118 <= step_ms <= 121


@pytest.mark.parametrize(
    ("num_decodes", "num_prompts", "ratio"), [(1, 2, 3), (1, 3, 4), (4, 6, 4), (16, 8, 3), (8, 1, 2)]
)
def test_a_step_is_shared_by_how_many_wait_but_prompts_have_their_least_part(
    num_decodes: int, num_prompts: int, ratio: float
) -> None:
    budget = taught(num_decodes=num_decodes, target_gap_s=1.0)
    step_ms = 60 + 0.6 * budget.tokens(num_decodes=num_decodes, num_prompts=num_prompts)
    assert step_ms == pytest.approx(60 * ratio, rel=0.03)


@pytest.mark.parametrize(("target_gap_s", "step_ms"), [(0.5, 367), (0.2, 200), (0.15, 150), (0.1, 120), (0.01, 120)])
def test_no_step_is_longer_than_the_target_unless_prompts_would_get_less_than_their_least_part(
    target_gap_s: float, step_ms: float
) -> None:
    budget = taught(target_gap_s=target_gap_s)
    planned_ms = 60 + 0.6 * budget.tokens(num_decodes=1, num_prompts=100)
    assert planned_ms == pytest.approx(step_ms, rel=0.03)


@pytest.mark.parametrize(("share", "step_ms"), [(0.0, 61), (0.25, 80), (0.5, 120), (0.75, 240)])
def test_the_least_part_of_prompts_is_what_the_operator_says(share: float, step_ms: float) -> None:
    budget = taught(target_gap_s=0.001, min_prefill_share=share)
    assert 60 + 0.6 * budget.tokens(num_decodes=1, num_prompts=1) == pytest.approx(step_ms, rel=0.03)


def test_a_chunk_is_neither_too_small_to_be_efficient_nor_larger_than_the_limit() -> None:
    assert taught(decode_ms=1, token_ms=1).tokens(num_decodes=1, num_prompts=1) == 32
    assert taught(token_ms=9).tokens(num_decodes=0, num_prompts=1) == 96
    assert taught(decode_ms=5000, token_ms=1).tokens(num_decodes=1, num_prompts=9) == 512


def test_each_number_of_decodes_has_a_time_of_its_own() -> None:
    budget = taught(decode_ms=20, num_decodes=1)
    learn(budget, decode_ms=90, token_ms=0.6, num_steps=10, num_decodes=8)
    assert 30 <= budget.tokens(num_decodes=1, num_prompts=1) <= 35
    assert 145 <= budget.tokens(num_decodes=8, num_prompts=1) <= 152
    assert 145 <= budget.tokens(num_decodes=12, num_prompts=1) <= 152  # to the next power of two
    assert 290 <= budget.tokens(num_decodes=60, num_prompts=1) <= 304  # judged by the nearest that is known


def test_decodes_whose_cost_has_not_been_seen_alone_for_long_are_measured_again() -> None:
    budget = ChunkBudget(512)
    learn(budget, decode_ms=20, token_ms=0.5, num_steps=3)
    learn(budget, decode_ms=20, token_ms=0.5, num_steps=10, chunk=40)
    num_steps = 0
    while chunk := budget.tokens(num_decodes=1, num_prompts=1):  # the context is long now
        learn(budget, decode_ms=100, token_ms=0.5, num_steps=1, chunk=chunk)
        num_steps += 1
    assert num_steps < 32
    learn(budget, decode_ms=100, token_ms=0.5, num_steps=1)
    for _ in range(20):
        learn(budget, decode_ms=100, token_ms=0.5, num_steps=1, chunk=budget.tokens(num_decodes=1, num_prompts=1))
    assert 1.9 <= (100 + 0.5 * budget.tokens(num_decodes=1, num_prompts=1)) / 100 <= 2.1
