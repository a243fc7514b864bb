"""The engine process: `python -P -m ringserve.engine CONFIG`, started by the server. CONFIG is one JSON object.

It attaches to the rings and says so before it imports torch, then loads, then runs the loop. It ends when the server
says `shutdown` or dies; SIGINT, SIGTERM and SIGHUP are the server's business, which drains first.
"""

import argparse
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from ringserve.engine.interface import Engine
from ringserve.engine.loop import loop
from ringserve.engine.loop.link import EngineLink
from ringserve.engine.loop.step_log import StepLog
from ringserve.shm_transport import process
from ringserve.shm_transport.errors import PeerDiedError, SegmentError
from ringserve.shm_transport.log_format import configure_logging

logger = logging.getLogger("ringserve.engine")


def main() -> int:
    """Run the engine; return the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -P -m ringserve.engine", description=__doc__)
    parts = '{"link": {...}, "model": {...} or "synthetic": {...}, "step_log": PATH, "log_format": FORM}'
    parser.add_argument("config", help=f"JSON: {parts}")
    config = json.loads(parser.parse_args().config)
    configure_logging(config.get("log_format", "text"), "engine")
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    process.die_with_parent(config["link"]["server_pid"])
    try:
        link = EngineLink(**config["link"])
    except (SegmentError, PeerDiedError) as exc:  # there is nobody to tell but the terminal
        logger.error("%s", exc)
        return 1
    try:
        engine = _load(config)
        step_log = StepLog(Path(config["step_log"])) if config.get("step_log") else None
    except Exception as exc:
        logger.debug("loading failed", exc_info=True)
        link.send_fatal(f"{type(exc).__name__}: {exc}")
        return 1
    try:
        loop.run(engine, link, step_log)
    except PeerDiedError as exc:
        logger.info("%s", exc)
        return 1
    return 0


def _load(config: dict[str, Any]) -> Engine:
    if "synthetic" in config:
        from ringserve.engine.synthetic import SyntheticConfig, SyntheticEngine

        return SyntheticEngine(SyntheticConfig(**config["synthetic"]))
    from ringserve.engine.config import EngineConfig
    from ringserve.engine.core.make import make_engine  # torch comes with this import: after ATTACHED

    return make_engine(EngineConfig(**config["model"]))


if __name__ == "__main__":
    sys.exit(main())
