import dataclasses
import importlib.metadata
import subprocess
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest

from ringserve.server import cli, launcher
from ringserve.server.errors import StartupError
from ringserve.server.settings import model_path
from ringserve.server.settings.config import ServeConfig
from ringserve.server.settings.config_file import plain_type
from ringserve.shm_transport import log_format

EXAMPLES = {"root_path": "/a", "otlp_traces_endpoint": "http://127.0.0.1:4318"}  # of settings that have a form
OPTIONS = [field for field in dataclasses.fields(ServeConfig) if field.name != "model"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """Keep the configurations that would be served."""
    configs: list[ServeConfig] = []

    def serve(config: ServeConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(launcher, "serve", serve)
    monkeypatch.setattr(log_format, "configure_logging", lambda *_: None)
    return configs


def other_value(field: "dataclasses.Field[Any]") -> tuple[list[str], Any]:
    """Return arguments that set an option to another value than its default, and the value."""
    if field.type is bool:
        return [], True
    if field.name in EXAMPLES:
        return [EXAMPLES[field.name]], EXAMPLES[field.name]
    if "choices" in field.metadata:
        return [field.metadata["choices"][-1]], field.metadata["choices"][-1]
    if typing.get_origin(field.type) is tuple:
        values = ("a", "b") if field.name == "allowed_hosts" else ("https://a=1", "https://b=2")
        return [*values], values
    kind = plain_type(field.type)
    return ["77"], kind("77")


@pytest.mark.parametrize("field", OPTIONS, ids=lambda field: field.name)
def test_every_setting_has_an_option_of_its_type(served: list[ServeConfig], field: "dataclasses.Field[Any]") -> None:
    arguments, value = other_value(field)
    assert value != field.default
    assert cli.main(["serve", f"--{field.name.replace('_', '-')}", *arguments]) == 0
    assert served == [dataclasses.replace(ServeConfig(), **{field.name: value})]


def test_a_list_may_be_json_as_on_the_command_line_of_vllm(served: list[ServeConfig]) -> None:
    assert cli.main(["serve", "--allowed-origins", '["https://a", "https://b"]', "--served-model-name", "[a"]) == 0
    assert served == [ServeConfig(allowed_origins=("https://a", "https://b"), served_model_name=("[a",))]


def test_without_flags_the_defaults_are_served(served: list[ServeConfig]) -> None:
    assert cli.main(["serve"]) == 0
    assert cli.main(["serve", "some/model"]) == 0
    assert served == [ServeConfig(), ServeConfig(model="some/model")]


def test_a_value_out_of_range_is_a_readable_error_and_status_2(
    served: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "ringserve: error: --port is 70000: at most 65535\n"
    assert served == []


@pytest.mark.parametrize("arguments", [["serve", "--port", "many"], ["serve", "--engine", "steam"], ["fly"], []])
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: ringserve" in capsys.readouterr().err


def test_help_tells_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in OPTIONS:
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"].split(";")[0] in text
    assert "(default: 8000)" in text


def test_the_version_is_that_of_the_distribution() -> None:
    command = [sys.executable, "-P", "-m", "ringserve.server.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == importlib.metadata.version("ringserve")
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert done.stdout.strip() == tomllib.loads(project.read_text())["project"]["version"]


def test_pull_prints_the_directory_and_nothing_else() -> None:
    command = [sys.executable, "-P", "-m", "ringserve.server.cli", "pull"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    (line,) = done.stdout.splitlines()
    assert (Path(line) / "tokenizer.json").is_file()
    assert (Path(line) / "config.json").is_file()


def test_a_model_that_cannot_be_made_is_an_error_of_pull(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise StartupError("no space left")

    monkeypatch.setattr(model_path, "pull_default_model", fail)
    assert cli.main(["pull"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "ringserve: error: no space left\n"


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_path, "pull_default_model", interrupted)
    assert cli.main(["pull"]) == 130
