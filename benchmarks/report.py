"""What every benchmark shares: percentiles, targets, the machine's description, and the JSON file."""

import argparse
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to reach: `value` must be at most, or at least, `limit`."""

    name: str
    value: float
    limit: float
    is_upper_bound: bool = True

    @property
    def is_met(self) -> bool:
        """Whether the figure is on the right side of its limit."""
        return self.value <= self.limit if self.is_upper_bound else self.value >= self.limit

    def line(self) -> str:
        """Return the one line that a run prints for it."""
        bound = "<=" if self.is_upper_bound else ">="
        return f"{'PASS' if self.is_met else 'MISS'} {self.name} {self.value:.3g} {bound} {self.limit:g}"


def percentiles(samples: list[int] | list[float]) -> dict[str, float]:
    """Return n, p50, p90, p99 and max."""
    values = np.asarray(samples, np.float64)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"n": len(values), "p50": p50, "p90": p90, "p99": p99, "max": float(values.max())}


def machine() -> dict[str, Any]:
    """Describe where the figures come from."""
    model = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "commit": _commit(),
    }


def parse_arguments(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """Add what every benchmark understands, and parse: --quick and --json (None: keep nothing).

    A full run keeps its JSON in results/; a quick one only where it is told to.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s, same method")
    parser.add_argument("--json", type=Path, metavar="PATH", help=f"where to write; of a full run: results/{name}.json")
    options = parser.parse_args()
    if options.json is None and not options.quick:
        options.json = RESULTS / f"{name}.json"
    return options


def finish(path: Path | None, name: str, figures: dict[str, Any], targets: list[Target]) -> None:
    """Write a run's JSON, if it is to be kept, and print a line for each target."""
    if path is not None:
        save(path, name, figures, targets)
    for target in targets:
        print(target.line())


def save(path: Path, name: str, figures: dict[str, Any], targets: list[Target]) -> None:
    """Write a run's JSON."""
    shown = [asdict(target) | {"is_met": target.is_met} for target in targets]
    result = {"benchmark": name, "machine": machine(), "targets": shown, **figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
