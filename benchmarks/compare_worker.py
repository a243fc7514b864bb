"""One tree's side of benchmarks.compare: opens a benchmark's cells, and measures a round of one for each line of stdin.

    PYTHONPATH=TREE python -P compare_worker.py BENCHMARK

It imports nothing but that tree's benchmark: the tree may be of another commit than this file.
"""

import importlib
import json
import os
import sys


def main() -> None:
    """Answer with a line of JSON: the cells' names, then the figures of each round."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a benchmark prints is no answer
    benchmark = importlib.import_module(f"benchmarks.{sys.argv[1]}")
    with benchmark.open_cells() as cells:
        print(json.dumps(list(cells)), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(cells[line.rstrip("\n")]()), file=answers, flush=True)


if __name__ == "__main__":
    main()
