"""The prompts of a load: random words, or the lines of a file."""

import json
from pathlib import Path

import numpy as np

from ringserve.server.errors import StartupError
from ringserve.server.load.config import BenchConfig

# Common words: with the space before it, each is one token of the usual vocabularies.
_WORDS = """
the of and to in is that it was for on are as with his they at be this have from or one had by word but not what all
were we when your can said there use an each which she do how their if will up other about out many then them these so
some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good sentence man think say great where help through much
before line right too mean old any same tell boy follow came want show also around form three small set put end does
another well large must big even such because turn here why ask went men read need land different home us move try kind
hand picture again change off play spell air away animal house point page letter mother answer found study still learn
"""


def make_prompts(config: BenchConfig) -> list[str]:
    """Return a prompt for each request, warm-ups first.

    Raises:
        StartupError: If the file cannot be read or has none.
    """
    num_prompts = config.num_warmups + config.num_prompts
    if config.prompts_file is None:
        words = np.array(_WORDS.split())
        picks = np.random.default_rng(config.seed).integers(len(words), size=(num_prompts, config.input_len))
        return [" ".join(words[row]) for row in picks]
    prompts = _read(Path(config.prompts_file))
    return [prompts[i % len(prompts)] for i in range(num_prompts)]


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        prompts = [_prompt(line) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise StartupError(f"--prompts-file {path} has no prompts that can be read: {exc!r}") from exc
    if not prompts:
        raise StartupError(f"--prompts-file {path} has no prompts")
    return prompts


def _prompt(line: str) -> str:
    return str(json.loads(line)["prompt"]) if line.startswith("{") else line
