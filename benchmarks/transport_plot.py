"""The plot of `benchmarks.transport`: the distribution of one-way latency, one line a path, one panel a batch size."""

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("agg")
mpl.rcParams["svg.hashsalt"] = "ringserve"  # the same figures give the same file

from matplotlib import pyplot as plt  # noqa: E402 - after the choice of the backend
from matplotlib.axes import Axes  # noqa: E402

_COLOURS = {
    "ring spin": "#0b6e4f", "ring adaptive": "#21a179", "ring block": "#73c2a5", "ring eventfd": "#3d5a80",
    "mp.Queue": "#9a8c98", "zmq tuned": "#e9a03b", "zmq (vLLM)": "#c8553d",
}  # fmt: skip


def plot(latencies_us: dict[int, dict[str, list[float]]], path: Path) -> list[Path]:
    """Draw the share of records that arrive within a time.

    Args:
        latencies_us: Rows of a record -> path's name -> its samples.
        path: File name; the suffix is replaced.

    Returns:
        The files written: PNG and SVG.
    """
    figure, axes = plt.subplots(1, len(latencies_us), figsize=(10, 4), sharey=True, squeeze=False)
    for panel, (num_rows, samples) in zip(axes[0], latencies_us.items(), strict=True):
        _draw(panel, samples)
        panel.set_title(f"{num_rows} {'row' if num_rows == 1 else 'rows'} in a step, one token each")
    axes[0][0].set_ylabel("share of steps")
    axes[0][-1].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def _draw(panel: Axes, samples: dict[str, list[float]]) -> None:
    shares = np.linspace(0, 1, 201)
    for name, values in samples.items():
        panel.plot(np.quantile(values, shares), shares, label=name, color=_COLOURS[name], linewidth=1.8)
    panel.set_xscale("log")
    panel.set_xlim(20, 3000)
    panel.set_xlabel("engine to asyncio task, microseconds")
    panel.grid(visible=True, which="both", alpha=0.2)
    panel.spines[["top", "right"]].set_visible(False)
