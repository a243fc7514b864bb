import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringserve.server.chat.template import ChatPrompt, ChatTemplate, load_chat_template
from ringserve.server.errors import RequestError, StartupError
from ringserve.server.settings import model_path

USER = {"role": "user", "content": "Hi"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": " 多い 😀\n\n<|im_end|> "}],
    [{"role": "assistant", "content": "I begin."}],
    [{"role": "user", "content": ""}],
    [{"role": "tool", "content": "{{ 7 * 7 }} {% if %}"}],
]


def render(source: str, messages: Any = (USER,), **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(ChatPrompt(messages=list(messages)))


def test_the_default_model_s_prompts_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    directory = model_path.resolve(None)
    theirs = AutoTokenizer.from_pretrained(directory)
    ours = load_chat_template(directory, None, {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token})
    assert ours is not None
    for chat in CHATS:
        for add_generation_prompt in (True, False):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
            assert ours.render(ChatPrompt(messages=chat, add_generation_prompt=add_generation_prompt)) == expected


GENERATION = "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}"
LOOP = "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
TRIM = "{% if true %}\n  {% set a = 1 %}\nx\n    {%- if true %} y {% endif %}\n{% endif %}"


@pytest.mark.parametrize(
    "source",
    ["{{ messages | tojson }}", "{{ messages | tojson(indent=2) }}", GENERATION, LOOP, TRIM,
     "{{ messages | tojson(ensure_ascii=True) }}", "{{ tools is none }} {{ documents is none }}",
     "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, separators=(',', ':')) }}"],
)  # fmt: skip
def test_a_template_renders_as_in_transformers(source: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_path.resolve(None))
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False)
        assert ChatTemplate(source, {}).render(ChatPrompt(messages=chat, add_generation_prompt=False)) == expected


def test_a_loop_can_break_and_continue() -> None:
    source = (
        "{% for n in range(9) %}{% if n == 1 %}{% continue %}{% elif n > 3 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    )
    assert render(source) == "023"


def test_json_keeps_what_is_not_ascii() -> None:
    assert render("{{ 'é😀<&' | tojson }}") == '"é😀<&"'


def test_the_generation_tag_is_its_body() -> None:
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHic"


def test_the_date_is_there() -> None:
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))


def test_special_tokens_are_there_and_those_that_are_not_are_empty() -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    assert render(source, bos_token="<s>", eos_token="</s>") == "<s>|</s>|"


def test_a_template_that_refuses_the_messages_is_the_client_s_fault() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content.nope.deeper }}", "{{ messages[0].content + 5 }}", "{{ messages[9].role }}",
     "{{ 1 // (messages | length - 1) }}", "{{ messages[0].content.index('zzz') }}", "{{ range(10**6) | length }}",
     "{{ '{5}'.format(1) }}"],
)  # fmt: skip
def test_a_template_that_stumbles_over_the_messages_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ ''.__class__.__base__ }}",
     "{{ raise_exception.__globals__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}",
     "{{ '{0.__class__.__init__}'.format(messages) }}", "{{ messages | attr('__class__') | string }}"],
)  # fmt: skip
def test_the_sandbox_lets_nothing_out(source: str) -> None:
    messages = [dict(USER)]
    try:
        rendered = ChatTemplate(source, {}).render(ChatPrompt(messages=messages))
    except RequestError:
        rendered = ""
    assert rendered in ("", "Undefined")
    assert messages == [USER]


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% generation %}", "{% nonsense %}", "{{ a | nofilter }}"])
def test_a_source_that_is_no_template_stops_the_start(source: str) -> None:
    with pytest.raises(StartupError, match="not valid Jinja"):
        ChatTemplate(source, {})


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, None, {}) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_chat_template(tmp_path, None, {}) is None


def loaded(directory: Path, override: str | None = None) -> str:
    template = load_chat_template(directory, override, {})
    assert template is not None
    return template.render(ChatPrompt(messages=[USER]))


def test_the_template_is_taken_from_the_configuration_and_a_file_beside_it_wins(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config {{ messages[0].content }}"}))
    assert loaded(tmp_path) == "config Hi"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }} é", encoding="utf-8")
    assert loaded(tmp_path) == "file Hi é"


def test_a_template_is_read_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("é", encoding="utf-8")
    code = (
        "import pathlib, sys; from ringserve.server.chat.template import load_chat_template as load; "
        "print(load(pathlib.Path(sys.argv[1]), None, {}).source == chr(233))"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **locale}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert loaded(tmp_path) == "plain"


def test_the_users_template_wins_as_a_file_and_as_source(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "the model's"}))
    file = tmp_path / "mine"
    file.write_text("mine: {{ messages[0].content }}")
    assert loaded(tmp_path, str(file)) == "mine: Hi"
    assert loaded(tmp_path, "source: {{ messages[0].content }}") == "source: Hi"


def test_a_template_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--chat-template '.*nowhere' is neither"):
        load_chat_template(tmp_path, str(tmp_path / "nowhere"), {})


def test_a_developer_s_message_is_the_system_s_unless_the_template_knows_developers() -> None:
    source = "{% for m in messages %}{{ m.role }} {% endfor %}"
    messages = [{"role": "developer", "content": "a"}, USER]
    assert render(source, messages) == "system user "
    assert render("{# developer #}" + source, messages) == "developer user "


@pytest.mark.parametrize("content", ["The sky", " The sky ", "\n\nThe\n"])
@pytest.mark.parametrize("source", ["{{ messages[-1].content }}<end>", "{{ messages[-1].content | trim }}<end>"])
def test_a_continued_message_ends_the_prompt(source: str, content: str) -> None:
    prompt = ChatPrompt(
        messages=[USER, {"role": "assistant", "content": content}],
        add_generation_prompt=False,
        continues_final_message=True,
    )
    kept = content.strip() if "trim" in source else content
    assert ChatTemplate("<s>" + source, {}).render(prompt) == "<s>" + kept


def test_a_continued_message_is_the_last_one_also_where_an_earlier_one_has_its_text() -> None:
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    prompt = ChatPrompt(messages=messages, add_generation_prompt=False, continues_final_message=True)
    assert ChatTemplate(source, {}).render(prompt) == "[a][a"


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    for content in ("", " \n", "gone"):
        messages = [USER, {"role": "assistant", "content": content}]
        prompt = ChatPrompt(messages=messages, add_generation_prompt=False, continues_final_message=True)
        with pytest.raises(RequestError, match="continue_final_message is true, but"):
            ChatTemplate("{{ messages[0].content }}", {}).render(prompt)


def test_a_template_gets_tools_documents_and_the_request_s_variables_but_not_in_place_of_its_own() -> None:
    source = "{{ tools[0].n }} {{ documents[0].d }} {{ deep }} {{ messages | length }} {{ bos_token }}"
    prompt = ChatPrompt(
        messages=[USER], tools=[{"n": 1}], documents=[{"d": 2}],
        extra={"deep": 3, "messages": [], "tools": None, "bos_token": "x"},
    )  # fmt: skip
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(prompt) == "1 2 3 1 <s>"


@pytest.mark.parametrize("content", ["m", "end", "<", "<|im_end|>"])
@pytest.mark.parametrize("source", ["{{ messages[-1].content }}", "{{ messages[-1].content | trim }}"])
def test_a_continued_message_ends_the_prompt_though_the_template_s_ending_has_its_text(
    source: str, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    prompt = ChatPrompt(messages=messages, add_generation_prompt=False, continues_final_message=True)
    assert ChatTemplate(f"<s>{source}<|im_end|>\n", {}).render(prompt) == "<s>" + content
