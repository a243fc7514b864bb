"""The real engine: scheduler, cache, runner and sampler put together, one step at a time.

Runs on the engine process's loop thread; knows no ring and no text.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, pack
from engine.config import EngineConfig
from engine.interface import RequestFailedError
from engine.request import Request
from engine.runner import ModelRunner
from engine.sampler import Samples, sample
from engine.scheduler import Finish, Plan, Scheduler
from engine.slot_pool import SlotPool
from shm_transport.messages import AddRequest
from shm_transport.step import FirstRowColumns, Step

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the core needs of a ModelRunner."""

    max_model_len: int
    vocab_size: int
    num_slots: int

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch; return the logits of its last rows."""


class EngineCore:
    """An `engine.interface.Engine`; a block, in its figures, is the room for one token's keys and values.

    Raises:
        EngineError: If the model cannot be loaded or does not fit.
    """

    def __init__(self, config: EngineConfig, *, runner: Runner | None = None) -> None:
        self._runner = runner or ModelRunner(config)
        self._pool = SlotPool(self._runner.num_slots)
        self._scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self._runner.max_model_len,
            vocab_size=self._runner.vocab_size,
            pool=self._pool,
        )
        self._failures: list[RequestFailedError] = []

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return self._scheduler.num_running > 0 or self._scheduler.num_waiting > 0

    def add(self, request: AddRequest) -> None:
        """Queue a request; it joins at the next step that has a seat for it.

        Raises:
            RequestFailedError: If it can never run. Nothing is kept of it.
        """
        self._scheduler.add(Request(request, queued_ns=time.monotonic_ns()))

    def abort(self, handles: Iterable[int]) -> None:
        """Drop requests wherever they are and free what they hold; unknown handles are ignored."""
        self._scheduler.drop(handles)

    def step(self) -> Step:
        """Give every running request one token."""
        self._failures.clear()
        scheduled_ns = time.monotonic_ns()
        plan = self._scheduler.schedule(scheduled_ns)
        try:
            samples, forward_done_ns = self._compute(plan)
        except Exception as exc:  # whatever it was, the requests outside of this batch and the engine live on
            logger.exception("a step of %d requests failed", len(plan.requests))
            self._fail(dict.fromkeys((request.handle for request in plan.requests), f"the forward failed: {exc}"))
            return self._step(scheduled_ns=scheduled_ns, forward_done_ns=time.monotonic_ns())
        self._fail(samples.failures)
        is_first = [request.num_output_tokens == 0 for request in samples.requests]
        finishes = self._scheduler.commit(samples.requests, samples.token_ids.tolist())
        return self._step(samples, finishes, is_first, scheduled_ns, forward_done_ns)

    def idle_step(self) -> Step:
        """Return a Step without rows, only with the figures of now."""
        return self._step()

    def take_failures(self) -> list[RequestFailedError]:
        """Return and forget the requests that failed in the last step; they are already dropped."""
        failures, self._failures = self._failures, []
        return failures

    def limits(self) -> dict[str, int]:
        """Return max_model_len, vocab_size and num_blocks."""
        return {
            "max_model_len": self._runner.max_model_len,
            "vocab_size": self._runner.vocab_size,
            "num_blocks": self._pool.num_slots,
        }

    @torch.inference_mode()
    def _compute(self, plan: Plan) -> tuple[Samples, int]:
        """Run the forward and sample; returns the samples and when the forward was done."""
        if not plan.requests:
            return Samples([], np.empty(0, np.int64), None, {}), time.monotonic_ns()
        logits = self._runner.forward(pack(plan.decodes, plan.prefills, self._pool))
        forward_done_ns = time.monotonic_ns()
        return sample(logits, plan.requests), forward_done_ns

    def _fail(self, reasons: dict[int, str]) -> None:
        self._scheduler.drop(reasons)
        self._failures += [RequestFailedError(handle, reason) for handle, reason in reasons.items()]

    def _step(
        self,
        samples: Samples | None = None,
        finishes: Sequence[Finish] = (),
        is_first: Sequence[bool] = (),
        scheduled_ns: int = 0,
        forward_done_ns: int = 0,
    ) -> Step:
        """Put a step's columns together with the figures of now."""
        requests = samples.requests if samples else []
        ends = any(finish.reason for finish in finishes)
        return Step(
            handles=np.array([request.handle for request in requests], np.uint64),
            token_ids=samples.token_ids.astype(np.int32) if samples else np.empty(0, np.int32),
            finish_reasons=np.array([finish.reason for finish in finishes], np.uint8) if ends else None,
            stop_token_ids=np.array([finish.stop_token_id for finish in finishes], np.int32) if ends else None,
            first=_first_rows(requests, is_first) if any(is_first) else None,
            logprobs=samples.logprobs if samples else None,
            scheduled_ns=scheduled_ns,
            forward_done_ns=forward_done_ns,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks_used=self._pool.num_used,
            num_blocks=self._pool.num_slots,
        )


def _first_rows(requests: Sequence[Request], is_first: Sequence[bool]) -> FirstRowColumns:
    queued = [request.queued_ns if first else 0 for request, first in zip(requests, is_first, strict=True)]
    started = [request.first_scheduled_ns if first else 0 for request, first in zip(requests, is_first, strict=True)]
    return FirstRowColumns(
        num_cached_tokens=np.zeros(len(requests), np.uint32),  # there is no prefix cache yet
        queued_ns=np.array(queued, np.uint64),
        first_scheduled_ns=np.array(started, np.uint64),
        num_preemptions=np.zeros(len(requests), np.uint32),
    )
