import json
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from ringserve.server.api.render.chunks import Shown, StreamIdentity
from ringserve.server.api.render.parsed_chunks import ParsedChunks, parsed_message
from ringserve.server.chat.parser import ChatParsing
from ringserve.server.chat.tool_formats import FORMATS
from ringserve.server.generation.outputs import CompletionOutput, TokenLogprobs

IDENTITY = StreamIdentity(response_id="chatcmpl-1", created=17, model="a/model", fingerprint="ringserve-0")
PARSING = ChatParsing(tools=FORMATS["hermes"], names=frozenset({"add"}), reasoning=False)
TEXT = (
    '<think>Hm.</think>\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"b": [1]}}\n</tool_call>'
)
ARGUMENTS = ['{"a": "é"}', '{"b": [1]}']


class CountedLogprobs:
    """Shows each output's tokens."""

    def to_json(self, index: int, logprobs: TokenLogprobs) -> bytes:  # noqa: ARG002  # the protocol's
        return json.dumps(logprobs.token_ids).encode()


def chunks_of(pieces: list[str], shown: Shown = Shown(), parsing: ChatParsing = PARSING, n: int = 1) -> list[Any]:  # noqa: B008
    form = ParsedChunks(IDENTITY, shown, parsing=parsing)
    data = form.opening(n, b"")
    for number, piece in enumerate(pieces):
        for index in range(n):
            logprobs = TokenLogprobs(1, [number], [-1.0], [1])
            output = CompletionOutput(index, piece, [number], num_tokens=number + 1, logprobs=logprobs)
            if number < len(pieces) - 1:
                data += form.delta(output, b"")
            else:
                output.finish_reason = "stop"
                data += form.finish(output, b"", is_fingerprinted=True)
    blocks = data.decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def accumulated(chunks: list[Any]) -> Any:
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.get_final_completion()


def test_the_sdk_adds_up_what_a_whole_message_has() -> None:
    message, finish = parsed_message(CompletionOutput(0, TEXT, [], "stop"), PARSING)
    for pieces in ([TEXT], list(TEXT), [TEXT[:40], TEXT[40:110], TEXT[110:]]):
        choice = accumulated(chunks_of(pieces)).choices[0]
        assert choice.finish_reason == finish == "tool_calls"
        assert choice.message.content == message["content"] == "\nI add.\n"
        assert choice.message.reasoning == choice.message.reasoning_content == message["reasoning_content"] == "Hm."
        calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == [("function", "add", arguments) for arguments in ARGUMENTS]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == ARGUMENTS
        assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_call_s_first_delta_names_it_and_later_ones_bring_arguments_alone() -> None:
    calls = [call for chunk in chunks_of(list(TEXT)) for call in chunk["choices"][0]["delta"].get("tool_calls") or []]
    first = [call for call in calls if "id" in call]
    assert [set(call) for call in first] == [{"index", "id", "type", "function"}] * 2
    assert [call["function"] for call in first] == [{"name": "add", "arguments": ""}] * 2
    assert [call["index"] for call in first] == [0, 1]
    assert all(set(call) == {"index", "function"} for call in calls if call not in first)
    assert all(set(call["function"]) == {"arguments"} for call in calls if call not in first)
    assert all(len(chunk["choices"][0]["delta"].get("tool_calls") or "x") == 1 for chunk in chunks_of([TEXT]))


def test_each_token_s_logprobs_are_shown_once_in_order() -> None:
    for size in (1, 3, len(TEXT)):
        pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
        chunks = chunks_of(pieces, Shown(logprobs=CountedLogprobs(), token_ids=True))[1:]
        shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [token_id for entry in shown for token_id in entry or []] == list(range(len(pieces)))
        shown = [chunk["choices"][0]["token_ids"] for chunk in chunks]
        assert [token_id for entry in shown for token_id in entry or []] == list(range(len(pieces)))


def test_nothing_is_sent_while_text_is_held_back() -> None:
    chunks = chunks_of(["<tool", "_call", "> {", "}"])
    assert len(chunks) == 2  # the role, the end
    assert chunks[1]["choices"][0]["delta"] == {"content": "<tool_call> {}"}
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"


def test_choices_are_parsed_apart() -> None:
    completion = accumulated(chunks_of(list(TEXT), n=2))
    assert len(completion.choices) == 2
    for choice in completion.choices:
        assert [call.function.arguments for call in choice.message.tool_calls or []] == ARGUMENTS


def test_content_is_null_only_beside_something_else() -> None:
    call = '<tool_call>{"name":"add","arguments":{}}</tool_call>'
    assert parsed_message(CompletionOutput(0, call, [], "stop"), PARSING)[0]["content"] is None
    assert parsed_message(CompletionOutput(0, "<think>a", [], "length"), PARSING) == (
        {"content": None, "reasoning": "a", "reasoning_content": "a"}, "length",
    )  # fmt: skip
    plain = ChatParsing(tools=FORMATS["hermes"])
    assert parsed_message(CompletionOutput(0, "", [], "stop"), plain) == ({"content": ""}, "stop")
