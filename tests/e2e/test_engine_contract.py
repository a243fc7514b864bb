"""What every engine behind the rings must do; the synthetic and the real one pass the same tests."""

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ringserve.server.generation.engine_process import EngineProcess
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.messages import AddRequest, Data, Fork
from ringserve.shm_transport.records import DataContent, FinishReason, Pooling, RecordKind
from ringserve.shm_transport.step_ring import Message, StepRecord

MAX_MODEL_LEN = 200


class Driver:
    """The server's ends of the rings, driven by a test."""

    def __init__(self, config: dict[str, object]) -> None:
        self.engine_config = config
        self.engine = EngineProcess(config, RingConfig(), step_timeout_s=60)
        self.steps: list[StepRecord] = []
        self.messages: list[Message] = []
        self._next_handle = 0
        self._next_call = 1000

    def add(self, **options: object) -> int:
        self._next_handle += 1
        defaults = {"prompt_token_ids": np.array([5, 6, 7], np.int32), "max_tokens": 10, "temperature": 0.0}
        self.engine.outbox.add(AddRequest(handle=self._next_handle, **(defaults | options)))
        self.engine.outbox.flush()
        return self._next_handle

    def abort(self, *handles: int) -> None:
        self.engine.outbox.abort(handles)
        self.engine.outbox.flush()

    def call(self, method: str, *args: object) -> int:
        self._next_call += 1
        body = {"method": method, "args": args}
        self.engine.outbox.call(self._next_call, json.dumps(body).encode())
        self.engine.outbox.flush()
        return self._next_call

    def reply(self, call_id: int) -> dict[str, object]:
        """Read until a call is answered."""
        while True:
            for message in self.messages:
                if message.kind == RecordKind.REPLY and int.from_bytes(message.body[:8], "little") == call_id:
                    return json.loads(message.body[8:])
            self.read()

    def order(self, method: str, *args: object) -> object:
        return self.reply(self.call(method, *args))["result"]

    def read(self) -> StepRecord | Message:
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, "the engine is silent"
            if not self.engine.reader.consumer.wait(timeout_s=0.5):
                continue
            record = self.engine.reader.read()
            if isinstance(record, StepRecord):
                self.steps.append(record)
                return record
            if record is not None:
                self.messages.append(record)
                return record

    def run(self, *handles: int) -> dict[int, "Output"]:
        """Read until these requests have finished; return all outputs since the last call."""
        self.steps.clear()
        while not all(h in self.outputs() and self.outputs()[h].finish for h in handles):
            self.read()
        return self.outputs()

    def outputs(self) -> dict[int, "Output"]:
        outputs: dict[int, Output] = {}
        for step in self.steps:
            for row, handle in enumerate(step.handles):
                outputs.setdefault(handle, Output()).take(step, row)
        return outputs


class Output:
    """What one request got."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish = FinishReason.NONE
        self.stop_token_id = -1
        self.queued_ns: list[int] = []

    def take(self, step: StepRecord, row: int) -> None:
        assert not self.finish, "a row after the last one"
        start = row if step.token_offsets is None else step.token_offsets[row]
        self.tokens += step.token_ids[start : start + (1 if step.num_tokens is None else step.num_tokens[row])]
        if step.finish_reasons is not None and step.stop_token_ids is not None:
            self.finish, self.stop_token_id = FinishReason(step.finish_reasons[row]), step.stop_token_ids[row]
        if step.first is not None and step.first.queued_ns[row]:
            self.queued_ns.append(step.first.queued_ns[row])


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, dtype="float32",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["synthetic", "model"])
def driver(request, tmp_path_factory) -> Iterator[Driver]:
    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 3}
    if request.param == "synthetic":
        script = tmp_path_factory.mktemp("script") / "script.json"
        script.write_text(json.dumps(list(range(100, 160))))
        config = {"synthetic": {"script": str(script), "step_time_s": 0.002, **limits}}
    else:
        config = {"model": {"model": request.getfixturevalue("tiny_model"), **limits}}
    running = Driver(config)
    yield running
    running.engine.order_stop()
    assert running.engine.process.wait(60) == 0  # which takes one that has torch a while on a busy machine
    running.engine.stop()


def test_ready_tells_the_limits(driver) -> None:
    limits = driver.engine.limits
    assert limits["max_model_len"] == MAX_MODEL_LEN
    assert limits["vocab_size"] >= 160
    assert "num_blocks" in limits


def test_a_request_gets_max_tokens_and_ends_by_length(driver) -> None:
    before_ns = time.monotonic_ns()
    handle = driver.add(max_tokens=12)
    output = driver.run(handle)[handle]
    assert len(output.tokens) == 12
    assert output.finish == FinishReason.LENGTH
    assert len(output.queued_ns) == 1
    assert before_ns < output.queued_ns[0] < time.monotonic_ns()
    for step in driver.steps:
        assert step.header.scheduled_ns <= step.header.forward_done_ns <= step.header.published_ns
    assert [step.header.step for step in driver.steps] == list(
        range(driver.steps[0].header.step, driver.steps[-1].header.step + 1)
    )


def test_requests_join_and_leave_at_every_step(driver) -> None:
    long = driver.add(max_tokens=40)
    driver.steps.clear()
    while long not in driver.outputs():
        driver.read()
    short = driver.add(max_tokens=3)
    outputs = driver.run(long, short)
    assert len(outputs[short].tokens) == 3
    rows = [set(step.handles) for step in driver.steps]
    joined = [row for row in rows if short in row]
    assert all(long in row for row in joined)
    assert long in rows[-1]
    assert short not in rows[-1]


def test_a_request_among_others_gets_what_it_gets_alone(driver) -> None:
    prompts = [np.array(p, np.int32) for p in ([1, 2], [9] * 30, [4, 8, 15, 16, 23])]
    alone = []
    for prompt in prompts:
        handle = driver.add(prompt_token_ids=prompt)
        alone.append(driver.run(handle)[handle].tokens)
    handles = [driver.add(prompt_token_ids=prompt) for prompt in prompts]
    outputs = driver.run(*handles)
    assert [outputs[handle].tokens for handle in handles] == alone


def test_eos_stop_ids_and_min_tokens(driver) -> None:
    handle = driver.add(max_tokens=20)
    tokens = driver.run(handle)[handle].tokens
    end = next(i for i in range(4, 20) if tokens[i] not in tokens[:i])
    by_eos = driver.add(max_tokens=20, eos_token_id=tokens[end])
    by_id = driver.add(max_tokens=20, stop_token_ids=(299, tokens[end]))
    both = driver.add(max_tokens=20, eos_token_id=tokens[end], stop_token_ids=(tokens[end],))
    outputs = driver.run(by_eos, by_id, both)
    for handle, stop_token_id in ((by_eos, -1), (by_id, tokens[end]), (both, -1)):
        assert outputs[handle].tokens == tokens[: end + 1]
        assert (outputs[handle].finish, outputs[handle].stop_token_id) == (FinishReason.STOP, stop_token_id)
    late = driver.add(max_tokens=20, eos_token_id=tokens[end], min_tokens=end + 1)
    assert len(driver.run(late)[late].tokens) > end + 1


def test_a_full_context_ends_by_length(driver) -> None:
    handle = driver.add(prompt_token_ids=np.array([7] * (MAX_MODEL_LEN - 4), np.int32), max_tokens=100)
    output = driver.run(handle)[handle]
    assert (len(output.tokens), output.finish) == (4, FinishReason.LENGTH)


def test_an_aborted_request_is_gone_from_the_next_record_on(driver) -> None:
    gone, stays = driver.add(max_tokens=150), driver.add(max_tokens=30)
    driver.steps.clear()
    while not {gone, stays} <= set(driver.outputs()):
        driver.read()
    driver.abort(gone, 12345)
    outputs = driver.run(stays)
    assert len(outputs[stays].tokens) > 20
    last = driver.add(max_tokens=5)
    driver.steps.clear()
    while last not in driver.outputs() or not driver.outputs()[last].finish:
        step = driver.read()
        assert gone not in step.handles
    assert driver.steps[-1].header.num_running == 0


def test_forks_are_sequences_of_their_own_that_end_by_their_own_handles(driver) -> None:
    forks = tuple(Fork(handle=1000 + n, seed=n) for n in range(2))  # three seats in all
    first = driver.add(max_tokens=150, forks=forks)
    driver.steps.clear()
    while not {first, 1000, 1001} <= set(driver.outputs()):
        driver.read()
    driver.abort(first, 1001)
    outputs = driver.run(1000)
    assert len(outputs[1000].tokens) > 20
    assert driver.steps[-1].header.num_running == 0


def test_forks_are_aborted_before_their_prompt_has_run(driver) -> None:
    others = [driver.add(max_tokens=40) for _ in range(3)]  # every seat
    forks = tuple(Fork(handle=2000 + n, seed=n) for n in range(2))
    first = driver.add(max_tokens=5, forks=forks)
    driver.abort(first, 2001)
    outputs = driver.run(2000, *others)
    assert len(outputs[2000].tokens) == 5
    assert first not in outputs
    assert 2001 not in outputs
    assert outputs[2000].tokens == outputs[others[0]].tokens[:5]  # all are greedy


def test_an_abort_that_leaves_no_work_is_followed_by_a_record_of_nothing_running(driver) -> None:
    handle = driver.add(max_tokens=190)
    step = driver.read()
    while not step.header.num_running:
        step = driver.read()
    driver.abort(handle)
    while step.header.num_running:
        step = driver.read()
    assert step.handles == []
    assert step.header.num_waiting == 0


def test_seats_bound_what_runs_and_the_rest_waits(driver) -> None:
    handles = [driver.add(max_tokens=20) for _ in range(5)]
    driver.run(*handles)
    assert max(step.header.num_running for step in driver.steps) == 3
    assert max(step.header.num_waiting for step in driver.steps) == 2
    assert (driver.steps[-1].header.num_running, driver.steps[-1].header.num_waiting) == (0, 0)


def test_a_request_that_cannot_run_fails_alone(driver) -> None:
    good = driver.add(max_tokens=20)
    bad = driver.add(prompt_token_ids=np.zeros(MAX_MODEL_LEN, np.int32))
    driver.messages.clear()
    assert len(driver.run(good)[good].tokens) == 20
    (message,) = driver.messages
    assert message.kind == RecordKind.ERROR
    assert int.from_bytes(message.body[:8], "little") == bad
    assert str(MAX_MODEL_LEN).encode() in message.body


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(driver) -> None:
    """The synthetic engine follows none; the tiny model, whose fault it is, has no tokenizer."""
    good = driver.add(max_tokens=20)
    bad = driver.add(grammar="start: (", forks=(Fork(3000, 1),))
    driver.messages.clear()
    assert len(driver.run(good)[good].tokens) == 20
    deadline = time.monotonic() + 30
    while not driver.messages:
        assert time.monotonic() < deadline
        driver.read()
    (kind,) = {message.kind for message in driver.messages}
    assert kind in (RecordKind.ERROR, RecordKind.REFUSAL)
    failed = {int.from_bytes(message.body[:8], "little") for message in driver.messages}
    assert bad in failed
    assert failed <= {bad, 3000}


def test_logprobs_come_for_those_who_ask(driver) -> None:
    plain, asking, sampled_only = driver.add(), driver.add(num_logprobs=2), driver.add(num_logprobs=0)
    driver.run(plain, asking, sampled_only)
    for step in driver.steps:
        if step.logprobs is None:
            continue
        wanted = {plain: 0, asking: 3, sampled_only: 1}
        assert step.logprobs.num_entries == [wanted[handle] for handle in step.handles]
        assert len(step.logprobs.token_ids) == len(step.logprobs.logprobs) == sum(step.logprobs.num_entries)
        start = 0
        for row, count in enumerate(step.logprobs.num_entries):
            assert count == 0 or step.logprobs.token_ids[start] == step.token_ids[row]
            assert all(logprob <= 0 for logprob in step.logprobs.logprobs[start : start + count])
            start += count
    assert any(step.logprobs is not None for step in driver.steps)


def test_prompt_logprobs_come_as_data_before_the_first_token(driver) -> None:
    if "synthetic" in driver.engine_config:
        pytest.skip("it has no logits")
    driver.messages.clear()
    handle = driver.add(prompt_token_ids=np.arange(10, 60, dtype=np.int32), num_prompt_logprobs=2, max_tokens=1)
    while len(driver.messages) < 3:
        driver.read()
    assert not any(handle in step.handles for step in driver.steps)
    arrays = {data.content: data.array for data in (Data.decode(message.body) for message in driver.messages)}
    assert [array.shape for array in arrays.values()] == [(49, 3), (49, 3), (49,)]
    assert arrays[DataContent.PROMPT_TOKEN_IDS][:, 0].tolist() == list(range(11, 60))
    assert driver.run(handle)[handle].finish == FinishReason.LENGTH


def test_an_embedding_comes_as_data_and_is_all_that_comes(driver) -> None:
    driver.messages.clear()
    driver.add(pooling=Pooling.MEAN, is_normalized=True, max_tokens=0)
    while not driver.messages:
        assert not getattr(driver.read(), "handles", None)
    data = Data.decode(driver.messages[0].body)
    assert (data.content, data.array.shape) == (DataContent.EMBEDDING, (driver.engine.limits["embedding_size"],))
    assert np.linalg.norm(data.array) == pytest.approx(1.0, abs=1e-5)
    step = driver.read()
    assert (step.handles, step.header.num_running) == ([], 0)


def test_a_prompt_to_embed_may_fill_the_context(driver) -> None:
    driver.messages.clear()
    prompt = np.full(MAX_MODEL_LEN, 7, np.int32)
    driver.add(prompt_token_ids=prompt, pooling=Pooling.LAST, max_tokens=0)
    while not driver.messages:
        driver.read()
    assert driver.messages[0].kind == RecordKind.DATA
    driver.messages.clear()
    driver.add(prompt_token_ids=np.append(prompt, 7), pooling=Pooling.LAST, max_tokens=0)
    while not driver.messages:
        driver.read()
    assert driver.messages[0].kind == RecordKind.ERROR


def test_an_unknown_call_gets_an_answer(driver) -> None:
    driver.engine.outbox.call(77, json.dumps({"method": "dance"}).encode())
    driver.engine.outbox.flush()
    reply = driver.read()
    assert reply.kind == RecordKind.REPLY
    assert int.from_bytes(reply.body[:8], "little") == 77
    assert "dance" in json.loads(reply.body[8:])["error"]


def test_keep_freezes_what_runs_and_resume_goes_on_with_the_same_tokens(driver) -> None:
    alone = driver.add(max_tokens=60)
    expected = driver.run(alone)[alone].tokens
    kept = driver.add(max_tokens=60)
    driver.steps.clear()
    while kept not in driver.outputs():
        driver.read()
    assert driver.order("pause", "keep", True) is True
    num_tokens = len(driver.outputs()[kept].tokens)
    late = driver.add(max_tokens=3)
    assert driver.order("is_paused") is True
    assert len(driver.outputs()[kept].tokens) == num_tokens < 60
    assert late not in driver.outputs()
    while driver.steps[-1].header.num_running + driver.steps[-1].header.num_waiting != 2:
        driver.read()
    driver.call("resume")
    while not all(driver.outputs().get(h) and driver.outputs()[h].finish for h in (kept, late)):
        driver.read()
    assert driver.outputs()[kept].tokens == expected
    assert driver.order("is_paused") is False


def test_wait_lets_what_is_there_end_and_holds_what_comes(driver) -> None:
    early = [driver.add(max_tokens=30) for _ in range(4)]  # one more than there are seats
    driver.steps.clear()
    pausing = driver.call("pause", "wait")
    late, aborted = driver.add(max_tokens=4), driver.add(max_tokens=4)
    driver.abort(aborted)
    assert driver.reply(pausing) == {"result": True}
    assert all(driver.outputs()[handle].finish == FinishReason.LENGTH for handle in early)
    assert late not in driver.outputs()
    driver.call("resume")
    assert len(driver.run(late)[late].tokens) == 4
    assert aborted not in driver.outputs()


def test_a_sleeping_engine_queues_and_wakes_with_the_same_tokens(driver) -> None:
    before = driver.add(max_tokens=40)
    expected = driver.run(before)[before].tokens
    for level in (0, 1, 2):
        kept = driver.add(max_tokens=40)
        driver.steps.clear()
        while kept not in driver.outputs():
            driver.read()
        assert driver.order("sleep", level, "keep") == level
        assert driver.order("is_sleeping") is True
        late = driver.add(max_tokens=40)
        assert driver.order("wake_up") is True
        while not all(driver.outputs().get(h) and driver.outputs()[h].finish for h in (kept, late)):
            driver.read()
        assert driver.outputs()[kept].tokens == driver.outputs()[late].tokens == expected
    assert driver.order("is_sleeping") is False


def test_the_prefix_cache_is_reset_once_nobody_holds_blocks(driver) -> None:
    prompt = np.arange(1, 101, dtype=np.int32)
    first = driver.add(prompt_token_ids=prompt, max_tokens=80)
    driver.steps.clear()
    while first not in driver.outputs():
        driver.read()
    is_synthetic = "synthetic" in driver.engine_config
    assert driver.order("reset_prefix_cache") is is_synthetic  # which has none
    driver.run(first)
    assert driver.order("reset_prefix_cache") is True
    driver.add(prompt_token_ids=prompt, max_tokens=1)
    again = driver.read()
    while not again.handles:
        again = driver.read()
    assert again.first.num_cached_tokens == [0]


def test_the_engine_tells_what_its_steps_have_cost(driver) -> None:
    def ask() -> dict[str, int]:
        driver.engine.outbox.call(78, json.dumps({"method": "stats"}).encode())
        driver.engine.outbox.flush()
        reply = driver.read()
        assert reply.kind == RecordKind.REPLY
        return json.loads(reply.body[8:])["result"]

    before = ask()
    driver.run(driver.add(max_tokens=3))
    after = ask()
    assert after.keys() == before.keys()
    if after:  # the synthetic engine has none
        assert after["num_steps"] == before["num_steps"] + 3
        for phase in ("schedule", "pack", "forward", "sample", "commit", "publish", "settle"):
            assert after[f"{phase}_ns"] > before[f"{phase}_ns"]


def test_a_full_step_ring_holds_the_engine_and_loses_nothing(driver) -> None:
    handles = [driver.add(max_tokens=100) for _ in range(3)]
    consumer = driver.engine.reader.consumer
    deadline = time.monotonic() + 60
    while consumer.num_pending < RingConfig().num_step_slots:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    aborted = driver.add(max_tokens=100)
    driver.abort(aborted)
    outputs = driver.run(*handles)
    assert all(len(outputs[handle].tokens) == 100 for handle in handles)
    assert driver.engine.stuck_reason() is None
