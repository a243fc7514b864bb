import json
from pathlib import Path

import pytest

from ringserve.server.errors import StartupError
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.settings.model_path import resolve
from ringserve.shm_transport.records import Pooling


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the default model's tokenizer and nothing else."""
    (tmp_path / "tokenizer.json").write_bytes((resolve(None) / "tokenizer.json").read_bytes())
    return tmp_path / "tokenizer.json"


def load(model: Path, file: str, content: object) -> ModelInfo:
    model.with_name(file).write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelInfo.load(model, chat_template=None)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", {"temperature": 5}),
        ("generation_config.json", {"temperature": "hot"}),
        ("generation_config.json", {"top_k": 2.5}),
        ("generation_config.json", {"top_p": True}),
        ("generation_config.json", {"eos_token_id": [2, -5]}),
        ("generation_config.json", {"eos_token_id": 99999999999}),
        ("generation_config.json", {"eos_token_id": True}),
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("config.json", {"eos_token_id": "2"}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}),
    ],
)
def test_a_wrong_file_is_an_error_of_start_up(model: Path, file: str, content: object) -> None:
    with pytest.raises(StartupError):
        load(model, file, content)


def test_a_template_that_is_no_text_is_named(model: Path) -> None:
    model.with_name("chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"chat_template\.jinja cannot be read as text"):
        ModelInfo.load(model, chat_template=None)
    with pytest.raises(StartupError, match=r"chat_template\.jinja cannot be read as text"):
        ModelInfo.load(model, chat_template=str(model.with_name("chat_template.jinja")))


def test_eos_ids_come_from_the_tokenizer_and_the_generation_config(model: Path) -> None:
    info = load(model, "generation_config.json", {"eos_token_id": [2, 7]})
    assert (info.eos_token_id, info.extra_eos_token_ids) == (2, (7,))
    model.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    info = ModelInfo.load(model, chat_template=None)
    assert (info.eos_token_id, info.extra_eos_token_ids) == (0, (2, 7))


def test_sampling_defaults_are_the_generation_configs(model: Path) -> None:
    info = load(model, "generation_config.json", {"temperature": 0.5, "top_k": 40, "top_p": None, "unknown": 1})
    assert info.sampling_defaults == {"temperature": 0.5, "top_k": 40}


def test_a_bare_tokenizer_is_enough(model: Path) -> None:
    info = ModelInfo.load(model, chat_template=None).with_limits(max_model_len=10, vocab_size=5)
    assert (info.eos_token_id, info.extra_eos_token_ids, info.chat_template) == (-1, (), None)
    assert (info.max_model_len, info.vocab_size) == (10, 49152)


@pytest.mark.parametrize(
    ("mode", "pooling"), [("mean_tokens", Pooling.MEAN), ("lasttoken", Pooling.LAST), (None, Pooling.LAST)]
)
def test_pooling_is_what_the_model_was_trained_for_else_the_last_token(
    model: Path, mode: str | None, pooling: Pooling
) -> None:
    if mode is not None:
        (model.parent / "1_Pooling").mkdir()
        (model.parent / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    assert ModelInfo.load(model, chat_template=None).pooling is pooling
