"""What every benchmark shares: percentiles, targets, the machine's description, and the JSON file."""

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


def save(path: Path, name: str, figures: dict[str, Any], targets: list[Target]) -> None:
    """Write a run's JSON."""
    shown = [asdict(target) | {"is_met": target.is_met} for target in targets]
    result = {"benchmark": name, "machine": machine(), "targets": shown, **figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
