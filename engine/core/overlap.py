"""Two steps in flight: while the device computes one, the host schedules and launches the next.

A step is scheduled as if every request of the step before went on. Its decodes take their input on the device, from
what that step samples there, so the host need not have seen it. Then the host waits for the earlier step, notes its
tokens and hands out its record, while the later one runs. Nothing is known too late but an end: a request whose token
turns out to be its last has one more row in the next step, whose token is thrown away and whose keys and values are
never registered. Requests known to end, by their length, are not scheduled again.

A step that needs the host is computed alone: no other step is in flight then. That is so for logprobs, for grammars,
and for rules whose next logits depend on tokens that the host must have seen; `needs_host` says which requests have
any.

For GPUs, on the engine's loop thread. On a CPU the host and the device are the same, and EngineCore is the engine.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.core.core import EngineCore
from ringserve.engine.interface import AdapterStore, MemoryPart, RequestFailedError
from ringserve.engine.sampling.logit_rules import has_rules
from ringserve.engine.sampling.sampler import NOT_FINITE
from ringserve.engine.schedule.batch import Batch, pack
from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Assumed, Plan
from ringserve.engine.schedule.step_costs import StepCosts
from ringserve.engine.schedule.step_rows import fill_rows
from ringserve.shm_transport.messages import AddRequest, Data
from ringserve.shm_transport.step import Step

logger = logging.getLogger(__name__)


class Tokens(NamedTuple):
    """What a step has sampled, on the host."""

    token_ids: NDArray[np.int64]  # [num_sampled]
    best: NDArray[np.float32]  # [num_sampled], each row's largest logit: not finite if the row has no token
    failures: Mapping[int, str] = MappingProxyType({})  # rows whose sampling has raised -> why; their token is any


class Launched(Protocol):
    """A step under way."""

    def tokens(self) -> Tokens:
        """Wait for the step and return what it has sampled; called once.

        Raises:
            Exception: Whatever went wrong while it was computed.
        """


class Device(Protocol):
    """Computes steps one after the other, in the order in which they are launched."""

    def launch(self, batch: Batch, requests: Sequence[Request], copies: Sequence[tuple[int, int]]) -> Launched:
        """Start a step and return without waiting for it.

        Args:
            batch: What to compute; its `sources` are rows of the step launched before.
            requests: Whose tokens to sample, one for each of `batch.last_rows`. All that is needed of them is read now.
            copies: Source and destination block, to be copied first.

        Raises:
            Exception: If it cannot be started.
        """


@dataclass(slots=True, frozen=True)
class _InFlight:
    plan: Plan
    assumed: Assumed
    launched: Launched
    scheduled_ns: int


class OverlappingCore:
    """An `engine.interface.Engine` over an EngineCore, whose scheduler it drives.

    Args:
        core: Computes the steps that need the host.
        device: Computes all others, on the core's runner.
        block_size: The runner's.
    """

    def __init__(self, core: EngineCore, device: Device, block_size: int) -> None:
        self._core, self._device, self._block_size = core, device, block_size
        self._in_flight: _InFlight | None = None
        self._unsettled: _InFlight | None = None  # its record is handed out
        self._done_ns = 0  # when the last step's tokens were there
        self._elapsed_ns = 0  # what that step took
        self._handed_out_ns = 0
        self._host_bound: set[int] = set()  # handles of requests whose steps need the host

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits, or a step is in flight."""
        return self._in_flight is not None or self._core.has_work

    def add(self, request: AddRequest) -> None:
        """Queue a request and its forks.

        Raises:
            RequestFailedError: If it can never run, or the queue is full. Nothing is kept of it.
        """
        self._core.add(request)
        if needs_host(request):
            self._host_bound |= {request.handle, *(fork.handle for fork in request.forks)}

    def abort(self, handles: Iterable[int]) -> None:
        """Drop requests wherever they are; a row of theirs that is in flight is thrown away."""
        self._core.abort(handles)

    def step(self) -> Step | None:
        """Launch one step and finish the one before it, or do one alone; None if there was none to finish."""
        previous = self._in_flight
        self._host_bound = {handle for handle in self._host_bound if self._core.scheduler.is_live(handle)}
        if not self._host_bound:
            self._in_flight = self._try_launch(previous)
            return None if previous is None else self._finish(previous)
        return self._core.step() if previous is None else self.finish()

    def after_step(self) -> None:
        """Do what the step's record did not need."""
        done, self._unsettled = self._unsettled, None
        if done is None:
            self._core.after_step()
            return
        plan, costs, published_ns = done.plan, self._core.step_costs, time.monotonic_ns()
        self._core.scheduler.settle(plan, done.assumed)
        self._core.budget.note(
            num_decodes=len(plan.decodes), num_tokens=plan.num_chunk_tokens, elapsed_ns=self._elapsed_ns
        )
        costs.publish_ns += published_ns - self._handed_out_ns
        costs.settle_ns += time.monotonic_ns() - published_ns

    def finish(self) -> Step | None:
        """Finish the step in flight without launching another."""
        previous, self._in_flight = self._in_flight, None
        return None if previous is None else self._finish(previous)

    def reset_prefix_cache(self, *, preempts: bool) -> bool:
        """Forget what blocks hold, as `engine.interface.Engine` says."""
        return self._core.reset_prefix_cache(preempts=preempts)

    def release(self, part: MemoryPart) -> None:
        """Free the weights' memory or the KV cache's."""
        self._core.release(part)

    def restore(self, part: MemoryPart) -> None:
        """Load the weights again, or make an empty KV cache."""
        self._core.restore(part)

    @property
    def adapters(self) -> AdapterStore:
        """LoRA adapters that come and go."""
        return self._core.adapters

    def idle_step(self) -> Step:
        """Return a Step without rows, only with the figures of now."""
        return self._core.idle_step()

    def take_failures(self) -> list[RequestFailedError]:
        """Return and forget the requests that failed in the last step; they are already dropped."""
        return self._core.take_failures()

    def take_data(self) -> list[Data]:
        """Return and forget the arrays that the last step has completed."""
        return self._core.take_data()

    def stats(self) -> dict[str, int]:
        """Return the steps' costs and the prefix cache's counters; forward_ns includes the sampling."""
        return self._core.stats()

    @property
    def costs(self) -> StepCosts:
        """A copy of the steps' costs so far; schedule_ns and pack_ns are spent while the device computes."""
        return self._core.costs

    def limits(self) -> dict[str, int]:
        """Return READY's figures."""
        return self._core.limits()

    def _try_launch(self, previous: _InFlight | None) -> _InFlight | None:
        """Schedule and launch a step; None if nobody can run, or it could not be started."""
        scheduler = self._core.scheduler
        scheduled_ns = time.monotonic_ns()
        plan = scheduler.schedule(scheduled_ns)
        planned_ns = time.monotonic_ns()
        if not plan.decodes and not plan.chunks:
            return None
        try:
            batch = pack(plan, self._block_size)
            self._core.step_costs.schedule_ns += planned_ns - scheduled_ns
            self._core.step_costs.pack_ns += time.monotonic_ns() - planned_ns
            if previous is not None:
                rows = {request: row for row, request in enumerate(previous.plan.sampled)}
                batch = replace(batch, sources=np.array([rows.get(each, -1) for each in plan.decodes], np.int64))
            launched = self._device.launch(batch, plan.sampled, plan.copies)
        except Exception as exc:  # whatever it was, the requests outside of this batch and the engine live on
            logger.exception("a step of %d requests could not be launched", len(plan.handles()))
            self._core.fail(dict.fromkeys(plan.handles(), f"the forward failed: {exc}"))
            return None
        return _InFlight(plan, scheduler.assume(plan), launched, scheduled_ns)

    def _finish(self, step: _InFlight) -> Step:
        """Wait for a step's tokens and note them."""
        scheduler, requests = self._core.scheduler, step.plan.sampled
        try:
            token_ids, best, failures = step.launched.tokens()
        except Exception as exc:
            self._fail_all(step, exc)
            return self._core.figures(step.scheduled_ns, time.monotonic_ns())
        done_ns = time.monotonic_ns()
        self._elapsed_ns = done_ns - max(step.scheduled_ns, self._done_ns)
        self._done_ns = done_ns
        reasons = dict.fromkeys((~np.isfinite(best)).nonzero()[0].tolist(), NOT_FINITE) | dict(failures)
        failed = {requests[row].handle: why for row, why in reasons.items()}
        self._core.fail({handle: why for handle, why in failed.items() if scheduler.is_live(handle)})
        rows, finishes = scheduler.confirm(step.plan, token_ids.tolist(), step.assumed)
        record = self._core.figures(step.scheduled_ns, done_ns)
        record.num_prefill_tokens = step.plan.num_chunk_tokens
        num_outputs = [step.assumed.output_lengths[row] for row in rows]
        fill_rows(record, [requests[row] for row in rows], token_ids[rows], finishes, num_outputs)
        self._unsettled, self._handed_out_ns = step, time.monotonic_ns()
        costs = self._core.step_costs
        costs.num_steps += 1
        costs.forward_ns += self._elapsed_ns
        costs.commit_ns += self._handed_out_ns - done_ns
        return record

    def _fail_all(self, step: _InFlight, reason: Exception) -> None:
        """Fail the requests of a step, and those of the next one, which has computed with what that left."""
        steps = [step] if self._in_flight is None else [step, self._in_flight]
        self._in_flight = None
        handles = {handle for each in steps for handle in each.plan.handles()}
        logger.error("a step of %d requests failed", len(handles), exc_info=reason)
        live = [handle for handle in handles if self._core.scheduler.is_live(handle)]
        self._core.fail(dict.fromkeys(live, f"the forward failed: {reason}"))


def needs_host(params: AddRequest) -> bool:
    """Whether a request's steps need the host before the next can begin."""
    has_logprobs = params.num_logprobs >= 0 or params.num_prompt_logprobs >= 0
    return has_logprobs or bool(params.pooling or params.grammar) or has_rules(params)
