"""From what the user calls a model to a directory on disk: the default model, a directory, or a hub id."""

import re
import subprocess
import sys
from pathlib import Path

from ringserve.server.errors import StartupError
from ringserve.server.held_signals import held_signals
from ringserve.server.settings.config import ServeConfig

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve(model: str | None) -> Path:
    """Return the model's directory, downloading what is missing.

    Args:
        model: None for the default model; a directory; or a hub id such as HuggingFaceTB/SmolLM2-360M-Instruct.

    Raises:
        StartupError: If there is no such model, or it cannot be downloaded.
    """
    if model is None:
        return pull_default_model()
    if not model:
        raise StartupError("model is '': name a directory or a hub id, or leave it out for the default model")
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise StartupError(f"model is {model!r}: neither a directory nor a hub id (OWNER/NAME)")
    return _download(model)


def locate_tokenizer(config: ServeConfig) -> Path:
    """Return the model's tokenizer.json, downloading what is missing. The synthetic engine takes that file alone too.

    Raises:
        StartupError: As `resolve`.
    """
    path = Path(config.model or "")
    if config.engine == "synthetic" and path.is_file():
        return path.resolve()
    return resolve(config.model) / "tokenizer.json"


def pull_default_model() -> Path:
    """Make the default model if it is not there yet; return its directory.

    The conversion needs torch, so a process of the engine does it; it prints the directory.

    Raises:
        StartupError: If it fails; its messages are on the terminal.
    """
    command = [sys.executable, "-P", "-m", "ringserve.engine.weights.default_model"]
    process = None
    try:
        with held_signals():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        path, _ = process.communicate()
    except BaseException:  # a signal: the process removes what it has begun
        if process is not None:
            process.terminate()
            process.communicate()
        raise
    if process.returncode != 0:
        raise StartupError(f"the default model could not be made (status {process.returncode}): see the messages above")
    return Path(path.strip())


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # 0.1 s to import, and needed only here

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as exc:  # the library raises many kinds: no such repository, no network, gated, disk full
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise StartupError(
            f"model {hub_id!r} is no directory here, and could not be downloaded from the hub: {reason}"
        ) from exc
