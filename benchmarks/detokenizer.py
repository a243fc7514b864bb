"""How much does one more token's text cost, and does the cost grow with the output? ns a token.

    python -m benchmarks.detokenizer [--quick] [--json PATH]

The server's detokenizer against tokenizers' DecodeStream and against repeated full decode: decode everything so far
with each token. Each makes its state for an output of 128 or 32k tokens and takes token by token; all must give the
same text. Vocabularies: SmolLM2 (byte-level, 49k), Llama 3 (byte-level, 128k), Llama 2 (SentencePiece with byte
fallback, 32k). The last two are those that tests/server/text/test_detokenizer.py fetches; where it never ran they are
left out, with a word.

Paths take turns, round by round. The text repeats English prose with a little of other scripts and emoji; short
outputs begin here and there in it, so that short and long ones are of the same tokens. Full decode is timed at points
spread evenly over the output. The tables are warm: a token's first look-up is not in the figures.
"""

import argparse
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import DecodeStream

from benchmarks import report
from benchmarks.report import Target
from ringserve.server.settings import model_path
from ringserve.server.text.tokenizer import Tokenizer

OURS, STREAM, FULL = "ringserve", "DecodeStream", "full decode"
LENGTHS = (128, 32_768)
NUM_FULL_POINTS = 8  # of each output
NUM_STARTS = 32
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringserve" / "test-tokenizers"
TEXT = (
    (Path(__file__).parents[1] / "engine" / "synthetic_text.txt").read_text()
    + "\nЖили-были старик со старухой у самого синего моря. 吾輩は猫である。名前はまだ無い。 "
    + "Größe, déjà vu, naïve: “quotes” … 🎉👩‍👩‍👧‍👦 देवनागरी 한국어 العربية.\n"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to decode one vocabulary at one output length."""

    vocabulary: str
    num_tokens: int
    path: str


class Vocabulary:
    """A tokenizer, and the three ways to decode with it."""

    def __init__(self, file: Path) -> None:
        self._ours = Tokenizer.load(file)
        self._library = LibraryTokenizer.from_file(str(file))
        self._ids: list[int] = self._library.encode(TEXT, add_special_tokens=False).ids
        self._prompt: list[int] = self._library.encode("Once upon a time").ids
        self.size = self._library.get_vocab_size()

    def outputs(self, num_tokens: int) -> list[list[int]]:
        """Return outputs of this length, the text again and again: a long one, or short ones from NUM_STARTS places."""
        is_long = num_tokens > len(self._ids)
        starts = [0] if is_long else range(0, len(self._ids), len(self._ids) // NUM_STARTS)
        text = self._ids * (num_tokens // len(self._ids) + 2)
        return [text[start:][:num_tokens] for start in map(self._next_character, starts)]

    def _next_character(self, start: int) -> int:
        while self._library.decode(self._ids[:start]).endswith("\ufffd"):
            start += 1
        return start

    def ours(self, token_ids: list[int]) -> list[str]:
        """Decode as generation/output_processor.py does: the ready text, with its JSON string, or else `decode`."""
        detokenizer = self._ours.detokenizer(self._prompt, skip_special_tokens=True)
        ready, decode = detokenizer.ready, detokenizer.decode
        return [decode(token_id) if (piece := ready(token_id)) is None else piece[0] for token_id in token_ids]

    def stream(self, token_ids: list[int]) -> list[str]:
        """Decode with the library's stream."""
        step, library = DecodeStream(ids=self._prompt, skip_special_tokens=True).step, self._library
        return [step(library, token_id) or "" for token_id in token_ids]

    def full(self, token_ids: list[int]) -> str:
        """Return the output's text, from one decode of prompt and output; without a character that is incomplete."""
        before, whole = self._library.decode(self._prompt), self._library.decode(self._prompt + token_ids)
        return str(whole[len(before) :]).rstrip("\ufffd")

    def ns_a_token(self, path: str, token_ids: list[int]) -> float:
        """Time one output by one path."""
        if path == FULL:
            points = range(len(token_ids) // NUM_FULL_POINTS, len(token_ids) + 1, len(token_ids) // NUM_FULL_POINTS)
            prefixes = [self._prompt + token_ids[:end] for end in points]
            started = time.perf_counter_ns()
            for prefix in prefixes:
                self._library.decode(prefix)
            return (time.perf_counter_ns() - started) / len(prefixes)
        decode = self.ours if path == OURS else self.stream
        started = time.perf_counter_ns()
        decode(token_ids)
        return (time.perf_counter_ns() - started) / len(token_ids)

    def check(self, name: str, num_tokens: int) -> None:
        """Hold that every path gives the same text; it warms them up besides.

        Raises:
            RuntimeError: If one does not.
        """
        for token_ids in self.outputs(num_tokens):
            whole = self.full(token_ids)
            for path, texts in ((OURS, self.ours(token_ids)), (STREAM, self.stream(token_ids))):
                if "".join(texts) != whole:
                    raise RuntimeError(f"{name}, {num_tokens} tokens: {path} gives another text than one full decode")


def vocabularies() -> dict[str, Vocabulary]:
    """Return those that this machine has, by name."""
    files = {"SmolLM2": model_path.resolve(None) / "tokenizer.json"}
    for name, pattern in (("Llama 3", "llama3-*.json"), ("Llama 2", "llama2-*.json")):
        found = sorted(CACHE.glob(pattern))
        if found:
            files[name] = found[-1]
        else:
            print(f"left out: {name}. There is no {CACHE / pattern}; tests/server/text/test_detokenizer.py fetches it")
    return {name: Vocabulary(file) for name, file in files.items()}


def measure(known: dict[str, Vocabulary], num_rounds: int, console: Console) -> dict[Cell, list[float]]:
    """Check, then time every cell in turn, round by round."""
    for name, vocabulary in known.items():
        for num_tokens in LENGTHS:
            vocabulary.check(name, num_tokens)
    cells = [Cell(name, length, path) for name in known for length in LENGTHS for path in (OURS, STREAM, FULL)]
    samples: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for _ in track(range(num_rounds), "measuring", console=console):
        for cell, ns in samples.items():
            vocabulary = known[cell.vocabulary]
            outputs = vocabulary.outputs(cell.num_tokens)
            ns.append(statistics.mean(vocabulary.ns_a_token(cell.path, token_ids) for token_ids in outputs))
    return samples


def targets_of(samples: dict[Cell, list[float]]) -> list[Target]:
    """Compare with DecodeStream in the same round, and a long output with a short one."""
    targets = []
    for name in dict.fromkeys(cell.vocabulary for cell in samples):
        key = name.lower().replace(" ", "")
        for num_tokens in LENGTHS:
            ours, stream = (samples[Cell(name, num_tokens, path)] for path in (OURS, STREAM))
            gain = statistics.median(theirs / mine for mine, theirs in zip(ours, stream, strict=True))
            targets.append(Target(f"{key}_{num_tokens}_tokens_decode_stream_vs_ours", gain, 2, is_upper_bound=False))
        short, long = (statistics.median(samples[Cell(name, num_tokens, OURS)]) for num_tokens in LENGTHS)
        targets.append(Target(f"{key}_ns_a_token_long_vs_short_output", long / short, 1.2))
    return targets


def show(samples: dict[Cell, list[float]], known: dict[str, Vocabulary], console: Console) -> None:
    """Print the table."""
    table = Table(title="ns a token, medians", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("vocabulary", "entries", "output", OURS, STREAM, FULL):
        table.add_column(column, justify="left" if column == "vocabulary" else "right", no_wrap=True)
    for name, vocabulary in known.items():
        for num_tokens in LENGTHS:
            medians = [statistics.median(samples[Cell(name, num_tokens, path)]) for path in (OURS, STREAM, FULL)]
            table.add_row(name, str(vocabulary.size), str(num_tokens), *(f"{ns:.0f}" for ns in medians))
    console.print(table)


def main() -> None:
    """Run, print, and save."""
    options = report.parse_arguments(argparse.ArgumentParser(description=__doc__), "detokenizer")
    console = Console()
    known = vocabularies()
    samples = measure(known, 7 if options.quick else 25, console)
    show(samples, known, console)
    cells = [asdict(cell) | {"ns": statistics.median(ns), "round_ns": ns} for cell, ns in samples.items()]
    sizes = {name: vocabulary.size for name, vocabulary in known.items()}
    result = {"is_quick": options.quick, "vocabulary_sizes": sizes, "cells": cells}
    report.finish(options.json, "detokenizer", result, targets_of(samples))


if __name__ == "__main__":
    main()
