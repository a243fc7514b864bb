"""Random traffic over a pool that is far too small: everyone is answered once, rightly, and nothing is left behind."""

import gc
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ringserve.engine.config import EngineConfig
from ringserve.engine.interface import RequestFailedError
from ringserve.shm_transport.messages import AddRequest, Fork
from ringserve.shm_transport.records import FinishReason

Expect = Callable[[list[int], int], list[int]]


@dataclass
class Sent:
    """A sequence that has not ended."""

    prompt: list[int]
    params: dict[str, Any]
    tokens: list[int] = field(default_factory=list)


class Traffic:
    """Sends requests to an engine, aborts some, and checks each sequence when it ends, then forgets it.

    Args:
        core: The engine.
        rng: What decides.
        vocab_size: Of prompts; small, so that stop tokens come up.
        expect: What a greedy request gets.
    """

    def __init__(self, core: Any, rng: random.Random, vocab_size: int, expect: Expect) -> None:
        self.core = core
        self.num_sent = self.num_answered = self.num_checked = self.num_refused = 0
        self.live: dict[int, Sent] = {}
        self._rng = rng
        self._vocab_size = vocab_size
        self._expect = expect
        self._beginnings = [self._draw_tokens(24) for _ in range(6)]

    def run(self, num_sequences: int) -> None:
        """Send so many sequences, and step until all have ended."""
        goal = self.num_sent + num_sequences
        while self.num_sent < goal or self.core.has_work:
            if self.num_sent < goal and len(self.live) < 20 and self._rng.random() < 0.6:
                self._send()
            if self.live and self._rng.random() < 0.08:
                self._abort()
            if self.core.has_work:
                self._step()
        assert not self.live
        assert self.num_answered == self.num_sent

    def _send(self) -> None:
        rng = self._rng
        handles = [self.num_sent + n for n in range(rng.choice([1, 1, 1, 2, 4]))]
        self.num_sent += len(handles)
        prompt = self._draw_tokens(rng.randint(1, 30))
        if rng.random() < 0.5:
            beginning = rng.choice(self._beginnings)
            prompt = beginning[: rng.randint(1, 24)] + prompt[:10]
        params = {
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0.0, 0.0, 0.0, 1.0]),
            "stop_token_ids": tuple(self._draw_tokens(2)) if rng.random() < 0.4 else (),
            "priority": rng.choice([0, 0, 0, 0, 1, -1]),
            "cache_salt": rng.choice(["", "", "", "somebody"]),
        }
        add = AddRequest(
            handle=handles[0], prompt_token_ids=np.array(prompt, np.int32), **params,
            forks=tuple(Fork(handle, handle) for handle in handles[1:]),
        )  # fmt: skip
        try:
            self.core.add(add)
        except RequestFailedError as refused:
            assert "requests wait" in str(refused)  # noqa: PT017
            self.num_answered += len(handles)
            self.num_refused += len(handles)
        else:
            self.live |= {handle: Sent(prompt, params) for handle in handles}

    def _abort(self) -> None:
        handles = self._rng.sample(sorted(self.live), min(self._rng.randint(1, 3), len(self.live)))
        self.core.abort(handles)
        for handle in handles:
            del self.live[handle]  # a row that still comes for it would be a KeyError
            self.num_answered += 1

    def _step(self) -> None:
        step = self.core.step()
        assert self.core.take_failures() == []
        self.core.after_step()
        reasons = [0] * len(step.handles) if step.finish_reasons is None else step.finish_reasons.tolist()
        for handle, token_id, reason in zip(step.handles.tolist(), step.token_ids.tolist(), reasons, strict=True):
            sent = self.live[handle]
            sent.tokens.append(token_id)
            if reason:
                self._check_end(self.live.pop(handle), FinishReason(reason))

    def _check_end(self, sent: Sent, reason: FinishReason) -> None:
        self.num_answered += 1
        is_stop = sent.tokens[-1] in sent.params["stop_token_ids"]
        assert reason == (FinishReason.STOP if is_stop else FinishReason.LENGTH)
        assert is_stop or len(sent.tokens) == sent.params["max_tokens"]
        if sent.params["temperature"] == 0.0:
            self.num_checked += 1
            assert sent.tokens == self._expect(sent.prompt, sent.params["max_tokens"])[: len(sent.tokens)]

    def _draw_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]


def soak(traffic: Traffic, num_sequences: int) -> None:
    """Run the traffic and check that it used what it was to test, and that nothing is left of it."""
    core = traffic.core
    traffic.run(num_sequences // 4)
    gc.collect()
    before = sys.getallocatedblocks()
    traffic.run(num_sequences - num_sequences // 4)
    gc.collect()
    grown = sys.getallocatedblocks() - before
    stats, figures = core.stats(), core.idle_step()
    ends = f"{traffic.num_refused} refused, {traffic.num_checked} checked"
    print(f"{figures.num_preemptions} preemptions, {stats}, {ends}, {grown} objects more")
    assert core._pool.num_used == 0
    assert (figures.num_running, figures.num_waiting) == (0, 0)
    assert grown < 2000 + num_sequences // 50  # three times as many requests have come since: far less than one each
    assert traffic.num_checked > num_sequences // 5 > traffic.num_refused
    assert min(figures.num_preemptions, stats["num_hit_tokens"], stats["num_evictions"]) > num_sequences // 50


@pytest.mark.parametrize(
    "num_sequences", [1500, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_random_requests_over_a_tiny_pool(
    num_sequences: int, make_driver: Any, make_hashing_runner: Any, hashed_tokens: Expect
) -> None:
    config = EngineConfig(model="none", max_num_seqs=8, max_num_waiting=21, max_num_batched_tokens=24)
    core = make_driver(config, make_hashing_runner(num_blocks=24)).core
    soak(Traffic(core, random.Random(1), 32, hashed_tokens), num_sequences)


@pytest.mark.parametrize("num_sequences", [150, pytest.param(1500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_random_requests_to_a_real_model_over_a_tiny_pool(
    num_sequences: int, tiny_model: Any, make_driver: Any
) -> None:
    tiny = tiny_model("llama")
    config = tiny.config(
        block_size=4, kv_cache_tokens=96, max_model_len=64, max_num_waiting=21, max_num_batched_tokens=24
    )
    core = make_driver(config).core
    soak(Traffic(core, random.Random(2), 300, tiny.generate), num_sequences)
