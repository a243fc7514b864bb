"""The command line: `ringserve serve [MODEL]`, `ringserve pull`. Options are made from the fields of ServeConfig."""

import argparse
import dataclasses
import functools
import importlib.metadata
import sys
import types
import typing
from typing import Any

from server.config import ServeConfig
from server.errors import StartupError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit status: 0 well ended, 1 the engine died, 2 a bad flag, model or port."""
    options = _parser().parse_args(arguments)
    try:
        return _pull() if options.command == "pull" else _serve(options)
    except StartupError as exc:
        print(f"ringserve: error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(options: argparse.Namespace) -> int:
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(ServeConfig)}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    config = ServeConfig(**values)
    from server import launcher  # after the flags are checked: --help and errors need none of it

    launcher.configure_logging()
    return launcher.serve(config)


def _pull() -> int:
    from server.model_path import pull_default_model

    print(pull_default_model())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringserve", description="A single-node LLM server for people who care about latency."
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("ringserve"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API",
        description="Serve a model over an OpenAI-compatible API.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=34),
    )
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a local Hugging Face directory or a hub id; SmolLM2-135M-Instruct if there is none",
    )
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(ServeConfig):
        if field.name != "model":
            title = field.metadata.get("group", "server and engine")
            if title not in groups:
                groups[title] = serve.add_argument_group(title)
            _add_option(groups[title], field)
    commands.add_parser("pull", help="download and convert the default model, and print its directory")
    return parser


def _add_option(parser: Any, field: "dataclasses.Field[Any]") -> None:
    has_default = field.default not in (None, ()) and field.type is not bool
    shown = f" (default: {field.default})" if has_default else ""
    options: dict[str, Any] = {"help": field.metadata["help"] + shown, "default": field.default}
    if field.type is bool:
        options["action"] = "store_true"
    else:
        options |= {"type": _plain_type(field.type), "metavar": field.metadata["metavar"]}
        options |= {"choices": field.metadata["choices"]} if "choices" in field.metadata else {}
        options |= {"nargs": "+"} if typing.get_origin(field.type) is tuple else {}
    parser.add_argument(f"--{field.name.replace('_', '-')}", **options)


def _plain_type(annotation: Any) -> type:
    """Return int of `int | None`, str of `tuple[str, ...]`, and a plain type as it is."""
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    elif typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    assert isinstance(annotation, type)
    return annotation


if __name__ == "__main__":
    sys.exit(main())
