"""lm-eval's loglikelihood scoring through /v1/completions gives the numbers of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL

TOLERANCE = 2e-3  # of a sum over some tens of tokens, fp32 in both
PAIRS = [
    ("The capital of France is", " Paris, a city on the Seine."),
    ("The capital of France is", " a dog."),
    ("Once upon a time", " there was a naïve 日本 fox 🦊 that could not be tokenized in one piece"),
    ("def add(a, b):\n    return", " a + b\n"),
    ("x", " y"),
]


class Reference:
    """transformers' log-softmax in fp32."""

    def __init__(self, directory: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, token_ids: list[int]) -> Any:
        """Return [len(token_ids) - 1, vocabulary]: row i is the distribution of token i + 1."""
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        rows = self.logprobs(context + continuation)[len(context) - 1 :]
        chosen = rows[range(len(continuation)), continuation]
        return float(chosen.sum()), bool((rows.argmax(-1) == self._torch.tensor(continuation)).all())


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> Reference:
    return Reference(model_directory)


@pytest.fixture(scope="module")
def encoded(reference: Reference) -> list[tuple[list[int], list[int]]]:
    """The pairs as lm-eval encodes them: the continuation is what the whole has after the context."""
    pairs = []
    for context, continuation in PAIRS:
        whole = reference.tokenizer(context + continuation)["input_ids"]
        ids = reference.tokenizer(context)["input_ids"]
        pairs.append((ids, whole[len(ids) :]))
    return pairs


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_its_request_scores_as_transformers_does(server, reference: Reference, encoded, max_tokens: int) -> None:
    """All prompts in one request, as token ids, with one more token that is dropped again, or none."""
    body = server.complete(
        model=MODEL, prompt=[context + continuation for context, continuation in encoded],
        temperature=0, max_tokens=max_tokens, logprobs=1, seed=1234, echo=True,
    )  # fmt: skip
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(encoded)
    for choice, (context, continuation) in zip(choices, encoded, strict=True):
        logprobs = choice["logprobs"]
        end = len(context) + len(continuation)
        assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == end + max_tokens
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        values = logprobs["token_logprobs"][len(context) : end]
        tops = logprobs["top_logprobs"][len(context) : end]
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        expected, is_expected_greedy = reference.score(context, continuation)
        assert sum(values) == pytest.approx(expected, abs=TOLERANCE)
        assert is_greedy == is_expected_greedy


def test_every_position_of_a_prompt_has_the_logprob_of_transformers(server, reference: Reference) -> None:
    ids = reference.tokenizer("Shared memory is faster than a socket, because nothing is copied twice. " * 12)[
        "input_ids"
    ]
    body = server.complete(model=MODEL, prompt=[ids], temperature=0, max_tokens=0, logprobs=1, echo=True)
    values = body["choices"][0]["logprobs"]["token_logprobs"]
    rows = reference.logprobs(ids)
    assert len(values) == len(ids) > 100
    assert values[1:] == pytest.approx(rows[range(len(ids) - 1), ids[1:]].tolist(), abs=TOLERANCE)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 0)


@pytest.mark.filterwarnings("ignore")  # lm-eval's own
@pytest.mark.parametrize("num_concurrent", [1, 4])
def test_lm_eval_itself_scores_as_transformers_does(
    server, reference: Reference, encoded, model_directory: Path, num_concurrent: int
) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance

    model = completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model=MODEL, tokenizer_backend="huggingface",
        tokenizer=str(model_directory), num_concurrent=num_concurrent, batch_size=2, max_retries=1,
    )  # fmt: skip
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    asyncio.set_event_loop(loop := asyncio.new_event_loop())  # it runs its requests in the current one
    try:
        scores = model.loglikelihood(requests, disable_tqdm=True)
        (text,) = model.generate_until(
            [Instance("generate_until", {}, ("One, two, three,", {"until": ["six"], "max_gen_toks": 9}), 0)],
            disable_tqdm=True,
        )
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    for (value, is_greedy), (context, continuation) in zip(scores, encoded, strict=True):
        expected, is_expected_greedy = reference.score(context, continuation)
        assert value == pytest.approx(expected, abs=TOLERANCE)
        assert is_greedy == is_expected_greedy
    assert "four" in text
    assert "six" not in text
