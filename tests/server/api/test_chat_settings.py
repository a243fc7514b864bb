import pytest

from ringserve.server.api.chat_settings import ChatSettings
from ringserve.server.chat.template import ChatPrompt, ChatTemplate
from ringserve.server.chat.tool_formats import FORMATS, TEXT
from ringserve.server.chat.tools import FunctionDefinition, ToolUse
from ringserve.server.errors import RequestError

WITH_TOOLS = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
WITHOUT = "{{ '<tool_call> tools' }}{{ messages[0].content }}"
AUTO = ToolUse(functions={0: FunctionDefinition(name="now")}, mode="auto")
PROMPT = ChatPrompt(messages=[{"role": "user", "content": "hi"}])


def settings(source: str | None, tools: str = "auto", reasoning: str = "none") -> ChatSettings:
    return ChatSettings.of(None if source is None else ChatTemplate(source, {}), tools, reasoning)


@pytest.mark.parametrize(
    ("source", "tool_parser", "form", "takes_tools"),
    [
        (WITH_TOOLS, "auto", FORMATS["hermes"], True),
        (WITH_TOOLS, "mistral", FORMATS["mistral"], True),
        (WITH_TOOLS, "none", None, True),
        ("{% for tool in tools %}[TOOL_CALLS]{% endfor %}", "auto", FORMATS["mistral"], True),
        ("{{ tools | tojson }}", "auto", None, True),
        (WITHOUT, "auto", FORMATS["hermes"], False),
        ("{% set tools = 1 %}{{ tools }}", "auto", FORMATS["hermes"], False),
        (None, "auto", FORMATS["hermes"], False),
        (None, "none", None, False),
    ],
)
def test_the_format_is_the_flag_s_else_the_template_s(
    source: str | None, tool_parser: str, form: object, takes_tools: bool
) -> None:
    found = settings(source, tool_parser)
    assert found.tool_format is form
    assert found.takes_tools == takes_tools


def test_tools_go_to_a_template_that_takes_them_and_else_into_the_system_s_turn() -> None:
    prompt = settings(WITH_TOOLS).prompt(PROMPT, AUTO)
    assert (prompt.messages, prompt.tools) == (PROMPT.messages, AUTO.for_template())
    prompt = settings(WITHOUT).prompt(PROMPT, AUTO)
    assert prompt.tools is None
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert settings(WITHOUT).prompt(PROMPT, None) is PROMPT
    with pytest.raises(RequestError, match="--tool-call-parser"):
        settings(WITHOUT, "none").prompt(PROMPT, AUTO)


def test_only_what_is_asked_for_is_parsed() -> None:
    plain, thinking = settings(WITH_TOOLS), settings(WITH_TOOLS, reasoning="think")
    unused = ToolUse(functions=AUTO.functions, mode="none")
    assert plain.parsing(None, "hi", include_reasoning=True) is None
    assert plain.parsing(unused, "hi", include_reasoning=True) is None
    split = thinking.parsing(unused, "hi <think>\n", include_reasoning=False)
    assert split is not None
    assert (split.tools, split.reasoning, split.include_reasoning) == (TEXT, True, False)
    assert split.markers == {"<think>", "</think>"}
    called = plain.parsing(AUTO, "hi <think>\n", include_reasoning=True)
    assert called is not None
    assert (called.tools, called.reasoning, called.names) == (FORMATS["hermes"], None, {"now"})
    assert called.markers == {"<tool_call>", "</tool_call>"}
