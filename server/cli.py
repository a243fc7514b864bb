"""The command line: `ringserve serve [MODEL]`, `bench URL`, `pull`. Options are made from the configs."""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringserve.server.errors import StartupError, shown
from ringserve.server.load.config import BenchConfig
from ringserve.server.settings import config_file
from ringserve.server.settings.config import ServeConfig
from ringserve.shm_transport import log_format

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit status: 0 well ended, 1 the engine died, 2 a bad flag, model or port."""
    _open_standard_streams()
    options = _parser().parse_args(arguments)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {"serve": _serve, "bench": _bench, "pull": _pull}
    try:
        return commands[options.command](options)
    except StartupError as exc:
        print(f"ringserve: error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """Give those that were closed (`2>&-`) to /dev/null: else a connection gets the number, and what is said there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode)  # noqa: SIM115  # for as long as the process lives
            os.set_inheritable(stream.fileno(), True)  # the engine speaks there too
            setattr(sys, name, stream)


def _serve(options: argparse.Namespace) -> int:
    given = _given(options, ServeConfig)
    file = options.config or os.environ.get("RINGSERVE_CONFIG")
    settings = given | config_file.of_environment(os.environ, overridden=given)
    if file:
        settings |= config_file.of_file(file, overridden=settings)
    config = ServeConfig(**settings)
    from ringserve.server import launcher  # after the flags are checked: --help and errors need none of it

    log_format.configure_logging(config.log_format, "server")
    for name in config_file.unknown_variables(os.environ):
        logger.warning("the environment variable %s is no setting: it changes nothing", name)
    for name in config_file.service_variables(os.environ):
        logger.warning(
            "the environment variable %s is %s, the address of a Service of that name: it is ignored; rename the "
            "Service, or set enableServiceLinks to false, to set the port so", name, shown(os.environ[name]),
        )  # fmt: skip
    return launcher.serve(config)


def _bench(options: argparse.Namespace) -> int:
    config = BenchConfig(**_given(options, BenchConfig))
    from ringserve.server.load import command  # aiohttp takes as long to import as the server

    return command.bench(config)


def _given(options: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """Return those of the config's fields that the command line has."""
    given, names = vars(options), {field.name for field in dataclasses.fields(config)}
    return {name: _listed(value) for name, value in given.items() if name in names}


def _listed(value: Any) -> Any:
    """Return an option's list as a tuple; it may also be given as one JSON list, as vLLM's command line has it."""
    if not isinstance(value, list):
        return value
    if len(value) == 1 and value[0].startswith("["):
        with contextlib.suppress(ValueError):
            return tuple(map(str, json.loads(value[0])))
    return tuple(value)


def _pull(_: argparse.Namespace) -> int:
    from ringserve.server.settings.model_path import pull_default_model

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
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="a local Hugging Face directory or a hub id; SmolLM2-135M-Instruct if there is none",
    )
    serve.add_argument(
        "--config", metavar="FILE", help="a TOML or YAML file with any of these, dashes aside; RINGSERVE_FLAG "
        "variables come before it, the command line before both",
    )  # fmt: skip
    _add_options(serve, ServeConfig, positional="model")
    bench = commands.add_parser(
        "bench",
        help="measure a server: latencies and throughput under load",
        description="Put load on any OpenAI-compatible server; print what its users would see.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=34),
    )
    bench.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    _add_options(bench, BenchConfig, positional="url")
    commands.add_parser("pull", help="download and convert the default model, and print its directory")
    return parser


def _add_options(parser: argparse.ArgumentParser, config: type[Any], *, positional: str) -> None:
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.name != positional:
            title = field.metadata.get("group", "server and engine")
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_option(groups[title], field)


def _add_option(parser: Any, field: "dataclasses.Field[Any]") -> None:
    has_default = field.default not in (None, ()) and field.type is not bool
    shown = f" (default: {field.default})" if has_default else ""
    options: dict[str, Any] = {"help": field.metadata["help"] + shown, "default": argparse.SUPPRESS}
    if field.type is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": config_file.plain_type(field.type), "metavar": field.metadata["metavar"]}
        options |= {"choices": field.metadata["choices"]} if "choices" in field.metadata else {}
        options |= {"nargs": "+", "action": "extend"} if config_file.is_list(field) else {}
    parser.add_argument(f"--{field.name.replace('_', '-')}", **options)


if __name__ == "__main__":
    sys.exit(main())
