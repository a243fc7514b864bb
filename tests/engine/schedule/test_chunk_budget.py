from ringserve.engine.schedule.chunk_budget import ChunkBudget

MS = 1_000_000


def learn(budget: ChunkBudget, *, decode_ms: float, token_ms: float, num_steps: int, chunk: int = 0) -> None:
    """Tell of steps with decodes, each with `chunk` prompt tokens."""
    for _ in range(num_steps):
        elapsed_ns = int((decode_ms + chunk * token_ms) * MS)
        budget.note(has_decodes=True, num_tokens=chunk, elapsed_ns=elapsed_ns)


def test_without_decodes_a_step_takes_all() -> None:
    assert ChunkBudget(512).tokens(has_decodes=False) == 512


def test_before_anything_is_known_a_step_takes_little() -> None:
    assert ChunkBudget(512).tokens(has_decodes=True) == 16
    assert ChunkBudget(5).tokens(has_decodes=True) == 5


def test_a_step_with_a_chunk_takes_nearly_twice_as_long_as_one_without() -> None:
    budget = ChunkBudget(512)
    learn(budget, decode_ms=60, token_ms=0.6, num_steps=10)
    learn(budget, decode_ms=60, token_ms=0.6, num_steps=10, chunk=64)
    assert 1.7 <= (60 + 0.6 * budget.tokens(has_decodes=True)) / 60 <= 1.9


def test_a_chunk_is_neither_smaller_than_16_tokens_nor_larger_than_the_limit() -> None:
    budget = ChunkBudget(512)
    learn(budget, decode_ms=1, token_ms=1, num_steps=10)
    learn(budget, decode_ms=1, token_ms=1, num_steps=10, chunk=16)
    assert budget.tokens(has_decodes=True) == 16
    learn(budget, decode_ms=5000, token_ms=1, num_steps=50)
    assert budget.tokens(has_decodes=True) == 512


def test_the_cost_of_a_prompt_alone_is_learned_too() -> None:
    budget = ChunkBudget(512)
    budget.note(has_decodes=False, num_tokens=500, elapsed_ns=250 * MS)
    learn(budget, decode_ms=50, token_ms=0, num_steps=1)
    assert 75 <= budget.tokens(has_decodes=True) <= 85


def test_decodes_whose_cost_has_not_been_seen_alone_for_long_are_measured_again() -> None:
    budget = ChunkBudget(512)
    learn(budget, decode_ms=20, token_ms=0.5, num_steps=3)
    learn(budget, decode_ms=20, token_ms=0.5, num_steps=10, chunk=40)
    num_steps = 0
    while budget.tokens(has_decodes=True):  # the decodes are five times as many now
        learn(budget, decode_ms=100, token_ms=0.5, num_steps=1, chunk=budget.tokens(has_decodes=True))
        num_steps += 1
    assert num_steps < 32
    learn(budget, decode_ms=100, token_ms=0.5, num_steps=1)
    for _ in range(20):
        learn(budget, decode_ms=100, token_ms=0.5, num_steps=1, chunk=budget.tokens(has_decodes=True))
    assert 1.7 <= (100 + 0.5 * budget.tokens(has_decodes=True)) / 100 <= 1.9
