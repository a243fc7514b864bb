"""transformers' logits for the self-check, kept between starts: making them takes longer than the rest of a start.

The check itself is run at every start. A file's name is a digest of all that its content depends on: versions, dtype,
the config, and size and time of each weight file.
"""

import hashlib
import importlib.metadata
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ringserve.engine.weights.checkpoint import weight_files
from ringserve.engine.weights.default_model import default_cache_root

logger = logging.getLogger(__name__)

_MAX_FILES = 16  # some megabytes each, for models with large vocabularies
_FORMAT = 1  # raise it when the check asks for other logits


def load_or_make(path: str, dtype: torch.dtype, sequences: list[list[int]], make: Callable[[], Tensor]) -> Tensor:
    """Return the reference logits of the model at `path`, from the cache or from `make`."""
    file = default_cache_root().expanduser() / "self_checks" / f"{_digest(path, dtype, sequences)}.npy"
    try:
        return torch.from_numpy(np.load(file))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as exc:
        logger.warning("%s cannot be read, it is made anew: %s", file, exc)
    logits = make()
    try:
        _write(file, logits)
    except OSError as exc:  # a start without the cache is slower, no more
        logger.warning("%s cannot be kept, the next start is as slow as this one: %s", file, exc)
    return logits


def _digest(path: str, dtype: torch.dtype, sequences: list[list[int]]) -> str:
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(path)]
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    config = (Path(path) / "config.json").read_text("utf-8")
    facts = (_FORMAT, versions, str(dtype), sequences, str(Path(path).resolve()), config, stats)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _write(file: Path, logits: Tensor) -> None:
    """Write by rename, so that two starts at once disturb nobody."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as unfinished:
        np.save(unfinished, logits.numpy())
    Path(unfinished.name).replace(file)
    for old in sorted(file.parent.glob("*.npy"), key=lambda each: each.stat().st_mtime)[:-_MAX_FILES]:
        old.unlink(missing_ok=True)
