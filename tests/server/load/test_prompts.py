from pathlib import Path

import pytest

from ringserve.server.errors import StartupError
from ringserve.server.load.config import BenchConfig
from ringserve.server.load.prompts import make_prompts

URL = "http://a"


def test_random_prompts_have_their_length_and_their_seed() -> None:
    config = BenchConfig(url=URL, num_prompts=9, num_warmups=2, input_len=30)
    prompts = make_prompts(config)
    assert [len(prompt.split()) for prompt in prompts] == [30] * 11
    assert len(set(prompts)) == 11
    assert prompts == make_prompts(config)
    assert prompts != make_prompts(BenchConfig(url=URL, num_prompts=9, num_warmups=2, input_len=30, seed=1))


def test_a_file_is_taken_line_by_line_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('one line\n\n{"prompt": "a\\nb", "other": 1}\n')
    config = BenchConfig(url=URL, num_prompts=2, num_warmups=1, prompts_file=str(file))
    assert make_prompts(config) == ["one line", "a\nb", "one line"]


@pytest.mark.parametrize("content", ["", "\n", '{"text": "a"}\n', "{\n", None])
def test_a_file_without_prompts_is_an_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "prompts"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartupError, match="--prompts-file"):
        make_prompts(BenchConfig(url=URL, prompts_file=str(file)))


@pytest.mark.parametrize(
    "option",
    [
        {"num_prompts": 0},
        {"request_rate": 0.0},
        {"request_rate": float("inf")},
        {"concurrency": 2, "request_rate": 1.0},
        {"extra_body": "[]"},
        {"extra_body": "{"},
        {"url": "localhost:8000"},
        {"num_warmups": -1},
        {"seed": -1},
    ],
)
def test_a_load_that_cannot_be_is_refused(option: dict[str, object]) -> None:
    with pytest.raises(StartupError):
        BenchConfig(**{"url": URL, **option})  # type: ignore[arg-type]
