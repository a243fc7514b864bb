"""Settings from a file and from the environment, and who wins."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from ringserve.server import cli, launcher
from ringserve.server.errors import StartupError
from ringserve.server.settings import config_file
from ringserve.server.settings.config import ServeConfig
from ringserve.shm_transport import log_format
from tests.server.test_cli import EXAMPLES

FIELDS = dataclasses.fields(ServeConfig)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """Keep the configurations that would be served."""
    configs: list[ServeConfig] = []
    monkeypatch.setattr(launcher, "serve", lambda config: configs.append(config) or 0)
    monkeypatch.setattr(log_format, "configure_logging", lambda *_: None)
    return configs


def written(tmp_path: Path, text: str | bytes, suffix: str = ".toml") -> str:
    file = tmp_path / f"config{suffix}"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def value_of(field: "dataclasses.Field[Any]") -> tuple[Any, str]:
    """Return a value that a field can have beside its default, and how a variable says it."""
    if field.type is bool:
        return True, "true"
    if "choices" in field.metadata:
        return field.metadata["choices"][-1], field.metadata["choices"][-1]
    if config_file.is_list(field):
        values = ("a", "b") if field.name == "allowed_hosts" else ("https://a=1", "https://b=2")
        return values, ", ".join(values)
    if field.name in EXAMPLES:
        return EXAMPLES[field.name], EXAMPLES[field.name]
    return config_file.plain_type(field.type)(77), "77"


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_flag_has_its_variable_and_its_key(field: "dataclasses.Field[Any]", tmp_path: Path) -> None:
    value, text = value_of(field)
    assert config_file.of_environment({f"RINGSERVE_{field.name.upper()}": text}) == {field.name: value}
    for key in (field.name, field.name.replace("_", "-")):
        json_value = list(value) if isinstance(value, tuple) else value
        toml = {True: "true"}.get(json_value, repr(json_value)) if not isinstance(json_value, list) else str(json_value)
        assert config_file.of_file(written(tmp_path, f"{key} = {toml}")) == {field.name: value}
        assert config_file.of_file(written(tmp_path, f"{key}: {toml}", ".yaml")) == {field.name: value}
    assert dataclasses.replace(ServeConfig(), **{field.name: value}) != ServeConfig()


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(
        tmp_path, 'port = 1\nhost = "a"\nmax-body-mb = 2\nkeep_alive_on_engine_death = true\nserved-model-name = ["f"]'
    )
    monkeypatch.setenv("RINGSERVE_PORT", "3")
    monkeypatch.setenv("RINGSERVE_HOST", "b")
    monkeypatch.setenv("RINGSERVE_CONFIG", file)
    assert cli.main(["serve", "--port", "4"]) == 0
    assert cli.main(["serve", "--config", file, "--no-keep-alive-on-engine-death", "--served-model-name", "c"]) == 0
    of_file = {"host": "b", "max_body_mb": 2}
    assert served == [
        ServeConfig(port=4, keep_alive_on_engine_death=True, served_model_name=("f",), **of_file),
        ServeConfig(port=3, served_model_name=("c",), **of_file),
    ]


def test_a_list_option_may_be_repeated(served: list[ServeConfig]) -> None:
    assert cli.main(["serve", "--api-key", "a", "--api-key", "b", "c"]) == 0
    assert served == [ServeConfig(api_key=("a", "b", "c"))]


@pytest.mark.parametrize(
    ("text", "message"),
    [("prot = 1", "'prot' is no setting"), ("[server]\nport = 1", "'server' is no setting"),
     ('port = "1"', "port is '1': must be a whole number"), ("port = true", "port is True: must be a whole number"),
     ("port = 1.0", "must be a whole number"), ("host = 1", "must be a text"), ("overlap = true", "must be a text"),
     ("allow_credentials = 1", "must be true or false"), ("api_key = [1]", "must be a list of texts"),
     ("drain_timeout = '3'", "must be a number"), ("max-body-mb = 1\nmax_body_mb = 1", "twice"),
     ("port = ", "cannot read"), ("drain-timeout = 1" + "0" * 400, "a number of"),
     ("port = 0x" + "f" * 5000, "a number of"),
     ("port = 1" + "0" * 5000, "cannot read")],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_key_or_value_that_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        config_file.of_file(written(tmp_path, text))


@pytest.mark.parametrize("form", ["port: 1\nhost: a\n{}: 2", "a: |\n  port: 0\n{}: 1\nport: 2", "{{port: 1, {}: 2}}"])
def test_a_yaml_key_that_is_there_twice_is_named_and_not_the_last_one_taken(tmp_path: Path, form: str) -> None:
    with pytest.raises(StartupError, match=r"config.yaml: 'port' is there twice(, in lines \d( and \d)+)?$"):
        config_file.of_file(written(tmp_path, form.format("port"), ".yaml"))
    with pytest.raises(StartupError, match=r"config.yaml: 'port' is there twice, in lines 1 and 3$"):
        config_file.of_file(written(tmp_path, "port: 1\nhost: a\n'port': 1", ".yaml"))


def test_a_toml_key_that_is_there_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config.toml: 'max-body-mb' is there twice, in lines 1 and 3$"):
        config_file.of_file(written(tmp_path, 'max-body-mb = 1\nhost = "a"\n"max-body-mb" = 2'))
    with pytest.raises(StartupError, match=r"config.toml: 'api_key' is there twice, in lines 2 and 4$"):
        config_file.of_file(written(tmp_path, 'host = "a"\napi_key = [\n]\napi_key = [\n  "a"\n]\nport = 1\n'))


@pytest.mark.parametrize(("suffix", "sign"), [(".toml", "="), (".yaml", ":")])
def test_a_key_in_both_spellings_is_named_with_its_lines(tmp_path: Path, suffix: str, sign: str) -> None:
    text = f"max-body-mb {sign} 1\nport {sign} 1\nmax_body_mb {sign} 2"
    with pytest.raises(StartupError, match=r"max_body_mb is there twice, with - and with _, in lines 1 and 3$"):
        config_file.of_file(written(tmp_path, text, suffix))


def test_a_merged_yaml_key_may_be_overwritten(tmp_path: Path) -> None:
    assert config_file.of_file(written(tmp_path, "<<: {port: 1, host: a}\nport: 2", ".yaml")) == {
        "port": 2,
        "host": "a",
    }


@pytest.mark.parametrize(("suffix", "text"), [(".toml", "api_key = 12345"), (".yaml", "api_key: {s: 12345}")])
def test_a_key_of_a_wrong_type_is_not_told(tmp_path: Path, suffix: str, text: str) -> None:
    with pytest.raises(StartupError, match="api_key") as caught:
        config_file.of_file(written(tmp_path, text, suffix))
    assert "12345" not in str(caught.value)


def test_what_is_no_file_of_a_sane_size_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe, folder, large = tmp_path / "pipe.yaml", tmp_path / "folder.toml", tmp_path / "large.yaml"
    os.mkfifo(pipe)
    folder.mkdir()
    large.touch()
    os.truncate(large, 2**40)
    for path in (pipe, folder, large):
        with pytest.raises(StartupError, match=f"--config: {path} must be a regular file of at most"):
            config_file.of_file(str(path))


@pytest.mark.parametrize(
    ("variable", "text"),
    [("RINGSERVE_PORT", "http://10.0.0.1:80"), ("RINGSERVE_PORT", "tcp"), ("RINGSERVE_MAX_BODY_MB", "tcp://10.0.0.1:80"),
     ("RINGSERVE_ALLOW_CREDENTIALS", "maybe"), ("RINGSERVE_DRAIN_TIMEOUT", "s")],
)  # fmt: skip
def test_a_variable_that_does_not_fit_is_named(variable: str, text: str) -> None:
    with pytest.raises(StartupError, match=f"^{variable} is '{text}': must be"):
        config_file.of_environment({variable: text})


SERVICES = ["tcp://10.43.1.39:8000", "udp://10.0.0.1:53", "sctp://10.0.0.1:36412", "tcp://[fd00::1]:8000"]


@pytest.mark.parametrize("address", SERVICES)
def test_the_address_of_a_service_of_that_name_is_ignored_with_a_warning(
    address: str, served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGSERVE_PORT", address)
    monkeypatch.setenv("RINGSERVE_HOST", "::")
    assert cli.main(["serve", "--port", "4"]) == cli.main(["serve"]) == 0
    assert served == [ServeConfig(host="::", port=4), ServeConfig(host="::")]
    assert caplog.text.count(f"RINGSERVE_PORT is '{address}'") == 2


WRONG = {"port": "many", "max_body_mb": "1.5", "drain_timeout": "s", "allow_credentials": "maybe", "api_key": ","}
GIVEN = ["--port", "4", "--max-body-mb", "1", "--drain-timeout", "5", "--allow-credentials", "--api-key", "k"]


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_the_command_line_overrides_is_no_error(
    name: str, served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"RINGSERVE_{name.upper()}", WRONG[name])
    assert cli.main(["serve"]) == 2
    assert cli.main(["serve", *GIVEN]) == 0
    monkeypatch.delenv(f"RINGSERVE_{name.upper()}")
    file = written(tmp_path, f"{name} = {{}}")
    assert cli.main(["serve", "--config", file]) == 2
    assert cli.main(["serve", "--config", file, *GIVEN]) == 0
    assert len(served) == 2


def test_a_value_of_the_file_that_the_environment_overrides_is_no_error(
    served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGSERVE_PORT", "5")
    assert cli.main(["serve", "--config", written(tmp_path, 'port = "many"')]) == 0
    assert served == [ServeConfig(port=5)]


@pytest.mark.parametrize("text", [",", " ", " , ,", "[]", " [ ] "])
def test_a_variable_that_holds_no_part_of_a_list_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"^RINGSERVE_API_KEY is .* holds nothing"):  # else no key were asked for
        config_file.of_environment({"RINGSERVE_API_KEY": text})


@pytest.mark.parametrize(("suffix", "text"), [(".toml", "port = 1"), (".yaml", "port: 1")])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, suffix: str, text: str) -> None:
    assert config_file.of_file(written(tmp_path, "\ufeff" + text, suffix)) == {"port": 1}


def test_a_value_out_of_range_is_refused_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGSERVE_PORT", "70000")
    assert cli.main(["serve"]) == 2
    assert "--port is 70000: at most 65535" in capsys.readouterr().err


def test_variables_that_mean_nothing_are_known_and_change_nothing() -> None:
    given = {"RINGSERVE_PROT": "1", "RINGSERVE_SERVICE_HOST": "10.0.0.1", "RINGSERVE_CACHE": "/c", "RINGSERVE_PORT": ""}
    assert config_file.of_environment(given) == {}
    assert config_file.unknown_variables(given) == ["RINGSERVE_PROT", "RINGSERVE_SERVICE_HOST"]


@pytest.mark.parametrize(
    ("suffix", "text"),
    [(".json", "{}"), (".yaml", "- a"), (".yaml", "a: b: c"), (".yml", "text"), (".toml", "a"),
     (".yaml", "!!set {port}"), (".yaml", b"host: \xff"), (".toml", b'host = "\xff"'),
     (".yaml", "a: " + "[" * 3000), (".toml", "a = " + "[" * 3000), (".yaml", "port: 2020-13-45"),
     (".yaml", "port: 1" + "0" * 5000)],
    ids=lambda text: str(text[:20]),
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path: Path, suffix: str, text: str | bytes) -> None:
    with pytest.raises(StartupError, match="--config"):
        config_file.of_file(written(tmp_path, text, suffix))


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read"):
        config_file.of_file(written(tmp_path, "host: !!python/object/apply:os.getcwd []", ".yaml"))


def test_an_empty_file_and_empty_yaml_keys_set_nothing(tmp_path: Path) -> None:
    assert config_file.of_file(written(tmp_path, "", ".yaml")) == {}
    assert config_file.of_file(written(tmp_path, "host:\nport: 1", ".yaml")) == {"port": 1}


def test_a_missing_file_is_an_error_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--config", "/no/such.toml"]) == 2
    assert "cannot read /no/such.toml" in capsys.readouterr().err


def test_a_variable_may_hold_a_json_list() -> None:
    environment = {"RINGSERVE_API_KEY": ' ["a", "b,c"]\n'}
    assert config_file.of_environment(environment) == {"api_key": ("a", "b,c")}


@pytest.mark.parametrize("text", ['["k",]', '["k"', '["k", null]', '["k", 1]', '[["k"]]', "[k]", "[" * 100_000])
def test_a_variable_that_holds_a_broken_json_list_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(StartupError) as caught:  # else the server were open to a key like ] or None
        config_file.of_environment({"RINGSERVE_API_KEY": text})
    assert str(caught.value).startswith("RINGSERVE_API_KEY begins with [ and is not a JSON list of strings")
    assert "k" not in str(caught.value).partition(":")[0]
