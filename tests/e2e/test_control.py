"""The control plane over HTTP: synthetic where only the server matters, else the default model or a tiny one."""

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from ringserve.server.settings.model_path import resolve
from tests.e2e.conftest import RunningServer, wait_until
from tests.e2e.test_adapters import CONFIG, PROMPT, generated_texts
from tests.engine.weights.test_adapters import make_adapter

DEV = "--enable-dev-routes"
SLOW = ("--engine", "synthetic", "--step-time-ms", "5", DEV)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The synthetic engine, with the developer's routes."""
    server = RunningServer(*SLOW)
    yield server
    assert server.stop() == 0
    assert server.leftovers() == []


class Asking:
    """A request on a thread."""

    def __init__(self, server: RunningServer, path: str, **options: Any) -> None:
        self.response = httpx.Response(0)
        self._arguments = (f"{server.url}{path}", {"timeout": 60} | options)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        url, options = self._arguments
        self.response = httpx.post(url, **options)

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(60)
        assert self.is_done
        return self.response.json()


def complete(server: RunningServer, max_tokens: int, **options: Any) -> Asking:
    body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, **options}
    return Asking(server, "/v1/completions", json=body)


def finish_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["finish_reason"]


def test_without_the_flag_there_are_no_such_routes(synthetic: RunningServer) -> None:
    for path in ("/pause", "/sleep", "/collective_rpc", "/v1/load_lora_adapter"):
        assert synthetic.client.post(path).status_code == 404
    assert "/pause" not in synthetic.client.get("/openapi.json").json()["paths"]


def test_pause_abort_ends_requests_and_new_ones_wait_while_the_server_is_healthy(server: RunningServer) -> None:
    early = complete(server, 5000)
    wait_until(lambda: server.load()["num_requests_running"] == 1, 30)
    assert server.client.post("/pause").json() == {"status": "paused"}
    assert finish_of(early.join()) == "abort"
    late = complete(server, 5)
    wait_until(lambda: server.load()["num_requests_waiting"] == 1, 30)
    assert server.client.get("/is_paused").json() == {"is_paused": True}
    paused_s = time.monotonic()
    while time.monotonic() - paused_s < 2:  # longer than a heartbeat may be old
        assert server.client.get("/health").status_code == 200
        time.sleep(0.1)
    assert not late.is_done
    assert server.client.post("/resume").json() == {"status": "resumed"}
    assert finish_of(late.join()) == "length"
    assert server.client.get("/is_paused").json() == {"is_paused": False}


def test_pause_keep_freezes_a_stream_that_goes_on_after_resume(server: RunningServer) -> None:
    kept = complete(server, 200)
    wait_until(lambda: server.load()["num_requests_running"] == 1, 30)
    assert server.client.post("/pause", params={"mode": "keep", "clear_cache": "false"}).status_code == 200
    time.sleep(1.2)  # more than the 200 steps take
    assert not kept.is_done
    server.client.post("/resume")
    assert kept.join()["usage"]["completion_tokens"] == 200


def test_pause_wait_answers_once_what_ran_has_ended(server: RunningServer) -> None:
    early = complete(server, 100)
    wait_until(lambda: server.load()["num_requests_running"] == 1, 30)
    assert server.client.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
    assert server.load()["num_requests_running"] == 0
    assert finish_of(early.join()) == "length"
    server.client.post("/resume")


def test_requests_are_aborted_by_id_and_all_without_one(server: RunningServer) -> None:
    askings = [complete(server, 5000, request_id=name) for name in ("one", "two", "three")]
    wait_until(lambda: server.load()["num_requests_running"] == 3, 30)
    answer = server.post("/abort_requests", request_ids=["two", "nobody"]).json()
    assert answer == {"status": "aborted", "aborted": 1}
    assert finish_of(askings[1].join()) == "abort"
    assert server.client.post("/abort_requests").json() == {"status": "aborted", "aborted": 2}
    assert [finish_of(asking.join()) for asking in askings] == ["abort"] * 3


def test_collective_rpc_calls_the_table_and_nothing_else(server: RunningServer) -> None:
    assert server.post("/collective_rpc", method="is_sleeping").json() == {"results": [False]}
    assert server.post("/collective_rpc", method="reset_prefix_cache", args=[True]).json() == {"results": [True]}
    for method in ("shutdown", "__class__", "engine.stats", "_begin", "eval", ""):
        assert server.post("/collective_rpc", method=method).status_code == 400
    for name in ("depth", "self", "method", "args"):
        assert server.post("/collective_rpc", method="sleep", kwargs={name: 1}).status_code == 400
    for timeout in (0, -1):
        assert server.post("/collective_rpc", method="is_sleeping", timeout=timeout).status_code == 400
    running = complete(server, 400)
    wait_until(lambda: server.load()["num_requests_running"] == 1, 30)
    late = server.post("/collective_rpc", method="pause", args=["wait"], timeout=0.05)
    assert (late.status_code, "timeout of 0.05" in late.json()["error"]["message"]) == (500, True)
    server.client.post("/resume")
    assert finish_of(running.join()) == "length"


@pytest.mark.parametrize(
    ("path", "params", "param", "message"),
    [
        ("/pause", {"mode": "never"}, "mode", 'mode is "never": must be abort, keep or wait'),
        ("/pause", {"clear_cache": "perhaps"}, "clear_cache", 'clear_cache is "perhaps": Expected `bool`, got `str`'),
        ("/sleep", {"level": 3}, "level", "level is 3: one of 0, 1, 2"),
        ("/sleep", {"level": "deep"}, "level", 'level is "deep": Expected `int`, got `str`'),
        (
            "/wake_up", {"tags": ["weights", "all"]}, "tags[1]",
            'tags[1] is "all": must be kv_cache, scheduling or weights',
        ),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_a_400_that_names_it_and_what_there_is(
    server: RunningServer, path: str, params: dict[str, Any], param: str, message: str
) -> None:
    response = server.client.post(path, params=params)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["message"]) == (param, message)
    assert server.client.get("/is_paused").json() == {"is_paused": False}


def test_adapters_are_refused_where_the_engine_has_none(server: RunningServer) -> None:
    response = server.post("/v1/load_lora_adapter", lora_name="a", lora_path="/a")
    assert response.status_code == 400
    assert "no adapters" in response.json()["error"]["message"]


def test_orders_that_wait_fail_with_503_when_the_engine_is_killed(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(*SLOW, "--keep-alive-on-engine-death")
    running = complete(server, 5000)
    wait_until(lambda: server.load()["num_requests_running"] == 1, 30)
    orders = ["/pause?mode=wait", "/sleep?mode=wait", "/sleep?mode=wait&level=0"]
    askings = [Asking(server, order) for order in orders]
    wait_until(lambda: server.client.get("/is_paused").json()["is_paused"], 30)
    askings.append(Asking(server, "/collective_rpc", json={"method": "pause", "args": ["wait"]}))
    os.kill(server.engine_pid, signal.SIGKILL)
    killed_s = time.monotonic()
    for asking in (*askings, running):
        asking.join()
        assert asking.response.status_code == 503
        assert asking.response.json()["error"]["type"] == "EngineDeadError"
    print(f"all orders had failed {time.monotonic() - killed_s:.3f} s after the kill")
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"):
        assert server.client.post(path).status_code == 503
    assert server.client.get("/is_paused").status_code == 503
    assert server.stop() == 0


def rss_mib(pid: int) -> float:
    """What a process has in memory, MiB."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) / 1024


def test_sleep_frees_the_weights_and_the_cache_and_the_same_text_comes_after_wake_up(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server("--dtype", "float32", "--kv-cache-tokens", "16384", "--max-model-len", "2048", DEV)
    prompt = "The history of the city began when " * 25  # so that some of the cache is in memory too
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text = server.complete(**body)["choices"][0]["text"]
    for level in (1, 2):
        before = rss_mib(server.engine_pid)
        assert server.client.post("/sleep", params={"level": level}).json() == {"status": "sleeping", "level": level}
        asleep = rss_mib(server.engine_pid)
        assert server.client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert server.client.get("/health").status_code == 200
        assert server.client.post("/resume").status_code == 409
        waiting = Asking(server, "/v1/completions", json=body)
        wait_until(lambda: server.load()["num_requests_waiting"] == 1, 30)
        woken_s = time.monotonic()
        first = server.client.post("/wake_up", params={"tags": ["weights"]}).json()
        assert first == {"status": "sleeping", "tags": ["weights"]}
        assert not waiting.is_done
        assert server.client.post("/wake_up").json() == {"status": "awake", "tags": None}
        print(
            f"level {level}: {before:.0f} MiB awake, {asleep:.0f} MiB asleep, "
            f"{rss_mib(server.engine_pid):.0f} MiB woken after {time.monotonic() - woken_s:.2f} s"
        )
        assert before - asleep > 450  # of weights alone there are 513 MiB
        assert waiting.join()["choices"][0]["text"] == text
        assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}
        assert server.complete(**body)["choices"][0]["text"] == text


def test_an_adapter_comes_and_goes_while_the_server_runs(tmp_path: Path, start_server: Any) -> None:
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(CONFIG).eval()
    model.save_pretrained(tmp_path / "base")
    shutil.copy(resolve(None) / "tokenizer.json", tmp_path / "base")
    deltas: dict[str, Any] = {"base": {}}
    for number, name in enumerate(("one", "two"), 1):
        deltas[name] = make_adapter(tmp_path / name, model, ("q_proj", "v_proj", "down_proj"), number)
    texts = generated_texts(model, deltas)
    assert len(set(texts.values())) == 3

    def ask(server: RunningServer, name: str) -> str:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        return server.complete(model=name, **body)["choices"][0]["text"]

    server = start_server(str(tmp_path / "base"), "--served-model-name", "base", "--dtype", "float32", DEV)
    load = {"lora_name": "x", "lora_path": str(tmp_path / "one")}
    assert server.post("/v1/completions", model="x", prompt="a").status_code == 404
    response = server.post("/v1/load_lora_adapter", **load)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert response.text.startswith("Success: ")
    assert "x" in [card["id"] for card in server.client.get("/v1/models").json()["data"]]
    assert (ask(server, "x"), ask(server, "base")) == (texts["one"], texts["base"])

    for wrong, status, kind in (
        (load, 400, "InvalidUserInput"),
        (load | {"lora_name": "base"}, 400, "InvalidUserInput"),
        (load | {"lora_name": ""}, 400, "InvalidUserInput"),
        ({"lora_name": "y", "lora_path": "/nowhere"}, 404, "NotFoundError"),
        ({"lora_name": "y", "lora_path": str(tmp_path / "base")}, 400, "BadRequestError"),
        ({"lora_name": "y"}, 400, "BadRequestError"),
    ):
        response = server.post("/v1/load_lora_adapter", **wrong)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind), response.text

    load |= {"lora_path": str(tmp_path / "two"), "load_inplace": True}
    assert server.post("/v1/load_lora_adapter", **load).status_code == 200
    assert ask(server, "x") == texts["two"]  # and nothing of it from the other's prefix cache
    server.client.post("/sleep", params={"level": 1})
    assert server.post("/v1/unload_lora_adapter", lora_name="x").status_code == 409
    server.client.post("/wake_up")
    assert (ask(server, "x"), ask(server, "base")) == (texts["two"], texts["base"])
    assert server.post("/v1/unload_lora_adapter", lora_name="x").status_code == 200
    missing = server.post("/v1/unload_lora_adapter", lora_name="x")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
    assert server.post("/v1/completions", model="x", prompt="a").status_code == 404
    assert ask(server, "base") == texts["base"]
