"""Structured output of the default model through the real server."""

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import jiter
import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from ringserve.server.grammar import structured_output
from ringserve.server.settings.model_path import resolve
from tests.e2e.conftest import RunningServer, SharedServers
from tests.schemas import LISTED, REFUSED, Schema, all_schemas, an_object

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Tell me about a person, in JSON."}]
PERSON = an_object(
    {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", "日本"]}, "maxItems": 2},
    }
)
BOUNDED = {"json": PERSON, "disable_any_whitespace": True}  # without it spaces may go on up to max_tokens
AGE = an_object({"age": {"type": "integer", "minimum": 0, "maximum": 120}})
CODE = "[A-Z]{2}-[0-9]{3}"


def response_format(schema: Schema) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def problem_of(text: str, schema: Schema) -> str:
    """Return what a validator has against a text, "" if nothing: with all formats, and numbers as exact as written."""
    value, exact = (json.loads(each, parse_float=Decimal) for each in (text, json.dumps(schema)))
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    error = jsonschema.exceptions.best_match(cls(exact, format_checker=cls.FORMAT_CHECKER).iter_errors(value))
    return "" if error is None else error.message


@pytest.fixture
def server(shared_server: SharedServers) -> RunningServer:
    return shared_server("--max-model-len", "2048")


def chat(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.post(CHAT, **{"messages": QUESTION, "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_json_object_gives_an_object(server: RunningServer) -> None:
    answer = chat(server, response_format={"type": "json_object"}, temperature=0, max_tokens=48)
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    print(choice["finish_reason"], text)
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert isinstance(jiter.from_json(text.encode(), partial_mode="trailing-strings"), dict)


def test_plain_text_is_no_form(server: RunningServer) -> None:
    plain = chat(server, temperature=0, max_tokens=20)
    named = chat(server, temperature=0, max_tokens=20, response_format={"type": "text"})
    assert plain["choices"] == named["choices"]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": response_format(PERSON)},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON), "disable_any_whitespace": True}},
        {"guided_json": PERSON},
    ],
)
def test_a_schema_is_followed_wherever_it_stands(body: dict[str, Any], server: RunningServer) -> None:
    for path, prompt in ((CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "A person in JSON: "})):
        answer = server.post(path, **prompt, **body, max_tokens=120, seed=1).json()
        (choice,) = answer["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert choice["finish_reason"] == "stop"
        assert problem_of(text, PERSON) == ""
        assert ("disable_any_whitespace" not in str(body)) or re.search(r'[{:,]\s+"', text) is None


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": CODE}, CODE),
        ({"choice": ["yes", "no", 'a\n"b" é😀']}, 'yes|no|a\n"b" é😀'),
        ({"grammar": 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{1,4}/'}, "<[a-z]{1,4}(,[a-z]{1,4})*>"),
        ({"grammar": 'root ::= "x=" [0-9]{1,3} ("+" [0-9])? ";"'}, r"x=[0-9]{1,3}(\+[0-9])?;"),
    ],
)
def test_regex_choice_and_grammar_are_followed(form: dict[str, Any], pattern: str, server: RunningServer) -> None:
    ((name, value),) = form.items()
    for body in ({"structured_outputs": form}, {f"guided_{name}": value}):
        for seed in range(2):
            (choice,) = chat(server, **body, seed=seed, temperature=1.0, max_tokens=60)["choices"]
            text = choice["message"]["content"]
            is_prefix = choice["finish_reason"] == "length" and text[0] in "<x"
            assert re.fullmatch(pattern, text) or is_prefix


def test_every_one_of_n_follows_the_schema_by_itself(server: RunningServer) -> None:
    answer = chat(server, response_format=response_format(PERSON), n=3, seed=1, temperature=1.2, max_tokens=150)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    assert [problem_of(text, PERSON) for text in texts] == [""] * 3
    assert len(set(texts)) == 3


def test_a_stream_says_what_an_answer_says_and_its_last_token_too(server: RunningServer) -> None:
    body = {"response_format": response_format(PERSON), "seed": 5, "messages": QUESTION, "max_tokens": 150}
    whole = chat(server, **body)["choices"][0]["message"]["content"]
    events = server.stream(CHAT, **body)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == whole
    assert text.endswith("}")
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert problem_of(text, PERSON) == ""


def test_a_seed_gives_the_same_object_again(server: RunningServer) -> None:
    def text(seed: int) -> str:
        body = {"response_format": response_format(AGE), "temperature": 1.0, "max_tokens": 150, "seed": seed}
        return str(chat(server, **body)["choices"][0]["message"]["content"])

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(3)}) > 1


def test_a_stop_string_ends_no_object(server: RunningServer) -> None:
    body = {"response_format": response_format(AGE), "seed": 5, "max_tokens": 150}
    whole = chat(server, **body)["choices"][0]["message"]["content"]
    assert json.loads(whole)
    for stop in ('"age"', '"', "{", "nowhere"):
        choice = chat(server, **body, stop=[stop])["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert choice["message"]["content"] == whole


def ids_of(*texts: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(Path(resolve(None)) / "tokenizer.json"))
    return [token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize(
    ("body", "num_tokens"),
    [
        ({"guided_choice": ["yes", "no"], "allowed_token_ids": ids_of(*"0123456789")}, 0),
        ({"guided_choice": ["yes"], "bad_words": ["yes", "ye", "y"]}, 0),
        ({"guided_regex": "[0-9]{3}[a-z]", "allowed_token_ids": ids_of(*"0123456789")}, 3),
    ],
)
def test_fields_that_leave_a_form_no_token_are_a_400_or_once_there_is_text_an_event(
    body: dict[str, Any], num_tokens: int, server: RunningServer
) -> None:
    response = server.post(CHAT, messages=QUESTION, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == next(iter(body))
    assert f"the first {num_tokens}: " in error["message"]
    assert next(name for name in body if name in ("allowed_token_ids", "bad_words")) in error["message"]
    if num_tokens:
        *_, event, done = server.stream(CHAT, messages=QUESTION, **body)
        assert (event, done) == ({"error": error}, "[DONE]")
    else:
        assert server.post(CHAT, messages=QUESTION, stream=True, **body).status_code == 400


def test_only_ends_allowed_before_min_tokens_are_refused(server: RunningServer) -> None:
    for ends in ({"allowed_token_ids": [2]}, {"allowed_token_ids": ids_of("a"), "stop_token_ids": ids_of("a")}):
        response = server.post(CHAT, messages=QUESTION, min_tokens=3, **ends)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_a_stop_token_that_is_text_ends_no_object(server: RunningServer) -> None:
    body = {"response_format": response_format(PERSON), "seed": 5, "max_tokens": 150}
    whole = chat(server, **body)["choices"][0]["message"]["content"]
    for min_tokens in (0, 9):
        stops = {"stop_token_ids": ids_of("{", '"', '{"', ' "', ":", "a"), "min_tokens": min_tokens}
        choice = chat(server, **body, **stops)["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", whole)


def test_logprobs_and_usage_count_every_token_of_an_object(server: RunningServer) -> None:
    answer = chat(server, response_format=response_format(PERSON), seed=5, logprobs=True, max_tokens=150)
    (choice,) = answer["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert len(tokens) == answer["usage"]["completion_tokens"]
    assert "".join(tokens).endswith("}")


def test_biases_penalties_and_bad_words_leave_the_form_whole(server: RunningServer) -> None:
    (choice,) = chat(
        server, response_format=response_format(PERSON), seed=5, max_tokens=300, frequency_penalty=2,
        logit_bias={"2": 100}, min_tokens=12,
    )["choices"]  # fmt: skip
    assert choice["finish_reason"] == "stop"
    assert problem_of(choice["message"]["content"], PERSON) == ""
    (ignoring,) = chat(server, structured_outputs={"regex": CODE}, ignore_eos=True, max_tokens=50)["choices"]
    assert re.fullmatch(CODE, ignoring["message"]["content"])
    assert ignoring["finish_reason"] == "stop"


def test_the_sdk_parses_what_it_asked_for(server: RunningServer) -> None:
    import pydantic

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        age: int = pydantic.Field(ge=0, le=120)
        pets: list[str] = pydantic.Field(max_length=2)

    with server.sdk() as client:
        answer = client.chat.completions.parse(
            model="SmolLM2-135M-Instruct", messages=QUESTION, response_format=Person, max_tokens=300, seed=3
        )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_schema_that_cannot_be_followed_is_refused_by_the_keywords_name(keyword: str, server: RunningServer) -> None:
    response = server.post(CHAT, messages=QUESTION, response_format=response_format(REFUSED[keyword]))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "response_format"
    assert keyword in error["message"]


async def _ask_all(
    server: RunningServer, bodies: list[dict[str, Any]], *, num_at_once: int = 128
) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(num_at_once)
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                response = await client.post(CHAT, json={"messages": QUESTION, **body})
            assert response.status_code == 200, (response.text, body)
            choice: dict[str, Any] = response.json()["choices"][0]
            return choice

        return await asyncio.gather(*map(ask, bodies))


async def test_a_form_is_whole_behind_the_reasoning_that_the_prompt_begins(
    shared_server: SharedServers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = json.loads((Path(resolve(None)) / "tokenizer_config.json").read_text())["chat_template"]
    template = tmp_path_factory.mktemp("thinking") / "template.jinja"
    template.write_text(own + "{% if add_generation_prompt %}<think>\n{% endif %}")
    thinking = shared_server("--reasoning-parser", "think", "--chat-template", str(template))
    schema = an_object({"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}})
    form = {"response_format": response_format(schema), "temperature": 1.0, "max_tokens": 80}
    bodies = [form | {"logit_bias": dict.fromkeys(map(str, ids_of("</think>")), 8), "seed": n} for n in range(3)]
    choices = await _ask_all(thinking, bodies)
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert any(choice["message"]["reasoning_content"] for choice in choices)
    for choice in ended:
        assert choice["message"]["content"][0] == "{"
        assert problem_of(choice["message"]["content"], schema) == ""
    events = thinking.stream(CHAT, messages=QUESTION, **bodies[choices.index(ended[0])])[:-1]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert events[-1]["choices"][0]["finish_reason"] != "stop" or problem_of(text, schema) == ""


async def test_many_at_once_mixed_with_plain_requests(server: RunningServer) -> None:
    forms: list[dict[str, Any]] = [
        {"structured_outputs": BOUNDED, "max_tokens": 150},
        {"structured_outputs": {"regex": CODE}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {},
    ]
    bodies = [{"max_tokens": 24, "seed": n, "temperature": 1.0, **forms[n % 4]} for n in range(16)]
    choices = await _ask_all(server, bodies)
    for n, choice in enumerate(choices):
        text = choice["message"]["content"]
        if n % 4 == 0:
            assert choice["finish_reason"] == "stop"
            assert problem_of(text, PERSON) == ""
        else:
            assert n % 4 == 3 or re.fullmatch(("", CODE, "yes|no")[n % 4], text)
    assert not any(server.load().values())


def test_a_grammar_of_many_ring_slots_arrives_whole(server: RunningServer) -> None:
    choices = [f"the option with the number {n}" for n in range(6000)]
    (choice,) = chat(server, structured_outputs={"choice": choices}, seed=1)["choices"]
    assert choice["message"]["content"] in choices


async def test_preemption_breaks_no_object(start_server: Any) -> None:
    tiny = start_server("--max-model-len", "320", "--kv-cache-tokens", "320", "--block-size", "4")
    bodies = [{"structured_outputs": BOUNDED, "max_tokens": 200, "seed": n, "temperature": 1.2} for n in range(8)]
    choices = await _ask_all(tiny, bodies)
    assert [problem_of(choice["message"]["content"], PERSON) for choice in choices] == [""] * 8
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


@dataclass
class Conformance:
    """What came of many schemas."""

    reasons: Counter[str]
    problems: list[tuple[Schema, str, str]]


async def _conform(server: RunningServer, schemas: list[Schema], max_tokens: int) -> Conformance:
    bodies = [
        {"response_format": response_format(schema), "max_tokens": max_tokens, "temperature": (0.0, 0.7, 1.0)[n % 3]}
        | {"seed": n}
        for n, schema in enumerate(schemas)
    ]
    choices = await _ask_all(server, bodies)
    tokenizer = LLTokenizer((Path(resolve(None)) / "tokenizer.json").read_text())
    found = Conformance(Counter(choice["finish_reason"] for choice in choices), [])
    for schema, choice in zip(schemas, choices, strict=True):
        text = choice["message"]["content"]
        problem = (
            problem_of(text, schema) if choice["finish_reason"] == "stop" else _prefix_problem(text, schema, tokenizer)
        )
        if problem:
            found.problems.append((schema, text, problem))
    return found


def _prefix_problem(text: str, schema: Schema, tokenizer: LLTokenizer) -> str:
    """Return why a text cannot be the beginning of one that a schema admits, "" if it can."""
    try:
        jiter.from_json(text.encode() or b"0", partial_mode="trailing-strings")
    except ValueError as exc:
        return f"no beginning of JSON: {exc}"
    matcher = LLMatcher(tokenizer, structured_output.from_json_schema(schema), log_level=0)
    return "" if matcher.consume_tokens(tokenizer.tokenize_str(text)) else matcher.get_error()


async def test_a_dozen_schemas_are_followed_to_the_letter(server: RunningServer) -> None:
    found = await _conform(server, LISTED[::12][:10] + all_schemas()[-3:], max_tokens=96)
    print(dict(found.reasons))
    assert found.problems == []
    assert found.reasons["stop"] >= 7


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_200_schemas_are_followed_to_the_letter(server: RunningServer) -> None:
    schemas = all_schemas()
    assert len(schemas) == 200
    found = await _conform(server, schemas, max_tokens=200)
    print(dict(found.reasons))
    assert found.problems == []
    assert found.reasons["stop"] >= 150
