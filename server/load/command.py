"""The command `ringserve bench`: runs the load, prints the table, writes the files."""

import json
import os
from pathlib import Path

import uvloop

from ringserve.server.errors import StartupError
from ringserve.server.load import plot
from ringserve.server.load.config import BenchConfig
from ringserve.server.load.figures import summarize, table
from ringserve.server.load.run import Run, run_load


def bench(config: BenchConfig) -> int:
    """Run a load; return the exit status: 0, 1 if no request succeeded, 130 if it was interrupted.

    Raises:
        StartupError: If a flag is wrong, or no server answers.
    """
    if config.plot is not None:
        plot.check_installed()
    for path in filter(None, (config.json, config.plot)):
        _check_writable(Path(path))
    run = uvloop.run(run_load(config))
    summary = summarize(config, run)
    text = table(summary)
    print(text)
    if config.json is not None:
        Path(config.json).write_text(json.dumps(summary, indent=1) + "\n")
    if config.plot is not None:
        plot.plot(run, text.partition("\n")[0], config.plot)
    return _status(run)


def _check_writable(path: Path) -> None:
    """Raise StartupError for a file that could not be written: before a long load, not after it."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise StartupError(f"{path} cannot be written: there is no such directory")
    if path.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise StartupError(f"{path} cannot be written: name a file in a directory that is yours")


def _status(run: Run) -> int:
    if run.is_interrupted:
        return 130
    return 0 if any(not record.error for record in run.records) else 1
