"""The real engine: scheduler, block pool, runner and sampler put together, one step at a time.

Runs on the engine process's loop thread; knows no ring and no text.
"""

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ringserve.engine.config import EngineConfig
from ringserve.engine.core.control_adapters import ModelAdapters
from ringserve.engine.interface import MemoryPart, Refusal, RequestFailedError
from ringserve.engine.runner import Runner, make_runner
from ringserve.engine.sampling.collect import collect, deliver
from ringserve.engine.sampling.grammar import CompiledGrammar, GrammarCompiler, GrammarError
from ringserve.engine.sampling.sampler import Samples, sample, sample_each
from ringserve.engine.schedule.batch import Batch, pack
from ringserve.engine.schedule.block_pool import BlockPool
from ringserve.engine.schedule.chunk_budget import ChunkBudget
from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Plan, Scheduler
from ringserve.engine.schedule.step_costs import StepCosts
from ringserve.engine.schedule.step_rows import fill_rows
from ringserve.shm_transport.messages import AddRequest, Data
from ringserve.shm_transport.step import Step

logger = logging.getLogger(__name__)

_COMPILE_POLL_S = 0.002  # the loop looks at its inbox that often while nothing but a grammar's compilation goes on
_NOTHING = Samples([], np.empty(0, np.int64), None, {})


class EngineCore:
    """An `engine.interface.Engine`.

    Raises:
        EngineError: If the model cannot be loaded or does not fit.
    """

    def __init__(self, config: EngineConfig, *, runner: Runner | None = None) -> None:
        self._runner = runner or make_runner(config)
        self._pool = BlockPool(self._runner.num_blocks, self._runner.block_size)
        self.budget = ChunkBudget(
            config.resolve_num_batched_tokens(self._runner.device.type),
            target_gap_s=config.target_gap_s,
            min_prefill_share=config.min_prefill_share,
        )
        self.scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_waiting=config.max_num_waiting,
            max_model_len=self._runner.max_model_len,
            vocab_size=self._runner.vocab_size,
            pool=self._pool,
            budget=self.budget,
        )
        self._grammars = GrammarCompiler(Path(config.model) / "tokenizer.json", self._runner.vocab_size)
        self._compiling: list[tuple[Request, Future[CompiledGrammar]]] = []  # held by the scheduler until then
        self._failures: list[RequestFailedError] = []
        self._data: list[Data] = []
        self._plan: Plan | None = None  # of the step that is not settled yet, if it went well
        self._elapsed_ns = 0  # what it took, until it was handed out
        self._handed_out_ns = 0
        self.step_costs = StepCosts()

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return self.scheduler.num_running > 0 or self.scheduler.num_waiting > 0

    @property
    def costs(self) -> StepCosts:
        """A copy of the steps' costs so far."""
        return replace(self.step_costs)

    def add(self, request: AddRequest) -> None:
        """Queue a request and its forks; they join at the next step that has seats and blocks for them.

        Raises:
            RequestFailedError: If it can never run, or the queue is full. Nothing is kept of it.
        """
        added = Request(request, queued_ns=time.monotonic_ns(), adapter=self._adapter(request))
        self.scheduler.add(added, is_held=bool(request.grammar))
        if request.grammar:
            self._compiling.append((added, self._grammars.compile(request.grammar)))

    def abort(self, handles: Iterable[int]) -> None:
        """Drop requests wherever they are and free what they hold; unknown handles are ignored."""
        self.scheduler.drop(handles)

    def step(self) -> Step | None:
        """Give every request that decodes one token, and prompts their share of the step.

        Returns:
            The step; None while there is nothing to do but to wait for grammars.
        """
        self._failures.clear()
        self._data.clear()
        if self._compiling:
            self._release_compiled()
            if not self.scheduler.has_ready and not self._failures:
                return None
        scheduled_ns = time.monotonic_ns()
        plan = self.scheduler.schedule(scheduled_ns)
        planned_ns = time.monotonic_ns()
        try:
            samples, forward_done_ns = self._compute(plan)
        except Exception as exc:  # whatever it was, the requests outside of this batch and the engine live on
            logger.exception("a step of %d requests failed", len(plan.handles()))
            self.fail(dict.fromkeys(plan.handles(), f"the forward failed: {exc}"))
            return self.figures(scheduled_ns, time.monotonic_ns())
        sampled_ns = time.monotonic_ns()
        self.fail(samples.failures)
        finishes = self.scheduler.commit(plan, samples.requests, samples.token_ids.tolist())
        step = self.figures(scheduled_ns, forward_done_ns)
        step.num_prefill_tokens = plan.num_chunk_tokens
        num_outputs = [request.num_output_tokens for request in samples.requests]
        fill_rows(step, samples.requests, samples.token_ids, finishes, num_outputs)
        step.logprobs = samples.logprobs
        self._plan, self._handed_out_ns = plan, time.monotonic_ns()
        self._elapsed_ns = self._handed_out_ns - scheduled_ns
        self.step_costs.num_steps += 1
        self.step_costs.schedule_ns += planned_ns - scheduled_ns
        self.step_costs.sample_ns += sampled_ns - forward_done_ns
        self.step_costs.commit_ns += self._handed_out_ns - sampled_ns
        return step

    def after_step(self) -> None:
        """Do what the step's record did not need: register computed blocks, free what has ended, learn the costs."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        published_ns = time.monotonic_ns()
        self.scheduler.settle(plan)
        self.budget.note(num_decodes=len(plan.decodes), num_tokens=plan.num_chunk_tokens, elapsed_ns=self._elapsed_ns)
        self.step_costs.publish_ns += published_ns - self._handed_out_ns
        self.step_costs.settle_ns += time.monotonic_ns() - published_ns

    def finish(self) -> Step | None:
        """Return None: a step is done once it is handed out."""
        return None

    def reset_prefix_cache(self, *, preempts: bool) -> bool:
        """Forget what blocks hold, as `engine.interface.Engine` says."""
        if preempts:
            self.scheduler.preempt_all()
        return self._pool.try_reset()

    def release(self, part: MemoryPart) -> None:
        """Free the weights' memory or the KV cache's."""
        self._runner.release(part)

    def restore(self, part: MemoryPart) -> None:
        """Load the weights again, or make an empty KV cache."""
        self._runner.restore(part)

    @property
    def adapters(self) -> ModelAdapters:
        """LoRA adapters that come and go."""
        return ModelAdapters(self._runner, self.scheduler)

    def idle_step(self) -> Step:
        """Return a Step without rows, only with the figures of now."""
        return self.figures(0, 0)

    def take_failures(self) -> list[RequestFailedError]:
        """Return and forget the requests that failed in the last step; they are already dropped."""
        failures, self._failures = self._failures, []
        return failures

    def take_data(self) -> list[Data]:
        """Return and forget the arrays that the last step has completed."""
        data, self._data = self._data, []
        return data

    def stats(self) -> dict[str, int]:
        """Return the steps' costs and the prefix cache's counters."""
        return asdict(self.step_costs) | asdict(self._pool.counters)

    def limits(self) -> dict[str, int]:
        """Return READY's figures."""
        return {
            "max_model_len": self._runner.max_model_len,
            "vocab_size": self._runner.vocab_size,
            "embedding_size": self._runner.hidden_size,
            "num_blocks": self._pool.num_blocks,
        }

    @torch.inference_mode()
    def _compute(self, plan: Plan) -> tuple[Samples, int]:
        """Run the forward and sample; returns the samples and when the forward was done."""
        started_ns = time.monotonic_ns()
        if not plan.decodes and not plan.chunks:
            return _NOTHING, started_ns
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        batch = pack(plan, self._runner.block_size)
        packed_ns = time.monotonic_ns()
        if plan.pooled:
            logits, hidden_states = self._runner.embed(batch)
            collect(plan.pooled, hidden_states)
        else:
            logits = self._runner.forward(batch)
        forward_done_ns = time.monotonic_ns()
        self.step_costs.pack_ns += packed_ns - started_ns
        self.step_costs.forward_ns += forward_done_ns - packed_ns
        num_sampled = len(plan.sampled)
        if plan.scored:
            collect(plan.scored, logits[num_sampled:])
        self._data += deliver(plan.chunks)
        if not num_sampled:  # nothing but beginnings of prompts
            return _NOTHING, forward_done_ns
        return self._sample(logits[:num_sampled], plan, batch), forward_done_ns

    def _sample(self, logits: Tensor, plan: Plan, batch: Batch) -> Samples:
        """Sample, at worst row by row; `logits` are overwritten."""
        try:
            return sample(logits, plan.sampled)
        except Exception:
            logger.exception("sampling failed: the rows are done one by one")
            # Half sampled, the logits are spoiled. The same batch gives them again, and writes what it wrote before.
            return sample_each(self._runner.forward(batch)[: len(plan.sampled)], plan.sampled)

    def _release_compiled(self) -> None:
        """Let those run whose grammars are compiled by now, and fail those whose are none."""
        if not self.scheduler.has_ready:
            wait([future for _, future in self._compiling], _COMPILE_POLL_S, "FIRST_COMPLETED")
        done = [(request, future) for request, future in self._compiling if future.done()]
        self._compiling = [(request, future) for request, future in self._compiling if not future.done()]
        for request, future in done:
            if not self.scheduler.try_release(request):
                continue  # it was aborted
            requests = (request, *request.forks)
            try:
                for each in requests:
                    each.matcher = future.result().matcher(each.params)
            except GrammarError as exc:
                self.fail({each.handle: Refusal(exc) for each in requests})
            except Exception as exc:  # the tokenizer's, or whatever the library does not document
                self.fail({each.handle: str(exc) for each in requests})

    def _adapter(self, request: AddRequest) -> int:
        """Return the number of the adapter that a request names, 0 if none."""
        if not request.adapter:
            return 0
        numbers = self._runner.adapters.numbers
        if request.adapter not in numbers:
            known = ", ".join(numbers) or "none"
            reason = Refusal(f"there is no adapter {request.adapter!r}: known are {known}")
            raise RequestFailedError(request.handle, reason)
        return numbers[request.adapter]

    def fail(self, reasons: dict[int, str]) -> None:
        """Drop requests, by handle, and report why."""
        self.scheduler.drop(reasons)
        self._failures += [RequestFailedError(handle, reason) for handle, reason in reasons.items()]

    def figures(self, scheduled_ns: int, forward_done_ns: int) -> Step:
        """Return a Step without rows. Blocks of those that ended in the step still count, unless nobody is left."""
        return Step(
            handles=np.empty(0, np.uint64),
            token_ids=np.empty(0, np.int32),
            scheduled_ns=scheduled_ns,
            forward_done_ns=forward_done_ns,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_blocks_used=self._pool.num_used if self.has_work else 0,
            num_blocks=self._pool.num_blocks,
            num_preemptions=self.scheduler.num_preemptions,
        )
