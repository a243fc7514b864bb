import json
import re
from pathlib import Path
from typing import Any

import pytest

from server import model_path
from server.chat_template import ChatTemplate
from server.errors import RequestError, StartupError
from server.tokenizer import load_chat_template

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
    return ChatTemplate(source, special_tokens).render(list(messages))


def test_the_default_model_s_prompts_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    directory = model_path.resolve(None)
    theirs = AutoTokenizer.from_pretrained(directory)
    ours = load_chat_template(directory, None, {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token})
    assert ours is not None
    for chat in CHATS:
        for add_generation_prompt in (True, False):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
            assert ours.render(chat, add_generation_prompt=add_generation_prompt) == expected


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
        assert ChatTemplate(source, {}).render(chat, add_generation_prompt=False) == expected


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
        rendered = ChatTemplate(source, {}).render(messages)
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
    return template.render([USER])


def test_the_template_is_taken_from_the_configuration_and_a_file_beside_it_wins(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config {{ messages[0].content }}"}))
    assert loaded(tmp_path) == "config Hi"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }} é", encoding="utf-8")
    assert loaded(tmp_path) == "file Hi é"


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
