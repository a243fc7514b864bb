"""Deadlines of requests, and the limit of queued prompt tokens."""

import pytest

from tests.e2e.conftest import send

CHAT = {"messages": [{"role": "user", "content": "a"}]}
SLOW = ("--engine", "synthetic", "--step-time-ms", "20")
PREFILL = ("--engine", "synthetic", "--prefill-time-ms", "60000")


@pytest.fixture
def slow(shared_server):
    return shared_server(*SLOW)


@pytest.mark.parametrize("given", [{"timeout_s": 0.3}, {"x-request-timeout": "0.3"}, {"both": True}], ids=str)
def test_a_whole_answer_ends_at_its_deadline_with_what_is_there(slow, given) -> None:
    headers = {"x-request-timeout": given.get("x-request-timeout", "0.3")} if "timeout_s" not in given else {}
    body = {"prompt": "a", "max_tokens": 1000, "n": 2, "timeout_s": given.get("timeout_s", 50)}
    response = slow.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    choices = response.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    num_tokens = response.json()["usage"]["completion_tokens"]
    print(f"{num_tokens} tokens of two sequences in 0.3 s at 20 ms a step; {response.elapsed.total_seconds():.3f} s")
    assert 2 <= num_tokens < 200
    assert all(choice["text"] for choice in choices)
    assert slow.load()["server_load"] == 0


def test_a_stream_ends_at_its_deadline_with_a_chunk_that_says_so(slow, wait) -> None:
    events = slow.stream("/v1/chat/completions", **CHAT, max_tokens=1000, timeout_s=0.3)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "abort"
    assert not any("error" in event for event in events[:-1])
    wait(lambda: not any(slow.load().values()), 5)  # the engine's too


def test_a_response_ends_at_its_deadline(slow) -> None:
    response = slow.post("/v1/responses", input="a", max_output_tokens=1000, timeout_s=0.3)
    assert response.status_code == 200
    assert response.json()["status"] == "incomplete"
    assert response.json()["output"][0]["content"][0]["text"]
    assert slow.load()["server_load"] == 0


def test_a_request_that_ends_in_time_does_not_know_its_deadline(slow) -> None:
    choice = slow.complete(prompt="a", max_tokens=2, timeout_s=30)["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("value", [0, -1, 1e7])
def test_a_deadline_that_is_no_time_is_refused(slow, value) -> None:
    response = slow.post("/v1/completions", prompt="a", timeout_s=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout_s"


@pytest.mark.parametrize("value", ["soon", "nan", "-1", "", "inf", "0"])
def test_a_header_that_is_no_time_is_refused(slow, value) -> None:
    headers = {"x-request-timeout": value}
    response = slow.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_never_got_its_turn_ends_empty(shared_server, wait, stream) -> None:
    server = shared_server(*PREFILL)
    if stream:
        events = server.stream("/v1/completions", prompt="a", timeout_s=0.2)
        assert events[-2]["choices"][0]["finish_reason"] == "abort"
    else:
        (choice,) = server.complete(prompt="a", timeout_s=0.2)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "abort")
    wait(lambda: not any(server.load().values()), 5)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_tokens_beyond_the_queue_are_refused_before_any_byte(shared_server, wait, stream) -> None:
    server = shared_server(*PREFILL, "--max-num-queued-tokens", "100")
    long = server.post("/v1/completions", prompt=[1] * 500, max_tokens=2, timeout_s=0.2)
    assert long.status_code == 200  # one alone is taken, however long
    body = {"prompt": [1] * 60, "n": 3, "temperature": 1, "max_tokens": 4, "stream": stream}
    waiting = send(server.port, "/v1/completions", **body)
    wait(lambda: server.load()["server_load"] == 3, 30)  # three sequences, one prompt
    other = send(server.port, "/v1/completions", prompt=[1] * 40, stream=stream)
    wait(lambda: server.load()["server_load"] == 4, 30)
    refused = server.post("/v1/completions", **body)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "--max-num-queued-tokens" in refused.json()["error"]["message"]
    waiting.close()
    wait(lambda: server.load()["server_load"] == 1, 30)
    again = server.post("/v1/completions", prompt=[1] * 60, max_tokens=2, timeout_s=0.2)  # its place is free again
    assert again.status_code == 200
    other.close()


def test_embeddings_that_are_late_are_an_error_and_leave_the_engine(shared_server, wait) -> None:
    server = shared_server(*PREFILL)
    for body, headers in (({"timeout_s": 0.2}, {}), ({}, {"x-request-timeout": "0.2"})):
        response = server.client.post("/v1/embeddings", json={"input": ["a"] * 300, **body}, headers=headers)
        assert response.status_code == 408
        assert response.json()["error"]["type"] == "TimeoutError"
        wait(lambda: not any(server.load().values()), 5)


def test_embeddings_in_time_do_not_know_their_deadline(synthetic) -> None:
    assert synthetic.post("/v1/embeddings", input=["a", "b"], timeout_s=30).status_code == 200
    response = synthetic.post("/v1/embeddings", input="a", timeout_s=0)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout_s"


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_of_one_request_are_taken_together_or_not_at_all(start_server, wait, stream) -> None:
    server = start_server(*PREFILL, "--max-num-queued-tokens", "100", "--max-num-queued-reqs", "8")
    body = {"prompt": [[1] * 60] * 3, "max_tokens": 2, "stream": stream}
    assert server.post("/v1/completions", **body, timeout_s=0.2).status_code == 200  # alone, however long they are
    wait(lambda: server.load()["server_load"] == 0, 30)
    other = send(server.port, "/v1/completions", prompt=[1] * 30, stream=stream)
    wait(lambda: server.load()["server_load"] == 1, 30)
    refused = server.post("/v1/completions", **body)
    assert refused.status_code == 503
    assert "180 more exceed" in refused.json()["error"]["message"]
    assert server.load()["server_load"] == 1
    never = server.post("/v1/completions", prompt=["a", "b", "c"], n=3, temperature=1, stream=stream)
    assert never.status_code == 400
    assert "--max-num-queued-reqs" in never.json()["error"]["message"]
    other.close()


def test_inputs_of_one_request_for_embeddings_are_taken_together(start_server) -> None:
    server = start_server("--engine", "synthetic", "--max-num-queued-tokens", "100")
    assert server.post("/v1/embeddings", input=[[1] * 60] * 300).status_code == 200


def test_a_prompt_stops_counting_with_its_first_token(start_server) -> None:
    server = start_server("--engine", "synthetic", "--step-time-ms", "10", "--max-num-queued-tokens", "100")
    running = send(server.port, "/v1/completions", prompt=[1] * 90, max_tokens=4000, stream=True)
    assert running.recv(100)
    for kind in (True, False):
        response = server.post("/v1/completions", prompt=[1] * 90, max_tokens=2, stream=kind)
        assert response.status_code == 200
    running.close()
