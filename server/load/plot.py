"""The plot of a load: how latencies are distributed, and tokens a second over time. matplotlib comes with an extra."""

import importlib.util
from typing import Any

import numpy as np

from ringserve.server.errors import StartupError
from ringserve.server.load.figures import samples
from ringserve.server.load.run import Run

_PANELS = {
    "ttft_ms": "time to first token",
    "inter_token_ms": "inter-token",
    "end_to_end_ms": "end to end",
}
_COLOUR = "#0b6e4f"


def check_installed() -> None:
    """Raise StartupError if matplotlib is missing: before a long load, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("--plot needs matplotlib: pip install 'ringserve[bench]'")


def plot(run: Run, title: str, path: str) -> None:
    """Write the PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (*latencies, rate) = plt.subplots(1, 4, figsize=(16, 3.8))
    values = samples(run)
    for panel, (name, label) in zip(latencies, _PANELS.items(), strict=True):
        _draw_distribution(panel, values[name], label)
    _draw_rate(rate, run)
    for panel in (*latencies, rate):
        panel.grid(visible=True, alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _draw_distribution(panel: Any, values: list[float], label: str) -> None:
    shares = np.linspace(0, 1, 501)
    if values:
        panel.plot(np.quantile(values, shares), shares, color=_COLOUR)
    panel.set_ylim(0, 1)
    panel.set_xlim(left=0)
    panel.set_xlabel(f"{label}, ms")
    panel.set_ylabel("share")


def _draw_rate(panel: Any, run: Run) -> None:
    """Draw the tokens of each fiftieth of the run; a request's tokens are spread evenly over its events."""
    times, weights = [], []
    for record in run.records:
        if record.event_s:
            times += [at_s - run.started_s for at_s in record.event_s]
            weights += [record.completion_tokens / len(record.event_s)] * len(record.event_s)
    counts, edges = np.histogram(times, bins=50, range=(0, run.duration_s), weights=weights)
    panel.stairs(counts / np.diff(edges), edges, color=_COLOUR)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("time, s")
    panel.set_ylabel("output tokens/s")
