"""Where settings come from, beside the command line: environment variables, and a file of `--config`.

One rule: command line, then environment, then file, then default; a list of one replaces the list of the next.
"""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from server.config import ServeConfig
from server.errors import StartupError, shown

PREFIX = "RINGSERVE_"
_OTHERS = ("RINGSERVE_CACHE", "RINGSERVE_CONFIG")  # variables that are no settings of the server
_MAX_BITS = 63  # of a whole number: every setting's limit is far below
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_FIELDS = {field.name: field for field in dataclasses.fields(ServeConfig)}


def of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that RINGSERVE_FLAG variables give, for any flag; empty ones give none.

    Raises:
        StartupError: Naming the variable whose value does not fit.
    """
    values = {}
    for name, field in _FIELDS.items():
        variable = PREFIX + name.upper()
        if text := environment.get(variable):
            values[name] = _from_text(field, text, variable)
    return values


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the RINGSERVE_ variables that mean nothing; Kubernetes makes some for a service of that name."""
    known = {PREFIX + name.upper() for name in _FIELDS} | {*_OTHERS}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def of_file(file: str) -> dict[str, Any]:
    """Return the settings of a TOML or YAML file: flags without their dashes, at the top level.

    Raises:
        StartupError: If it cannot be read, or naming the key that is unknown or has a value of another type.
    """
    values: dict[str, Any] = {}
    for key, value in _read(Path(file)).items():
        field = _FIELDS.get(str(key).replace("-", "_"))
        if field is None:
            raise StartupError(f"{file}: {shown(key)} is no setting: 'ringserve serve --help' lists them")
        if field.name in values:
            raise StartupError(f"{file}: {key} is there twice, with - and with _")
        if value is not None:  # YAML's way to leave a key empty
            values[field.name] = _checked(field, value, f"{file}: {key}")
    return values


def _read(path: Path) -> dict[Any, Any]:
    try:
        if path.suffix == ".toml":
            return tomllib.loads(path.read_text("utf-8-sig"))
        if path.suffix in (".yaml", ".yml"):
            content = yaml.safe_load(path.read_text("utf-8-sig"))
        else:
            raise StartupError(f"--config: {path} is of no known kind: name it .toml, .yaml or .yml")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as exc:  # ValueError: no UTF-8, TOML, number or date
        raise StartupError(f"--config: cannot read {path}: {exc}") from exc
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartupError(f"--config: {path} must hold keys and values")
    return content


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
        parts = _json_list(text) or [part.strip() for part in text.split(",") if part.strip()]
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


def _json_list(text: str) -> list[str]:
    try:
        value = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return []
    return [str(part) for part in value] if isinstance(value, list) else []


def _checked(field: "dataclasses.Field[Any]", value: Any, where: str) -> Any:
    """Return a file's value if it is of the setting's type; a whole number is a fraction too, a text a list of one."""
    kind = plain_type(field.type)
    if is_list(field):
        parts = [value] if isinstance(value, str) else value
        if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
            return tuple(parts)
        raise StartupError(f"{where} is {shown(value)}: must be a list of texts")
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise StartupError(f"{where} is a number of {value.bit_length()} bits: at most {_MAX_BITS}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise StartupError(f"{where} is {shown(value)}: must be {_A[kind]}")
    return value


_A = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
