"""Tool calls and reasoning through the real server, as the openai SDK reads them.

The synthetic engine emits what a test says, with the tokens of the default model.
"""

from typing import Any

import openai
import pydantic
import pytest

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "2+2?"}]
SUM = '{"a": 2, "why": "é\\n\\"}"}'
TEXTS = {
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "add", "arguments": {SUM}}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama3_json": f'{{"name": "add", "parameters": {SUM}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {SUM}}}, {{"name": "now", "arguments": {{}}}}]',
}
CONTENT = {"hermes": "Let me see.\n"}
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}",
    "llama3_json": "{% if tools %}<|python_tag|>{{ tools | tojson }}{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[TOOL_CALLS]{% endif %}",
}
PACED = ("--step-time-ms", "5")  # without it a busy machine sees several steps at once
MESSAGE_LOOP = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": _model(client), "messages": MESSAGES, "tools": TOOLS} | options)


def streamed(client: openai.OpenAI, **options: Any) -> Any:
    """Stream the same through the SDK's accumulator; return the whole completion."""
    given = {"model": _model(client), "messages": MESSAGES, "tools": TOOLS} | options
    with client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def _model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def calls_of(choice: Any) -> list[tuple[str, str]]:
    calls = choice.message.tool_calls or []
    assert all(call.type == "function" and call.id for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("form", list(TEXTS))
@pytest.mark.parametrize("by", ["flag", "template"])
def test_calls_in_each_format_reach_the_client_whole_and_streamed(scripted, form: str, by: str) -> None:
    arguments = {"flag": ["--tool-call-parser", form], "template": ["--chat-template", TEMPLATES[form] + MESSAGE_LOOP]}
    client = scripted(TEXTS[form], *arguments[by]).sdk()
    for completion in (create(client), streamed(client), create(client, n=2), streamed(client, n=2)):
        for choice in completion.choices:
            assert choice.finish_reason == "tool_calls"
            assert calls_of(choice) == [("add", SUM), ("now", "{}")]
            assert (choice.message.content or "") == CONTENT.get(form, "")


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
def test_the_deltas_of_a_call_are_as_the_sdk_s_accumulator_wants_them(scripted, tokens_per_step: int) -> None:
    client = scripted(TEXTS["hermes"], *PACED, "--tokens-per-step", str(tokens_per_step)).sdk()
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(create(client, stream=True, logprobs=False, stream_options=options))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.type, call.function.name, call.function.arguments) for call in calls if call.id] == [
        (0, "function", "add", ""), (1, "function", "now", ""),
    ]  # fmt: skip
    later = [call.model_dump(exclude_unset=True) for call in calls if not call.id]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in later)
    if tokens_per_step == 1:
        assert len([call for call in later if call["index"] == 0]) > 1, "arguments come as they are written"
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert finishes[-1] == "tool_calls"
    assert not any(finishes[:-1])
    usages = [chunk.usage.completion_tokens for chunk in chunks]
    assert usages == sorted(usages)
    assert usages[-1] == create(client).usage.completion_tokens


def test_markers_that_are_special_tokens_are_seen_and_other_special_tokens_are_not(scripted) -> None:
    text = '<|endoftext|><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    client = scripted(text, special=("<tool_call>", "</tool_call>")).sdk()
    for completion in (create(client), streamed(client)):
        assert calls_of(completion.choices[0]) == [("now", "{}")]
        assert not completion.choices[0].message.content
    plain = create(client, tools=openai.omit)
    assert plain.choices[0].message.content == '{"name": "now", "arguments": {}}'


BROKEN = ["<tool_call>{'name': 'add'}</tool_call>", '<tool_call>{"name": "add", "arg', "<tool_call>", "1 < 2 <tool"]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_call_is_content(scripted, text: str) -> None:
    client = scripted(text).sdk()
    for completion in (create(client), streamed(client)):
        (choice,) = completion.choices
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert not choice.message.tool_calls


def test_a_call_that_max_tokens_cuts_ends_by_length(scripted) -> None:
    client = scripted(TEXTS["mistral"], "--tool-call-parser", "mistral").sdk()
    (choice,) = create(client, max_tokens=30).choices
    assert choice.finish_reason == "length"
    ((name, arguments),) = calls_of(choice)
    assert name == "add"
    assert SUM.startswith(arguments)


class Sum(pydantic.BaseModel):
    a: int
    why: str


def test_parse_gives_the_arguments_as_the_client_s_own_type(scripted) -> None:
    tools = [openai.pydantic_function_tool(Sum, name="add"), openai.pydantic_function_tool(Sum, name="now")]
    text = TEXTS["hermes"].partition("\n<tool_call>{")[0]
    client = scripted(text).sdk()
    parsed = client.chat.completions.parse(model=_model(client), messages=MESSAGES, tools=tools)
    for completion in (parsed, streamed(client, tools=tools)):
        (call,) = completion.choices[0].message.tool_calls
        assert call.function.parsed_arguments == Sum(a=2, why='é\n"}')


def test_tool_choice_none_and_parallel_tool_calls_are_obeyed(scripted) -> None:
    client = scripted(TEXTS["hermes"]).sdk()
    for completion in (create(client, tool_choice="none"), streamed(client, tool_choice="none")):
        (choice,) = completion.choices
        assert (choice.message.content, choice.finish_reason) == (TEXTS["hermes"], "stop")
    for completion in (create(client, parallel_tool_calls=False), streamed(client, parallel_tool_calls=False)):
        assert calls_of(completion.choices[0]) == [("add", SUM)]


def test_reasoning_is_a_field_of_its_own(scripted) -> None:
    client = scripted("<think>So.</think>\n" + TEXTS["hermes"], "--reasoning-parser", "think").sdk()
    for completion in (create(client), streamed(client), create(client, n=2)):
        for choice in completion.choices:
            assert choice.message.reasoning_content == choice.message.reasoning == "So."
            assert choice.message.content.strip() == "Let me see."
            assert len(calls_of(choice)) == 2
    hidden = create(client, tools=openai.omit, extra_body={"include_reasoning": False}).choices[0].message
    assert hidden.reasoning is None
    assert hidden.content == "\n" + TEXTS["hermes"]


def test_a_template_that_opens_the_thought_is_noticed(scripted) -> None:
    template = MESSAGE_LOOP + "{% if think is not defined or think %}<think>\n{% endif %}"
    client = scripted("So.</think>Yes.", "--reasoning-parser", "think", "--chat-template", template).sdk()
    message = create(client, tools=openai.omit).choices[0].message
    assert (message.reasoning_content, message.content) == ("So.", "Yes.")
    extra = {"chat_template_kwargs": {"think": False}}
    message = create(client, tools=openai.omit, extra_body=extra).choices[0].message
    assert (message.reasoning_content, message.content) == (None, "So.</think>Yes.")


def test_token_ids_of_a_call_are_streamed_once_each(scripted) -> None:
    client = scripted(TEXTS["hermes"]).sdk()
    extra = {"return_token_ids": True}
    whole = create(client, extra_body=extra).choices[0]
    chunks = list(create(client, stream=True, extra_body=extra))
    ids = [token_id for chunk in chunks for c in chunk.choices for token_id in getattr(c, "token_ids", None) or []]
    assert ids == whole.token_ids


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": openai.omit, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"extra_body": {"tool_choice": "any"}}, "tool_choice"),
    ],
)
def test_requests_that_make_no_sense_are_refused_by_name(synthetic, options: dict[str, Any], param: str) -> None:
    client = synthetic.sdk()
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, stream=stream, **options)
        assert caught.value.param == param


def test_calls_of_an_unknown_format_are_refused(scripted) -> None:
    client = scripted("Hello.", "--tool-call-parser", "none").sdk()
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        create(client)
    assert create(client, tool_choice="none").choices[0].message.content == "Hello."


def test_the_prompt_tells_the_model_of_its_tools(synthetic) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}

    def num_prompt_tokens(**more: Any) -> int:
        return synthetic.post("/v1/chat/completions", **body, **more).json()["usage"]["prompt_tokens"]

    assert num_prompt_tokens(tools=TOOLS) > num_prompt_tokens(tools=TOOLS[:1]) > num_prompt_tokens() + 20
