"""/v1/responses over the synthetic engine: HTTP, the store, disconnects, errors."""

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import RunningServer, post_beside_health_checks, send
from tests.e2e.test_disconnect import DECODE, PREFILL

SYNTHETIC = ("--engine", "synthetic")
WRONG = {"type": "object", "properties": {"a": {"type": "cat"}}}
CALLER = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def server(synthetic):
    return synthetic


def create(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/responses", **{"input": "Hi", "max_output_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """Return a stream's events."""
    body = {"input": "Hi", "max_output_tokens": 4, **body, "stream": True}
    with server.client.stream("POST", "/v1/responses", json=body) as response:
        raw = response.read().decode()
        assert response.status_code == 200, raw
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = raw.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("event: ") for block in blocks)  # no [DONE] either
    return [json.loads(block.partition("\ndata: ")[2]) for block in blocks]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    changing = ("id", "created_at", "completed_at", "output")
    return {
        **{name: value for name, value in response.items() if name not in changing},
        "content": [item["content"] for item in response["output"]],
    }


def test_a_stream_tells_every_token_and_ends_with_the_whole_response(shared_server) -> None:
    server = shared_server(*DECODE)  # without a step time what the engine makes comes in few deltas
    whole = create(server, max_output_tokens=20)
    events = stream(server, max_output_tokens=20)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == whole["output"][0]["content"][0]["text"]
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(whole)


def test_the_tokens_that_ran_out_are_named(synthetic) -> None:
    response = create(synthetic)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == 4


def test_a_stop_string_completes_a_response(synthetic) -> None:
    text = create(synthetic, max_output_tokens=20)["output"][0]["content"][0]["text"]
    stop = text[8:12]
    response = create(synthetic, max_output_tokens=20, stop=stop)
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["json", "stream"])
def test_a_response_can_be_retrieved_listed_and_deleted(synthetic, sdk, is_streamed) -> None:
    created = stream(synthetic)[-1]["response"] if is_streamed else create(synthetic)
    path = f"/v1/responses/{created['id']}"
    assert synthetic.client.get(path).json() == created
    assert sdk.responses.retrieve(created["id"]).id == created["id"]
    (item,) = sdk.responses.input_items.list(created["id"])
    assert item.content[0].text == "Hi"
    assert synthetic.client.delete(path).json() == {"id": created["id"], "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError, match=created["id"]):
        sdk.responses.retrieve(created["id"])
    with pytest.raises(openai.NotFoundError, match=created["id"]):
        sdk.responses.delete(created["id"])
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        sdk.responses.create(input="x", previous_response_id=created["id"])


def test_a_chain_has_the_prompt_of_the_whole_conversation(synthetic) -> None:
    first = create(synthetic, input="One", instructions="Count.")
    second = create(synthetic, input=[{"role": "user", "content": "Two"}], previous_response_id=first["id"])
    third = create(synthetic, input="Three", previous_response_id=second["id"], instructions="Stop.")
    texts = [response["output"][0]["content"][0]["text"] for response in (first, second, third)]
    messages = [
        {"role": "system", "content": "Stop."},  # the instructions of before are not carried over
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": texts[0]},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": texts[1]},
        {"role": "user", "content": "Three"},
    ]
    chat = synthetic.post("/v1/chat/completions", messages=messages, max_completion_tokens=4).json()
    assert third["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert create(synthetic, input=messages)["usage"] == third["usage"]
    listed = synthetic.client.get(f"/v1/responses/{third['id']}/input_items?order=asc").json()["data"]
    assert [item["content"][0]["text"] for item in listed] == ["One", texts[0], "Two", texts[1], "Three"]


def test_input_items_come_in_pages_newest_first(synthetic, sdk) -> None:
    items = [{"role": "user", "content": str(n)} for n in range(5)]
    response = create(synthetic, input=items)
    page = sdk.responses.input_items.list(response["id"], limit=2)
    assert [item.content[0].text for item in page.data] == ["4", "3"]
    assert [item.content[0].text for item in page] == ["4", "3", "2", "1", "0"]  # the SDK asks for the other pages
    path = f"/v1/responses/{response['id']}/input_items"
    limits = [
        (f"limit={limit}", "limit") for limit in ("0", "101", "-1", "2.0", "a", "", "9" * 5000, "%D9%A3", "%C2%B2")
    ]
    for query, param in (*limits, ("order=up", "order"), ("after=x", "after")):
        answer = synthetic.client.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_store_false_stores_nothing(synthetic) -> None:
    response = create(synthetic, store=False)
    assert response["store"] is False
    assert synthetic.client.get(f"/v1/responses/{response['id']}").status_code == 404
    assert create(synthetic, previous_response_id=create(synthetic)["id"], store=False)["store"] is False


def test_the_store_holds_what_its_flag_says(start_server) -> None:
    server = start_server(*SYNTHETIC, "--max-stored-responses", "2")
    ids = [create(server)["id"] for _ in range(3)]
    assert [server.client.get(f"/v1/responses/{name}").status_code for name in ids] == [404, 200, 200]


def test_a_server_that_stores_nothing_says_so(start_server) -> None:
    server = start_server(*SYNTHETIC, "--max-stored-responses", "0")
    response = create(server)
    assert response["store"] is False
    answer = server.post("/v1/responses", input="x", previous_response_id=response["id"])
    assert answer.status_code == 404
    assert "--max-stored-responses" in answer.json()["error"]["message"]


def test_cancel_and_replay_are_refused(synthetic, sdk) -> None:
    created = create(synthetic)
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.cancel(created["id"])
    with pytest.raises(openai.NotFoundError):
        sdk.responses.cancel("resp_x")
    with pytest.raises(openai.BadRequestError, match="stream"):
        sdk.responses.retrieve(created["id"], stream=True)


def test_input_tokens_are_those_of_the_response(synthetic, sdk) -> None:
    first = create(synthetic)
    body = {"input": "How many?", "previous_response_id": first["id"], "instructions": "Count."}
    count = sdk.responses.input_tokens.count(**body)
    assert count.input_tokens == create(synthetic, **body)["usage"]["input_tokens"] > 10


@pytest.mark.parametrize("is_streamed", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": "a " * 10_000}, 400, "input"),
        ({"max_output_tokens": 100_000}, 400, "max_output_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"model": "gpt-9"}, 404, "model"),
        ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ({"background": True}, 400, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "cat"}}}}, 400, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_choice": ["a"]}, 400, "text.format"),
        ({"tools": [{**CALLER, "parameters": WRONG}], "tool_choice": "required"}, 400, "tools[0].parameters"),
        ({"tools": [CALLER, CALLER]}, 400, "tools"),
        ({"tools": [{**CALLER, "name": "no good"}]}, 400, "tools[0].name"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [CALLER], "tool_choice": {"type": "function", "name": "g"}}, 400, "tool_choice"),
        ({"tools": [CALLER], "structured_outputs": {"grammar": 'start: "a"'}}, 400, "structured_outputs"),
        ({"tools": [CALLER], "include": ["message.output_text.logprobs"]}, 400, "include"),
        ({"request_id": "not good"}, 400, "request_id"),
        ({"conversation": "conv_1"}, 400, "conversation"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_errors_before_the_first_byte_are_real(synthetic, is_streamed, fields, status, param) -> None:
    answer = synthetic.post("/v1/responses", **{"input": "Hi", **fields, "stream": is_streamed})
    error = answer.json()["error"]
    assert answer.status_code == status
    assert error["param"].removesuffix(".schema") == param
    assert error["message"].partition("tokens. However, ")[2].startswith(param) or error["message"].startswith(param)


def test_truncation_leaves_out_the_oldest_turns_that_do_not_fit(synthetic) -> None:
    turns = [{"role": role, "content": f"{n} " + "a " * 150} for n in range(10) for role in ("user", "assistant")]
    items = [*turns, {"role": "user", "content": "last"}]
    answer = synthetic.post("/v1/responses", input=items, max_output_tokens=100)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    response = create(synthetic, input=items, max_output_tokens=100, truncation="auto")
    num_turns = next(
        n for n in range(10) if count(synthetic, items[2 * n :]) + 100 <= 2048
    )  # the first that fits, with the output
    assert 0 < num_turns < 9
    assert response["usage"]["input_tokens"] == count(synthetic, items[2 * num_turns :])
    assert response["usage"]["output_tokens"] == 100
    assert len(synthetic.client.get(f"/v1/responses/{response['id']}/input_items?limit=100").json()["data"]) == 21


def count(server: RunningServer, items: list[dict[str, str]]) -> int:
    answer = server.post("/v1/responses/input_tokens", input=items)
    return answer.json()["input_tokens"] if answer.status_code == 200 else 1 << 30


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("engine", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_a_client_that_leaves_aborts_its_response_and_nothing_is_stored(
    shared_server, wait, engine, is_streamed
) -> None:
    server = shared_server(*engine)
    client = send(server.port, "/v1/responses", input="a", max_output_tokens=4000, stream=is_streamed)
    wait(lambda: server.load()["num_requests_running"] == 1, 30)
    received = b""
    if is_streamed and engine is DECODE:
        while b"response.output_text.delta" not in received:
            received += client.recv(65536)
    client.close()
    elapsed_s = wait(lambda: not any(server.load().values()), 5)
    print(f"free {elapsed_s * 1000:.0f} ms after the close")
    if received:
        response_id = json.loads(received.partition(b"\ndata: ")[2].partition(b"\n")[0])["response"]["id"]
        assert server.client.get(f"/v1/responses/{response_id}").status_code == 404


def test_an_engine_that_fails_a_response_ends_its_stream_with_failed(shared_server) -> None:
    server = shared_server(*SYNTHETIC, "--fail-after", "3")
    events = stream(server, max_output_tokens=20)
    assert [event["type"] for event in events][-2:] == ["error", "response.failed"]
    failed = events[-1]["response"]
    assert failed["error"]["code"] == "server_error"
    assert failed["output"][0]["content"][0]["text"] != ""
    assert server.client.get(f"/v1/responses/{failed['id']}").json() == failed
    answer = server.post("/v1/responses", input="Hi", max_output_tokens=20)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")


def test_the_sdks_stream_helper_raises_or_tells_a_failure(shared_server) -> None:
    server = shared_server(*SYNTHETIC, "--fail-after", "3")
    with server.sdk() as client, client.responses.stream(model=model_of(server), input="Hi") as events:
        seen = [event.type for event in events]
    assert seen[-2:] == ["error", "response.failed"]


def model_of(server: RunningServer) -> str:
    return server.client.get("/v1/models").json()["data"][0]["id"]


def test_a_slow_client_gets_every_token_of_its_response(synthetic, wait) -> None:
    expected = create(synthetic, max_output_tokens=2000)["output"][0]["content"][0]["text"]
    client = send(synthetic.port, "/v1/responses", input="Hi", max_output_tokens=2000, stream=True)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wait(lambda: synthetic.load()["server_load"] == 0, 60)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    data = b""
    while b"event: response.incomplete" not in data or not data.endswith(b"0\r\n\r\n"):
        data += client.recv(1 << 20)
    client.close()
    lines = [
        line[6:] for line in data.decode().splitlines() if line.startswith('data: {"type":"response.output_text.delta')
    ]
    assert "".join(json.loads(line)["delta"] for line in lines) == expected


@pytest.mark.parametrize("is_streamed", [False, True], ids=["json", "stream"])
def test_the_request_id_comes_back_and_is_not_the_responses(synthetic, is_streamed) -> None:
    body = {"input": "Hi", "max_output_tokens": 2, "stream": is_streamed}
    answer = synthetic.client.post("/v1/responses", json=body, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert '"resp_' in answer.text
    assert "mine" not in answer.text


def test_a_long_conversation_does_not_hold_the_others_up(synthetic) -> None:
    body = {"input": [{"role": "user", "content": "a"}] * 60_000, "max_output_tokens": 1}
    response, _ = post_beside_health_checks(synthetic, "/v1/responses", body)
    assert response.status_code == 400  # more than the context holds


def test_nested_json_without_end_is_an_error_of_the_client_or_harmless(synthetic) -> None:
    for depth in (500, 950, 5000):
        parameters = '{"properties":' * depth + "{}" + "}" * depth
        tool = '{"type":"function","name":"f","parameters":' + parameters + "}"
        raw = f'{{"input":"Hi","max_output_tokens":2,"tool_choice":"none","stream":true,"tools":[{tool}]}}'
        answer = synthetic.client.post("/v1/responses", content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400)
        if answer.status_code == 200:
            assert "event: response.incomplete" in answer.text
    assert create(synthetic)["status"] == "incomplete"


def test_responses_know_no_other_methods(synthetic) -> None:
    assert synthetic.client.get("/v1/responses").status_code == 405
    assert synthetic.post("/v1/responses/resp_x").status_code == 405
    assert httpx.get(f"{synthetic.url}/v1/responses/resp_x").json()["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {}, {"type": None}])
def test_a_reference_is_the_stored_item_in_its_place(server, kind: dict[str, Any]) -> None:
    first = create(server, input="I am Bob")
    (answer,) = first["output"]
    (question,) = server.client.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    more = {"role": "user", "content": "Who am I?"}
    whole = create(server, input=[{"role": "user", "content": "I am Bob"}, answer, more])
    for given in ([{"role": "user", "content": "I am Bob"}, {**kind, "id": answer["id"]}, more],
                  [{**kind, "id": question["id"]}, {**kind, "id": answer["id"]}, more]):  # fmt: skip
        referring = create(server, input=given)
        assert referring["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        listed = server.client.get(f"/v1/responses/{referring['id']}/input_items?order=asc").json()["data"]
        assert listed[1] == answer
        third = [{**kind, "id": item["id"]} for item in (answer, referring["output"][0])]
        assert create(server, input=[*third, more])["usage"]["input_tokens"] > 0
    counted = server.post("/v1/responses/input_tokens", input=[{**kind, "id": answer["id"]}, more])
    assert counted.status_code == 200


def test_a_reference_to_what_is_not_stored_is_a_404_that_names_it(server, start_server) -> None:
    gone = create(server, input="a")
    assert server.client.delete(f"/v1/responses/{gone['id']}").status_code == 200
    hidden = create(server, input="a", store=False)
    chosen = create(server, input=[{"role": "user", "content": "a", "id": "msg_mine"}])
    assert chosen["output"]
    other = start_server("--engine", "synthetic", "--max-stored-responses", "0")
    ids = ["msg_" + "0" * 48, gone["output"][0]["id"], hidden["output"][0]["id"], "msg_mine", gone["id"]]
    for asked, item_id in [*((server, each) for each in ids), (other, create(other, input="a")["output"][0]["id"])]:
        given = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": item_id}]
        for is_streamed in (False, True):
            response = asked.post("/v1/responses", input=given, stream=is_streamed)
            assert response.status_code == 404
            error = response.json()["error"]
            assert error["message"].startswith(f"input[1].id is '{item_id}': there is no such item")
            assert (error["type"], error["param"]) == ("NotFoundError", "input")
