"""Is this tree slower than another commit? Ratios of the same figure, this tree's over the other's, measured in pairs.

    python -m benchmarks.compare BENCHMARK --against REF [--pairs N] [--bound 1.05] [--cells TEXT] [--json PATH]

REF is checked out into a worktree of its own. Each tree runs its own code, benchmark and product, in a process of its
own (compare_worker.py); both are there all the time, and one of them measures at once. A round of one cell here and the
same round there are a pair, in turns of who begins, so that what the machine does meanwhile meets both.

Printed for each figure: the median of the pairs' ratios, and the interval that holds the true median with 95 %
(order statistics; nothing is assumed of the noise). The exit status is 1 if one whole interval is above the bound.

A benchmark takes part by `open_cells`, a context manager that yields cells by name. A cell measures one round each time
that it is called and returns figures by name, all of them better when they are smaller.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import report
from benchmarks.report import Target
from ringserve.shm_transport import process

ROOT = Path(__file__).parents[1]
BENCHMARKS = ("output_path", "transport", "engine")
MIN_PAIRS = 6  # fewer have no interval that holds the median with 95 %
_WORKER = Path(__file__).with_name("compare_worker.py")

Figures = dict[str, float]
Ratios = dict[tuple[str, str], list[float]]  # cell, figure -> one ratio a pair


class Tree:
    """One tree's benchmark, at rest until it is told to measure."""

    def __init__(self, root: Path, benchmark: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # what its servers say, of interest if it fails
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), benchmark], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=self._log, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
            preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # no threads yet
        )  # fmt: skip
        self.root = root

    @functools.cached_property
    def cells(self) -> list[str]:
        """Wait until it is ready, and return the names of its cells."""
        names: list[str] = self._read()
        return names

    def measure(self, cell: str) -> Figures:
        """Run one round of a cell."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cell}\n")
        self._process.stdin.flush()
        figures: Figures = self._read()
        return figures

    def close(self) -> None:
        """End it, and what it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._log.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            self._log.seek(0)
            raise SystemExit(f"the benchmark of {self.root} has failed:\n{self._log.read()[-4000:]}")
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure's ratio: the median over all pairs, and the interval that holds the true one with 95 %."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: list[float]) -> "Estimate":
        """Return the estimate from MIN_PAIRS ratios or more.

        The true median lies below the k-th smallest of n ratios only if fewer than k of them are below it: a coin's
        n throws with fewer than k heads.
        """
        ordered, n = sorted(ratios), len(ratios)
        below = [sum(math.comb(n, heads) for heads in range(k)) / 2**n for k in range(n // 2 + 1)]
        k = max(k for k, chance in enumerate(below) if 2 * chance <= 0.05)
        if k == 0:
            raise ValueError(f"{n} ratios have no interval of 95 %: at least {MIN_PAIRS}")
        return cls(statistics.median(ordered), ordered[k - 1], ordered[n - k])


def measure(new: Tree, old: Tree, cells: list[str], num_pairs: int, advance: Callable[[], object]) -> Ratios:
    """Measure each cell in pairs; the first pair of each is thrown away, caches and clocks being cold.

    Args:
        advance: Called after each pair.
    """
    ratios: Ratios = {}
    for pair in range(num_pairs + 1):
        for cell in cells:
            order = (new, old) if pair % 2 else (old, new)
            figures = {tree: tree.measure(cell) for tree in order}
            for name in figures[new].keys() & figures[old].keys() if pair else ():
                ratios.setdefault((cell, name), []).append(figures[new][name] / figures[old][name])
            advance()
    return ratios


@contextlib.contextmanager
def worktree(root: Path, ref: str) -> Iterator[Path]:
    """Check a commit of `root` out into a temporary folder.

    Raises:
        SystemExit: If there is no such commit.
    """
    git = ["git", "-C", str(root)]
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        path = Path(folder) / "tree"
        added = subprocess.run(
            [*git, "worktree", "add", "--quiet", "--detach", str(path), ref], stderr=subprocess.PIPE, text=True
        )
        if added.returncode != 0:
            raise SystemExit(f"{ref} cannot be checked out: {added.stderr.strip()}")
        try:
            yield path
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(path)], check=False)


def compare(root: Path, ref: str, benchmark: str, num_pairs: int, pattern: str, console: Console) -> Ratios:
    """Measure `root` against one of its commits.

    Args:
        pattern: Only cells whose name contains it.
    """
    with contextlib.ExitStack() as stack:
        old, new = (Tree(path, benchmark) for path in (stack.enter_context(worktree(root, ref)), root))
        stack.callback(new.close)
        stack.callback(old.close)
        cells = [cell for cell in new.cells if cell in old.cells and pattern in cell]
        if left_out := [cell for cell in new.cells if cell not in old.cells]:
            console.print(f"{ref} has no {', '.join(left_out)}")
        if not cells:
            raise SystemExit(f"no cell of {benchmark} is in both trees and contains {pattern!r}")
        progress = stack.enter_context(Progress(console=console))
        task = progress.add_task("measuring", total=(num_pairs + 1) * len(cells))
        return measure(new, old, cells, num_pairs, lambda: progress.advance(task))


def show(estimates: dict[tuple[str, str], Estimate], bound: float, console: Console) -> None:
    """Print the table."""
    table = Table(title="this tree over the other", box=box.SIMPLE_HEAD)
    for column in ("cell", "figure", "ratio", "95 % interval", ""):
        table.add_column(column, justify="right" if column == "ratio" else "left", no_wrap=True)
    for (cell, name), it in estimates.items():
        verdict = "slower" if it.low > bound else "faster" if it.high < 1 / bound else ""
        table.add_row(cell, name, f"{it.median:.3f}", f"{it.low:.3f} to {it.high:.3f}", verdict)
    console.print(table)


def main() -> None:
    """Run, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--against", required=True, metavar="REF", help="a commit of this repository")
    parser.add_argument("--pairs", type=int, default=12, metavar="N", help=f"of each cell, at least {MIN_PAIRS} (12)")
    parser.add_argument("--bound", type=float, default=1.05, help="the ratio that no whole interval may exceed (1.05)")
    parser.add_argument("--cells", default="", metavar="TEXT", help="only cells whose name contains it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write what was measured")
    options = parser.parse_args()
    if options.pairs < MIN_PAIRS:
        parser.error(f"--pairs is {options.pairs}: at least {MIN_PAIRS}")
    console = Console()
    console.width = max(console.width, 100)  # the table's
    ratios = compare(ROOT, options.against, options.benchmark, options.pairs, options.cells, console)
    estimates = {key: Estimate.of(values) for key, values in ratios.items()}
    show(estimates, options.bound, console)
    targets = [Target(f"{cell}: {name}, low end", it.low, options.bound) for (cell, name), it in estimates.items()]
    figures = {
        "of": options.benchmark, "against": options.against, "pairs": options.pairs,
        "cells": [
            {"cell": cell, "figure": name, **asdict(it), "ratios": ratios[cell, name]}
            for (cell, name), it in estimates.items()
        ],
    }  # fmt: skip
    if options.json is not None:
        report.save(options.json, "compare", figures, targets)
    sys.exit(not all(target.is_met for target in targets))


if __name__ == "__main__":
    main()
