"""Where settings come from, beside the command line: environment variables, and a file of `--config`.

One rule: command line, then environment, then file, then default; a list of one replaces the list of the next.
"""

import dataclasses
import json
import re
import stat
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from ringserve.server.errors import StartupError, shown
from ringserve.server.settings.config import ServeConfig

PREFIX = "RINGSERVE_"
_OTHERS = ("RINGSERVE_CACHE", "RINGSERVE_CONFIG")  # variables that are no settings of the server
_MAX_BITS = 63  # of a whole number: every setting's limit is far below
_MAX_BYTES = 2**20  # of a file; one with every setting has a few thousand
_MAPPING = yaml.SafeLoader.DEFAULT_MAPPING_TAG
_TOML_KEY = re.compile(r"""^[ \t]*["']?([\w-]+)["']?[ \t]*=""", re.MULTILINE)
_SERVICE = re.compile(r"(tcp|udp|sctp)://")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_FIELDS = {field.name: field for field in dataclasses.fields(ServeConfig)}


def of_environment(environment: Mapping[str, str], overridden: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that RINGSERVE_FLAG variables give, for any flag; empty ones give none.

    Args:
        environment: Of the process.
        overridden: Settings that have a value already: theirs are not even read.

    Raises:
        StartupError: Naming the variable whose value does not fit.
    """
    values = {}
    ignored = service_variables(environment)
    for name, field in _FIELDS.items():
        variable = PREFIX + name.upper()
        if name not in overridden and variable not in ignored and (text := environment.get(variable)):
            values[name] = _from_text(field, text, variable)
    return values


def service_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of settings that hold a Service's address instead, as RINGSERVE_PORT.

    Kubernetes gives NAME_PORT=tcp://IP:PORT to every pod of the namespace for each Service, Docker's --link to a
    container; no other setting has a name that they make.
    """
    variable = PREFIX + "PORT"
    return [variable] if _SERVICE.match(environment.get(variable, "")) else []


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the RINGSERVE_ variables that mean nothing; Kubernetes makes some for a service of that name."""
    known = {PREFIX + name.upper() for name in _FIELDS} | {*_OTHERS}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def of_file(file: str, overridden: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of a TOML or YAML file: flags without their dashes, at the top level.

    Args:
        file: Its path.
        overridden: Settings that have a value already: theirs are not even read.

    Raises:
        StartupError: If it cannot be read, or naming the key that is unknown or has a value of another type.
    """
    values: dict[str, Any] = {}
    text = _text_of(Path(file))
    for key, value in _parse(Path(file), text).items():
        field = _FIELDS.get(str(key).replace("-", "_"))
        if field is None:
            raise StartupError(f"{file}: {shown(key)} is no setting: 'ringserve serve --help' lists them")
        if field.name in values:
            raise StartupError(f"{file}: {key} is there twice, with - and with _{_lines(text, field.name)}")
        if value is not None and field.name not in overridden:  # YAML's way to leave a key empty
            values[field.name] = _checked(field, value, f"{file}: {key}")
    return values


def _text_of(path: Path) -> str:
    """Read a file of a known kind; a pipe, which may never come to its end, is none."""
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise StartupError(f"--config: {path} is of no known kind: name it .toml, .yaml or .yml")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise StartupError(f"--config: {path} must be a regular file of at most {_MAX_BYTES} bytes")
        return path.read_text("utf-8-sig")
    except (OSError, ValueError) as exc:  # ValueError: no UTF-8, or a path with NUL
        raise StartupError(f"--config: cannot read {path}: {exc}") from exc


def _parse(path: Path, text: str) -> dict[Any, Any]:
    try:
        if path.suffix == ".toml":
            return _parse_toml(text)
        return _parse_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError) as exc:  # ValueError: no TOML, or no number or date
        raise StartupError(f"--config: cannot read {path}: {exc}") from exc


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        keys = _TOML_KEY.findall(text)
        if "overwrite" in str(exc) and (twice := [key for key in keys if keys.count(key) > 1]):
            raise ValueError(f"{shown(twice[0])} is there twice{_lines(text, twice[0])}") from exc
        raise


def _parse_yaml(text: str) -> dict[Any, Any]:
    """Return what `yaml.safe_load` does, but of no mapping that has a key twice, whose last value would count."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode) or node.tag != _MAPPING:
            raise ValueError("it must hold keys and values")
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{shown(key)} is there twice{_lines(text, key)}")
        content: dict[Any, Any] = loader.construct_document(node)
        return content
    finally:
        loader.dispose()


def _lines(text: str, key: str) -> str:
    """Return where a key stands that is there twice, for a message; nothing where lines do not begin with it."""
    begin = re.compile(rf"\s*[\"']?{'[-_]'.join(map(re.escape, re.split('[-_]', key)))}[\"']?\s*[=:]")
    numbers = [str(number) for number, line in enumerate(text.splitlines(), 1) if begin.match(line)]
    return f", in lines {' and '.join(numbers)}" if len(numbers) > 1 else ""


def plain_type(annotation: Any) -> type:
    """Return int of `int | None`, str of `tuple[str, ...]`, and a plain type as it is."""
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    elif typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    assert isinstance(annotation, type)
    return annotation


def is_list(field: "dataclasses.Field[Any]") -> bool:
    """Whether a setting has several values."""
    return typing.get_origin(field.type) is tuple


def _from_text(field: "dataclasses.Field[Any]", text: str, where: str) -> Any:
    """Return an environment variable's value; a list is separated by commas, or JSON."""
    kind = plain_type(field.type)
    if is_list(field):
        is_json = text.lstrip().startswith("[")
        parts = _json_list(text, where) if is_json else [part.strip() for part in text.split(",") if part.strip()]
        if not parts:  # no list at all: a server that its user believes to have keys would stand open
            raise StartupError(f"{where} is {shown(text)}, which holds nothing: leave it out, or empty")
        return tuple(parts)
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise StartupError(f"{where} is {shown(text)}: must be one of {', '.join(_TRUE + _FALSE)}")
        return text.lower() in _TRUE
    try:
        return kind(text)
    except ValueError as exc:
        raise StartupError(f"{where} is {shown(text)}: must be {_A[kind]}") from exc


def _json_list(text: str, where: str) -> list[str]:
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        # The pieces of a broken list would do as keys, which anybody could guess. The value may be a secret.
        raise StartupError(
            f"{where} begins with [ and is not a JSON list of strings: correct it, or separate the values by commas"
        )
    return parts


def _checked(field: "dataclasses.Field[Any]", value: Any, where: str) -> Any:
    """Return a file's value if it is of the setting's type; a whole number is a fraction too, a text a list of one."""
    kind = plain_type(field.type)
    if is_list(field):
        parts = [value] if isinstance(value, str) else value
        if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
            return tuple(parts)
        is_value = f" is {shown(value)}" if field.repr else ""  # else it is a secret
        raise StartupError(f"{where}{is_value}: must be a list of texts")
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise StartupError(f"{where} is a number of {value.bit_length()} bits: at most {_MAX_BITS}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise StartupError(f"{where} is {shown(value)}: must be {_A[kind]}")
    return value


_A = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
