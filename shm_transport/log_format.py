"""How log lines of both processes look: text, in colour on a terminal, or one JSON object a line."""

import json
import logging
import sys
import time
from typing import TextIO

FORMATS = ("text", "json")

_COLOURS = {logging.DEBUG: "2", logging.INFO: "32", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
_FORM = "%(levelname)s [{process}] %(message)s"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, process, logger, message, and the traceback if there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{at}.{record.msecs:03.0f}Z", "level": record.levelname, "process": self._process,
            "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class ColourFormatter(logging.Formatter):
    """The text form with its level in colour."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        name, line = record.levelname, super().format(record)
        return f"\033[{_COLOURS.get(record.levelno, '0')}m{name}\033[0m{line.removeprefix(name)}"


def configure_logging(form: str, process: str, stream: TextIO | None = None) -> None:
    """Send the log, and Python's warnings, to `stream`, at level INFO.

    Args:
        form: One of FORMATS.
        process: What each line calls this process.
        stream: In text form its lines are coloured if it is a terminal; None: standard error.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter((ColourFormatter if stream.isatty() else logging.Formatter)(_FORM.format(process=process)))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
