"""Decides who runs in each step and who is done. Pure Python, no torch; called by the engine's loop thread alone.

Continuous batching: requests join and leave at every step. A step takes one token of each request that decodes, then as
many prompt tokens as the chunk budget allows, of prompts under way and of requests that wait, in the order of
prompt_queue.py. A request holds the blocks of its whole prompt from its first chunk on, and takes one more block
whenever its output needs one. When there is none, the running request of the worst priority, the newest of those, gives
up its blocks and waits again; what it had computed is found in the prefix cache, if it is still there, or computed
again.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from ringserve.engine.interface import RequestFailedError
from ringserve.engine.schedule.block_pool import BlockPool, Prefix, Salt
from ringserve.engine.schedule.chunk_budget import ChunkBudget
from ringserve.engine.schedule.prompt_queue import BY_AGE, MAX_UNDER_WAY, OLDEST_SHARE, PromptQueue, Shares
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.records import GRAMMAR_END, MAX_LOGPROBS, FinishReason, Pooling

_UNKNOWN_TOKEN = 0  # stands for one that is being computed; any id of every vocabulary
NO_TOKEN = -1  # an eos_token_id that is none, a stop_token_id that says EOS or nothing


@dataclass(slots=True)
class Chunk:
    """Tokens of one request's prompt; after a preemption, of its output too."""

    request: Request
    num_tokens: int  # from the request's num_computed_tokens on
    is_last: bool  # whether they reach the request's end, so that a token is sampled


class PromptRows(NamedTuple):
    """Rows of the batch from which something is wanted beside a token."""

    request: Request
    start: int
    end: int


@dataclass(slots=True)
class Plan:
    """One step's work. Rows of the batch: one for each decode, then those of each chunk."""

    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # source and destination block, before the forward
    sampled: list[Request] = field(default_factory=list)  # who gets a token: decodes, then last chunks with their forks
    sampled_rows: list[int] = field(default_factory=list)  # whose logits those are; a chunk and its forks share one
    scored: list[PromptRows] = field(default_factory=list)  # whose logits become prompt logprobs
    pooled: list[PromptRows] = field(default_factory=list)  # whose final hidden states become an embedding
    num_chunk_tokens: int = 0  # of all chunks

    def handles(self) -> list[int]:
        """Everyone whose fate hangs on this step, forks that still wait for their prompt included."""
        requests = dict.fromkeys(self.decodes)
        for chunk in self.chunks:
            requests |= dict.fromkeys((chunk.request, *chunk.request.forks))
        return [request.handle for request in requests | dict.fromkeys(self.sampled)]


class Assumed(NamedTuple):
    """What `Scheduler.assume` has taken for granted."""

    output_lengths: list[int]  # of each of `plan.sampled`, with the token that is not known yet
    computed: list[tuple[Request, int]]  # whose blocks the step fills, and how many of its tokens are computed then


class Finish(NamedTuple):
    """How a row ends: `reason` NONE if the request goes on."""

    reason: FinishReason
    stop_token_id: int = NO_TOKEN


_GOES_ON = Finish(FinishReason.NONE)


class Scheduler:
    """The waiting queue, the seats, and the blocks that those in the seats hold.

    A step is `schedule`, `commit`, `settle`; `add` and `drop` may come before and after it, `drop` also in between.

    A step whose tokens come later is `schedule`, `assume`, then `confirm` and `settle`, with one more `schedule` and
    `assume` at most in between: that is how two steps are in flight. Blocks may be given out again while a step that
    still writes to them is under way, because steps are computed in the order in which they were scheduled.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_waiting: int,
        max_model_len: int,
        vocab_size: int,
        pool: BlockPool,
        budget: ChunkBudget,
    ) -> None:
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_waiting = max_num_waiting
        self._max_model_len = max_model_len
        self._max_num_tokens = min(max_model_len, pool.num_blocks * pool.block_size)
        self._vocab_size = vocab_size
        self._pool = pool
        self._budget = budget
        self._num_arrivals = 0
        self._num_parted_ahead = 0  # of the next steps' prompt tokens: the oldest prompt has had its part of them
        self._live: dict[int, Request] = {}  # by handle
        self._waiting = PromptQueue(lambda request: len(self._find_prefix(request).block_ids) * pool.block_size)
        self._held: set[Request] = set()  # may not run yet
        self._running: list[Request] = []  # by age
        self._ended: list[Request] = []  # in this step; they hold their blocks until it is settled

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, forks included."""
        return len(self._live) - len(self._running)

    @property
    def num_running(self) -> int:
        """Requests that hold a seat."""
        return len(self._running)

    def live_adapters(self) -> set[int]:
        """Return the numbers of the adapters of all requests that wait or run; 0 stands for none."""
        return {request.adapter for request in self._live.values()}

    def is_live(self, handle: int) -> bool:
        """Whether a request waits or runs."""
        return handle in self._live

    @property
    def has_ready(self) -> bool:
        """Whether any request runs, or could if there is a seat."""
        return bool(self._running or self._waiting)

    def add(self, request: Request, *, is_held: bool = False) -> None:
        """Put a request and its forks into the waiting queue; one that `is_held` only once it is released.

        Raises:
            RequestFailedError: If it can never run, the queue is full, or a handle is in use. Nothing is kept of it.
        """
        requests = (request, *request.forks)
        reason = self._refusal(requests)
        if reason is not None:
            raise RequestFailedError(request.handle, reason)
        for each in requests:
            each.arrival = self._num_arrivals
            self._num_arrivals += 1
            self._live[each.handle] = each
        if is_held:
            self._held.add(request)
        else:
            self._waiting.add(request)

    def try_release(self, request: Request) -> bool:
        """Let a request run that was added as held; False if it has been dropped."""
        if request not in self._held:
            return False
        self._held.remove(request)
        self._waiting.add(request)
        return True

    def drop(self, handles: Iterable[int]) -> None:
        """Forget requests wherever they are and free what they hold; unknown handles are ignored."""
        for handle in handles:
            request = self._live.pop(handle, None)
            if request is None:
                continue
            if request.forks:
                self._hand_over(request)
            elif request.block_ids:
                self._unseat(request)
            elif request in self._held:
                self._held.remove(request)
            elif not self._waiting.try_remove(request):
                self._remove_fork(request)

    def schedule(self, now_ns: int) -> Plan:
        """Choose the step's work and seat those who join; `now_ns` is their first-scheduled stamp."""
        plan = Plan()
        num_preemptions = self.num_preemptions
        self._plan_decodes(plan)
        self._plan_chunks(plan, now_ns, may_admit=self.num_preemptions == num_preemptions)
        plan.sampled[:0] = plan.decodes
        plan.sampled_rows[:0] = range(len(plan.decodes))
        return plan

    def commit(self, plan: Plan, requests: Sequence[Request], token_ids: Sequence[int]) -> list[Finish]:
        """Append one sampled token to each request, and take those that it ends off their seats.

        Args:
            plan: What has been computed.
            requests: Those of `plan.sampled` that got a token.
            token_ids: Theirs.
        """
        for chunk in plan.chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens
            if chunk.is_last and chunk.request.params.pooling:
                self._end(chunk.request)
        for rows in (*plan.scored, *plan.pooled):
            rows.request.num_collected_tokens += rows.end - rows.start
        finishes = []
        for request, token_id in zip(requests, token_ids, strict=True):
            request.num_computed_tokens = request.num_tokens
            request.output_token_ids.append(token_id)
            if request.matcher is not None:
                request.matcher.consume(token_id)
            finish = self._finish(request, token_id, request.num_output_tokens)
            if finish.reason:
                self._end(request)
            finishes.append(finish)
        return finishes

    def assume(self, plan: Plan) -> Assumed:
        """Go on as if a step were done whose tokens are not known yet. Not for plans with `scored` or `pooled` rows."""
        for chunk in plan.chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens
        for request in plan.sampled:
            request.num_computed_tokens = request.num_tokens
            request.output_token_ids.append(_UNKNOWN_TOKEN)
        return Assumed([request.num_output_tokens for request in plan.sampled], _computed(plan))

    def confirm(self, plan: Plan, token_ids: Sequence[int], assumed: Assumed) -> tuple[list[int], list[Finish]]:
        """Put in the tokens of an assumed step, and take those that it ends off their seats.

        What was assumed of an ended request's next step stays: nobody looks at it, and the request holds no blocks any
        more when that step is settled.

        Args:
            plan: The step's.
            token_ids: One for each of `plan.sampled`.
            assumed: What `assume` has returned for it.

        Returns:
            Which of `plan.sampled` are still live, and how each of those goes on.
        """
        rows, finishes = [], []
        for row, (request, token_id) in enumerate(zip(plan.sampled, token_ids, strict=True)):
            if self._live.get(request.handle) is not request:
                continue
            length = assumed.output_lengths[row]
            request.output_token_ids[length - 1] = token_id
            finish = self._finish(request, token_id, length)
            if finish.reason:
                self._end(request)
            rows.append(row)
            finishes.append(finish)
        return rows, finishes

    def settle(self, plan: Plan, assumed: Assumed | None = None) -> None:
        """After a step: make what it has computed findable, and free what it has ended.

        Args:
            plan: The step's.
            assumed: What `assume` has returned for it, if its tokens came later.
        """
        size = self._pool.block_size
        for request, num_computed in assumed.computed if assumed else _computed(plan):
            if num_computed >= (request.num_registered_blocks + 1) * size and request.block_ids:
                self._register(request, num_computed)  # not if it was dropped or preempted: it has no blocks any more
        for request in self._ended:
            self._pool.release(request.block_ids)
            request.block_ids = []
        self._ended.clear()

    def _end(self, request: Request) -> None:
        del self._live[request.handle]
        if request.block_ids:
            self._running.remove(request)
        else:  # it was preempted after its last token had been launched
            self._waiting.try_remove(request)
        self._ended.append(request)

    def _plan_decodes(self, plan: Plan) -> None:
        # In order of rank, while those who are preempted are taken from the other end: nobody planned loses anything.
        index = 0
        while index < len(self._running):
            request = self._running[index]
            if request.is_decoding and not self._is_full(request, request.num_output_tokens):
                if not self._make_room(request, plan):
                    return
                plan.decodes.append(request)
            index += 1

    def _make_room(self, request: Request, plan: Plan) -> bool:
        """See that the request can write its next token's keys and values; False if it had to go itself."""
        pool, held = self._pool, request.block_ids
        while True:
            needs_more = request.num_computed_tokens == len(held) * pool.block_size
            if not needs_more and not pool.is_shared(held[-1]):
                return True
            if pool.num_free:
                break
            last = self._running[-1]
            self._preempt(last)
            if last is request:
                return False
        (block_id,) = pool.allocate(1)
        if needs_more:
            held.append(block_id)
        else:  # forks share the block that their prompt ends in until they write
            plan.copies.append((held[-1], block_id))
            pool.release(held[-1:])
            held[-1] = block_id
        return True

    def _unseat(self, request: Request) -> None:
        self._running.remove(request)
        self._pool.release(request.block_ids)
        request.block_ids = []

    def preempt_all(self) -> None:
        """Take seats and blocks from all who run; not with an assumed step in flight. They join again like others."""
        for request in reversed(self._running.copy()):
            self._give_back(request)

    def _preempt(self, request: Request) -> None:
        assert len(self._running) > 1, "a request that fits the pool alone had no room alone"
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self._unseat(request)
        request.num_computed_tokens = request.num_registered_blocks = request.content_id = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    def _plan_chunks(self, plan: Plan, now_ns: int, *, may_admit: bool) -> None:
        """Spend the budget: the oldest prompt's share first, then on all by size.

        Nobody is admitted in a step that preempts: those who just lost their blocks would take them back.
        """
        under_way = [request for request in self._running if not request.is_decoding]
        num_prompts = len(under_way) + len(self._waiting)
        if not num_prompts:
            return
        shares = Shares(self._budget.tokens(num_decodes=len(plan.decodes), num_prompts=num_prompts))
        oldest = min(filter(None, (*under_way[:1], self._waiting.oldest)), key=BY_AGE)
        every = shares.budget
        its_part = self._part_of_oldest(shares.room(oldest, every))
        turns = [(oldest, its_part), *((each, every) for each in self._in_order(under_way)), (oldest, every)]
        for request, limit in turns:
            if not request.block_ids and may_admit:
                share = shares.room(request, max(limit, 1))  # the oldest is let in even in a step without a part for it
                self._try_admit(request, share, under_way, oldest, now_ns)
            if request.block_ids:
                shares.give(request, limit)
            elif request is oldest:
                may_admit = may_admit and oldest.num_passed_tokens < (OLDEST_SHARE - 1) * oldest.num_tokens
        for request, num_tokens in shares.num_tokens.items():
            self._add_chunk(plan, request, num_tokens)

    def _part_of_oldest(self, num_tokens: int) -> int:
        """Return the oldest prompt's part of so many tokens, rounded up; what that adds, the next steps' parts lack."""
        part = max(-(-(num_tokens - self._num_parted_ahead) // OLDEST_SHARE), 0)
        self._num_parted_ahead += OLDEST_SHARE * part - num_tokens
        return part

    def _in_order(self, under_way: list[Request]) -> list[Request]:
        """Return the prompts that the step could take, first those that have little left."""
        self._waiting.look_up()
        return self._waiting.order(under_way, self._max_num_seqs - len(self._running))

    def _try_admit(self, request: Request, share: int, under_way: list[Request], oldest: Request, now_ns: int) -> None:
        """Give a request that waits a running slot and blocks for all its tokens, if it may have them now.

        Args:
            request: It.
            share: How many of its tokens the step would take.
            under_way: Prompts of which a part is computed; it joins them if the step does not complete it.
            oldest: The prompt that has waited longest; others may pass it only for so long.
            now_ns: Its first-scheduled stamp.
        """
        is_last = request.num_tokens_left <= share
        num_taken = len(self._running) + sum(len(other.forks) for other in self._running)
        if share <= 0 or num_taken >= self._max_num_seqs:
            return
        if not is_last and not self._may_begin(request, under_way, is_oldest=request is oldest):
            return
        prefix = self._find_prefix(request)
        num_new = -(-request.num_tokens // self._pool.block_size) - len(prefix.block_ids)
        # One block is left for each who runs to grow into.
        if num_new + len(self._running) > self._pool.num_free_without(prefix.block_ids):
            return
        if not oldest.block_ids and request is not oldest:
            oldest.num_passed_tokens += request.num_tokens
        self._waiting.try_remove(request)
        self._hold_blocks(request, prefix, num_new)
        insort(self._running, request, key=BY_AGE)
        if not is_last:
            under_way.append(request)
        request.num_passed_tokens = 0
        request.first_scheduled_ns = request.first_scheduled_ns or now_ns

    def _may_begin(self, request: Request, under_way: list[Request], *, is_oldest: bool) -> bool:
        """Whether a prompt may begin that the step does not complete: few at once, in half of the cache."""
        num_before = sum(each.params.priority <= request.params.priority for each in under_way)
        if is_oldest:
            return num_before <= MAX_UNDER_WAY
        num_held = sum(len(each.block_ids) for each in under_way) + request.num_tokens // self._pool.block_size
        return num_before < MAX_UNDER_WAY and (not under_way or num_held <= self._pool.num_blocks // 2)

    def _hold_blocks(self, request: Request, prefix: Prefix, num_new: int) -> None:
        """Give the request blocks for all its tokens, found ones first."""
        pool = self._pool
        pool.hold(prefix.block_ids)
        request.block_ids = prefix.block_ids + pool.allocate(num_new)
        request.num_registered_blocks = len(prefix.block_ids)
        request.content_id = prefix.content_id
        request.num_computed_tokens = len(prefix.block_ids) * pool.block_size
        if not request.num_preemptions:  # else it may find what it has computed itself
            request.num_cached_tokens = request.num_computed_tokens
        pool.counters.num_queried_tokens += request.num_tokens
        pool.counters.num_hit_tokens += request.num_computed_tokens

    def _find_prefix(self, request: Request) -> Prefix:
        params = request.params
        if params.num_prompt_logprobs >= 0 and request.num_collected_tokens < request.num_prompt_tokens - 1:
            return Prefix([], 0)  # it wants something of every prompt token still
        if params.pooling != Pooling.NONE:
            return Prefix([], 0)
        # Not the last token: its logits are wanted.
        return self._pool.find_prefix(request.token_ids_between(0, request.num_tokens - 1), _salt(request))

    def _add_chunk(self, plan: Plan, request: Request, num_tokens: int) -> None:
        """Plan the next tokens of a request's prompt."""
        chunk = Chunk(request, num_tokens, is_last=num_tokens == request.num_tokens_left)
        self._collect(plan, chunk)
        plan.chunks.append(chunk)
        plan.num_chunk_tokens += chunk.num_tokens
        if chunk.is_last and not request.params.pooling:
            requests = [request, *self._seat_forks(request)]
            plan.sampled += requests
            plan.sampled_rows += [len(plan.decodes) + plan.num_chunk_tokens - 1] * len(requests)

    def _collect(self, plan: Plan, chunk: Chunk) -> None:
        """Plan what is wanted of a chunk beside its keys and values; not what was delivered before a preemption."""
        request, params = chunk.request, chunk.request.params
        row = len(plan.decodes) + plan.num_chunk_tokens - request.num_computed_tokens  # of the request's first token
        start = max(request.num_computed_tokens, request.num_collected_tokens)
        end = request.num_computed_tokens + chunk.num_tokens
        if params.num_prompt_logprobs >= 0:
            end = min(end, request.num_prompt_tokens - 1)  # the last one's logits are those of the output
            if start < end:
                plan.scored.append(PromptRows(request, row + start, row + end))
        elif params.pooling == Pooling.MEAN and start < end:
            plan.pooled.append(PromptRows(request, row + start, row + end))
        elif params.pooling == Pooling.LAST and chunk.is_last:
            plan.pooled.append(PromptRows(request, row + end - 1, row + end))

    def _seat_forks(self, request: Request) -> list[Request]:
        """Seat a request's forks, which share its blocks; those without a seat or room to grow queue by themselves."""
        num_seats = self._max_num_seqs - len(self._running)
        num_grown = self._pool.num_free - len(self._running)
        forks, request.forks = request.forks, []
        for fork in forks:
            fork.num_collected_tokens = fork.num_prompt_tokens
        count = max(min(num_seats, num_grown), 0)
        for fork in forks[:count]:
            self._pool.hold(request.block_ids)
            fork.block_ids = request.block_ids.copy()
            fork.num_registered_blocks, fork.content_id = request.num_registered_blocks, request.content_id
            fork.num_cached_tokens = request.num_cached_tokens
            fork.num_preemptions = request.num_preemptions
            fork.first_scheduled_ns = request.first_scheduled_ns
            insort(self._running, fork, key=BY_AGE)
        for fork in forks[count:]:
            self._waiting.add(fork)
        return forks[:count]

    def _register(self, request: Request, num_computed: int) -> None:
        size = self._pool.block_size
        for index in range(request.num_registered_blocks, num_computed // size):
            tokens = request.token_ids_between(index * size, (index + 1) * size)
            parent = request.content_id if index else _salt(request)
            request.content_id = self._pool.register(request.block_ids[index], parent, tokens)
            request.num_registered_blocks = index + 1

    def _hand_over(self, request: Request) -> None:
        """Let the first fork take the place of a request that is dropped before its prompt has been computed."""
        heir = request.forks.pop(0)
        request.handle, request.seed = heir.handle, heir.seed
        self._live[heir.handle] = request

    def _remove_fork(self, request: Request) -> None:
        parent = next(other for other in self._live.values() if request in other.forks)
        parent.forks.remove(request)

    def _is_full(self, request: Request, num_outputs: int) -> bool:
        """Whether so many output tokens are all that the request may have."""
        num_tokens = request.num_prompt_tokens + num_outputs
        return num_outputs >= request.params.max_tokens or num_tokens >= self._max_num_tokens

    def _finish(self, request: Request, token_id: int, num_outputs: int) -> Finish:
        """On one token EOS beats a stop token, which beats the end of the grammar, which beats the length."""
        params = request.params
        if token_id == params.eos_token_id:
            return Finish(FinishReason.STOP)
        if token_id in params.stop_token_ids and _may_stop(request, num_outputs):
            return Finish(FinishReason.STOP, token_id)
        if request.matcher is not None and request.matcher.is_complete:
            return Finish(FinishReason.STOP, GRAMMAR_END)
        if self._is_full(request, num_outputs):
            return Finish(FinishReason.LENGTH)
        return _GOES_ON

    def _refusal(self, requests: Sequence[Request]) -> str | None:
        """Say why a request and its forks cannot run, or None."""
        params, num_tokens = requests[0].params, requests[0].num_prompt_tokens
        handles = [request.handle for request in requests]
        if len(set(handles)) < len(handles) or any(handle in self._live for handle in handles):
            return f"of the handles {handles} one is in use by a live request"
        if self.num_waiting + len(requests) > self._max_num_waiting:
            return f"{self.num_waiting} requests wait, max_num_waiting is {self._max_num_waiting}: try again later"
        if num_tokens == 0:
            return "the prompt is empty: send at least one token"
        num_kept = num_tokens if params.pooling else num_tokens + 1  # an embedding needs no room for one more
        if num_kept > self._max_model_len:
            return f"the prompt has {num_tokens} tokens, max_model_len is {self._max_model_len}: shorten it"
        if num_kept > self._max_num_tokens:
            return (
                f"the prompt has {num_tokens} tokens, the KV cache holds {self._max_num_tokens}: shorten it, or raise "
                "kv_cache_tokens"
            )
        lowest, highest = int(params.prompt_token_ids.min()), int(params.prompt_token_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            return f"prompt token ids reach from {lowest} to {highest}, the vocabulary from 0 to {self._vocab_size - 1}"
        if params.pooling and (len(requests) > 1 or params.num_prompt_logprobs >= 0):
            return "an embedding has no forks and no prompt logprobs"
        if params.max_tokens < 1 and not params.pooling:
            return "max_tokens is 0: ask for at least one token"
        max_logprobs = min(MAX_LOGPROBS, self._vocab_size)
        if params.num_logprobs > max_logprobs:
            return f"num_logprobs is {params.num_logprobs}, the limit is {max_logprobs}"
        if params.num_prompt_logprobs > max_logprobs:
            return f"num_prompt_logprobs is {params.num_prompt_logprobs}, the limit is {max_logprobs}"
        # Comparisons with NaN are false, so NaN is refused too.
        if not (0.0 <= params.temperature < float("inf") and 0.0 < params.top_p <= 1.0 and 0.0 <= params.min_p <= 1.0):
            return (
                f"temperature {params.temperature}, top_p {params.top_p}, min_p {params.min_p}: "
                "they must be in [0, inf), (0, 1] and [0, 1]"
            )
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if not (params.repetition_penalty > 0.0 and all(map(isfinite, penalties))):
            return f"repetition, frequency and presence penalty are {penalties}: they must be finite, the first above 0"
        return None


def _computed(plan: Plan) -> list[tuple[Request, int]]:
    """Return whose blocks a step fills, and how many of their tokens are computed after it, as they stand now."""
    requests = (*plan.sampled, *[chunk.request for chunk in plan.chunks if not chunk.is_last])
    return [(request, request.num_computed_tokens) for request in requests]


def _may_stop(request: Request, num_outputs: int) -> bool:
    """Whether a stop token that has been sampled ends the output; one that a grammar has as text may not."""
    return request.matcher is None or (request.matcher.may_stop and num_outputs > request.params.min_tokens)


def _salt(request: Request) -> Salt:
    return Salt(request.params.cache_salt, request.adapter)
