"""LLM and AsyncLLM as a library: scripts as users write them, each in a process and a folder of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ringserve import LLM, SamplingParams
from ringserve.server.errors import EngineDeadError, EngineGenerateError, RequestError, ServerError
from ringserve.shm_transport import process

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def command(script: str) -> list[str]:
    return [sys.executable, "-W", "error", "-c", script]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def run(script: str, folder: Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(script), cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )


def names_of(pid: int) -> list[str]:
    """Names in /dev/shm that a process has made and left."""
    return [path.name for path in Path("/dev/shm").iterdir() if f"ringserve-{pid}-" in path.name]


@pytest.fixture(scope="module")
def llm():
    with LLM(engine="synthetic", max_model_len=500) as llm:
        engine_pid = llm._llm._reader.engine.process.pid
        yield llm
    assert process.start_time(engine_pid) is None
    assert names_of(os.getpid()) == []


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts(llm) -> None:
    params = [SamplingParams(max_tokens=tokens) for tokens in (30, 1, 10)]
    outputs = llm.generate(["a", [1, 2, 3], "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 1, 10]
    assert outputs[1].prompt_token_ids == [1, 2, 3]
    assert all(output.finished for output in outputs)
    assert texts(outputs)[0].startswith(texts(outputs)[2])


def test_one_prompt_needs_no_list_and_none_gives_none(llm) -> None:
    for prompt in ("a", [1, 2, 3]):
        (output,) = llm.generate(prompt, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 16
    assert llm.generate([], use_tqdm=False) == []
    assert llm.embed([], use_tqdm=False) == []


def test_n_sequences_of_a_prompt_are_one_output(llm) -> None:
    (output,) = llm.generate("a", SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [part.index for part in output.outputs] == [0, 1, 2]


def test_more_prompts_than_the_queue_takes_are_all_answered() -> None:
    with LLM(engine="synthetic", max_num_queued_reqs=10) as small:
        outputs = small.generate(["a"] * 100, SamplingParams(max_tokens=3, n=2, temperature=1), use_tqdm=False)
        assert [len(output.outputs) for output in outputs] == [2] * 100
        assert len(small.embed(["a"] * 100, use_tqdm=False)) == 100


def test_a_chat_is_a_conversation_or_a_list_of_them(llm) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    two = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "Hi"}]], GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == two[0].prompt_token_ids
    assert len(two[1].prompt_token_ids) > len(one.prompt_token_ids)
    (bare,) = llm.chat(conversation, GREEDY, add_generation_prompt=False, use_tqdm=False)
    assert one.prompt_token_ids[: len(bare.prompt_token_ids)] == bare.prompt_token_ids


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]


def test_the_model_is_told_of_its_tools_as_over_http(llm, synthetic) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    for params in (GREEDY, [GREEDY], None):
        (told,) = llm.chat([conversation], params, tools=TOOLS, use_tqdm=False)
        assert told.prompt_token_ids == synthetic.post("/tokenize", messages=conversation, tools=TOOLS).json()["tokens"]
    (plain,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert len(told.prompt_token_ids) > len(plain.prompt_token_ids) + 20


def test_tools_that_make_no_sense_or_could_not_be_called_are_refused(llm) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    with pytest.raises(RequestError, match="tools has 0 tools"):
        llm.chat(conversation, tools=[], use_tqdm=False)
    with (
        LLM(engine="synthetic", tool_call_parser="none") as blind,
        pytest.raises(RequestError, match="--tool-call-parser"),
    ):
        blind.chat(conversation, tools=TOOLS, use_tqdm=False)


def test_embeddings_come_in_order(llm) -> None:
    embeddings = [output.embedding for output in llm.embed(["a", "b", "a"], use_tqdm=False)]
    np.testing.assert_array_equal(embeddings[0], embeddings[2])
    assert not np.array_equal(embeddings[0], embeddings[1])
    (mean,) = llm.embed([[1, 2]], pooling="mean", normalize=False, use_tqdm=False)
    (last,) = llm.embed([[1, 2]], pooling="last", normalize=False, use_tqdm=False)
    assert not np.array_equal(mean.embedding, last.embedding)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda llm: llm.generate(["a", ""], use_tqdm=False), "prompts[1]"),
        (lambda llm: llm.generate(["a", [1] * 500], use_tqdm=False), "prompts[1]"),
        (lambda llm: llm.generate(["a", [-1]], use_tqdm=False), "prompts[1]"),
        (lambda llm: llm.generate(["a"], [GREEDY, GREEDY], use_tqdm=False), "params"),
        (lambda llm: llm.chat([[{"role": "user", "content": "a"}], []], use_tqdm=False), "messages[1]"),
        (lambda llm: llm.chat([[{"role": "user", "content": 3}]], use_tqdm=False), "messages[0]"),
        (lambda llm: llm.embed(["a", ""], use_tqdm=False), "prompts[1]"),
        (lambda llm: llm.embed(["a"], pooling="cls", use_tqdm=False), "pooling"),
        (lambda llm: llm.generate(5), "prompts is 5: must be a text, token ids, or a list of either"),
        (lambda llm: llm.generate(None), "prompts is None: must be"),
        (lambda llm: llm.generate({"prompt": "a"}), "prompts is {'prompt': 'a'}: must be"),
        (lambda llm: llm.generate(np.array([1, 2])), "prompts is array([1, 2]): must be"),
        (lambda llm: llm.generate(["a", None]), "prompts[1] is None: must be a text or a list of token ids"),
        (lambda llm: llm.generate(["a", 5]), "prompts[1] is 5: must be a text or a list of token ids"),
        (lambda llm: llm.generate([5, "a"]), "prompts[0] holds 'a': token ids are integers"),
        (lambda llm: llm.generate(b"ab"), "prompts[0] is b'ab': must be a text or a list of token ids"),
        (lambda llm: llm.generate([[1, 2.5]]), "prompts[0] holds 2.5: token ids are integers"),
        (lambda llm: llm.generate("a", {"max_tokens": 5}), "params are {'max_tokens': 5}: must be SamplingParams"),
        (lambda llm: llm.generate("a", [GREEDY, None]), "must be SamplingParams for all"),
        (lambda llm: llm.generate("a", 5), "params are 5: must be SamplingParams"),
        (lambda llm: llm.generate("a", SamplingParams(stop="END")), "stop is 'END': must be a tuple of texts"),
        (lambda llm: llm.generate("a", SamplingParams(max_tokens=1.5)), "max_tokens is 1.5: must be an integer"),
        (lambda llm: llm.generate("a", SamplingParams(logit_bias={5: 1.0})), "logit_bias is {5: 1.0}: must be a tuple"),
        (lambda llm: llm.generate("a", SamplingParams(n=True)), "n is True: must be an integer"),
        (lambda _: SamplingParams(temperature="hot"), "temperature is 'hot': must be a number"),
        (lambda _: SamplingParams(n="2"), "n is '2': must be an integer"),
        (lambda _: SamplingParams(stop=5), "stop is 5: must be a tuple of texts"),
        (lambda _: SamplingParams(max_tokens="5"), "max_tokens is '5': must be an integer or None"),
        (lambda llm: llm.chat("hello"), "messages is 'hello': must be a list of messages"),
        (lambda llm: llm.chat(None), "messages is None: must be a list of messages"),
        (lambda llm: llm.chat([{"role": "user"}, 5]), "messages[0]: "),
        (lambda llm: llm.chat([[{"role": "user", "content": "a"}], 5]), "messages[1]: "),
        (lambda llm: llm.embed(5), "prompts is 5: must be"),
        (lambda llm: llm.embed(["a", None]), "prompts[1] is None: must be"),
        (lambda llm: llm.embed(["a", [None]]), "prompts[1] holds None: token ids are integers"),
    ],
)
def test_a_wrong_prompt_is_named_before_anything_runs(llm, call, name) -> None:
    with pytest.raises(RequestError, match=re.escape(name)):
        call(llm)
    assert llm._llm.num_live == 0


def test_a_prompt_that_the_engine_refuses_is_named(llm) -> None:
    with pytest.raises(RequestError, match=re.escape("prompts[1]: grammar: ")) as caught:
        llm.generate(["a", "b"], [GREEDY, SamplingParams(grammar='start: "a"')], use_tqdm=False)
    assert caught.value.param == "prompts[1]"


def test_a_prompt_that_the_engine_fails_is_named_and_the_others_are_aborted() -> None:
    with LLM(engine="synthetic", fail_after=5, step_time_ms=1.0) as failing:
        params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=100)]
        with pytest.raises(EngineGenerateError, match=re.escape("prompts[1]")):
            failing.generate(["a", "b"], params, use_tqdm=False)
        assert texts(failing.generate(["a"], params[0], use_tqdm=False))[0]


def test_a_dead_engine_is_told() -> None:
    with LLM(engine="synthetic", step_time_ms=5.0) as dying:
        timer = threading.Timer(0.2, os.kill, (dying._llm._reader.engine.process.pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(EngineDeadError):
            dying.generate(["a"] * 3, SamplingParams(max_tokens=8000, ignore_eos=True), use_tqdm=False)


def test_after_the_shutdown_calls_are_refused_and_another_shutdown_does_nothing() -> None:
    ended = LLM(engine="synthetic")
    ended.shutdown()
    ended.shutdown()
    with pytest.raises(ServerError, match="shut down"):
        ended.generate("a", use_tqdm=False)


async def test_it_works_where_a_loop_runs_as_in_notebooks(llm) -> None:
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False)) == 2


def test_one_that_a_short_lived_thread_has_made_outlives_it() -> None:
    made: list[LLM] = []
    maker = threading.Thread(target=lambda: made.append(LLM(engine="synthetic")))
    maker.start()
    maker.join()
    with made[0] as llm:
        assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False)) == 2


def test_several_threads_may_share_it(llm) -> None:
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(len(llm.generate(["a"] * 10, GREEDY, use_tqdm=False))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [10] * 4


def test_the_progress_bar_is_on_stderr_and_can_be_left_out(llm, capfd) -> None:
    llm.generate(["a"] * 3, GREEDY)
    llm.embed(["a"] * 3)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("3/3") == 2
    llm.generate(["a"] * 3, GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")


def test_a_wrong_option_or_model_is_told_and_leaves_nothing() -> None:
    threads = threading.active_count()
    with pytest.raises(TypeError, match="no_such_option"):
        LLM(no_such_option=1)
    with pytest.raises(ServerError, match="--wait-strategy is 'sleep'"):
        LLM(wait_strategy="sleep")
    with pytest.raises(ServerError, match="no/model/here"):
        LLM("./no/model/here")
    assert threading.active_count() == threads


def test_a_script_needs_no_main_guard_and_leaves_nothing(tmp_path) -> None:
    script = """
import os
from ringserve import LLM
llm = LLM(engine="synthetic")
print(os.getpid(), llm._llm._reader.engine.process.pid)
print(llm.generate("a", use_tqdm=False)[0].outputs[0].text)
"""
    done = run(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pid, engine_pid = map(int, done.stdout.splitlines()[0].split())
    assert "Alice" in done.stdout
    assert process.start_time(engine_pid) is None
    assert names_of(pid) == []


def test_the_engine_ends_with_the_last_reference() -> None:
    dropped = LLM(engine="synthetic")
    engine_pid = dropped._llm._reader.engine.process.pid
    del dropped
    assert process.start_time(engine_pid) is None


@pytest.mark.parametrize("end", ["raise SystemExit", "os._exit(0)", "1 / 0", "os.kill(os.getpid(), 9)"])
def test_the_engine_ends_however_its_owner_does(tmp_path, wait, end) -> None:
    script = f"""
import os
from ringserve import LLM
llm = LLM(engine="synthetic")
print(llm._llm._reader.engine.process.pid)
{end}
"""
    done = run(script, tmp_path)
    engine_pid = int(done.stdout.split()[0])
    wait(lambda: process.start_time(engine_pid) is None, 10)


def test_ctrl_c_aborts_what_runs_and_the_llm_goes_on(tmp_path) -> None:
    script = """
import time
from ringserve import LLM, SamplingParams
llm = LLM(engine="synthetic", step_time_ms=5.0)
try:
    print("running")
    llm.generate(["a"] * 5, SamplingParams(max_tokens=8000, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    deadline = time.monotonic() + 10
    while llm._llm.num_live or llm._llm.load.num_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print("aborted", len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids))
"""
    running = subprocess.Popen(
        command(script), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "running\n"
    time.sleep(0.3)  # into the run; too early is Ctrl-C all the same
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (out, err, running.returncode) == ("aborted 16\n", "", 0)


def command_of(pid: str) -> str:
    """Return a process's command line, "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_ctrl_c_while_it_loads_ends_the_engine(tmp_path, wait) -> None:
    script = """
from ringserve import LLM
print("loading")
LLM(dtype="float32")
"""
    loading = subprocess.Popen(
        command(script), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert loading.stdout is not None
    assert loading.stdout.readline() == "loading\n"
    children = Path(f"/proc/{loading.pid}/task/{loading.pid}/children")
    wait(lambda: any("-m\0ringserve.engine\0{" in command_of(pid) for pid in children.read_text().split()), 60)
    (engine_pid,) = map(int, children.read_text().split())
    loading.send_signal(signal.SIGINT)
    _, err = loading.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    wait(lambda: process.start_time(engine_pid) is None, 10)
    assert names_of(loading.pid) == []


def test_importing_the_library_is_light() -> None:
    script = "import sys; from ringserve import LLM, AsyncLLM, ServeConfig; print(*sys.modules)"
    loaded = set(run(script, ROOT).stdout.split())
    assert "ringserve.server.llm" in loaded
    assert not loaded & {"torch", "transformers", "ringserve.engine", "uvicorn", "huggingface_hub"}
    alone = set(run("import sys, ringserve; print(*sys.modules)", ROOT).stdout.split())
    assert not {name for name in alone if name.startswith(("ringserve.", "numpy", "msgspec"))}


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    import ringserve

    assert set(ringserve.__all__) == set(ringserve._HOMES)
    assert all(getattr(ringserve, name) for name in ringserve.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ringserve.no_such_name
