"""The plot of `benchmarks.fairness`: prefill speed against the gap of a stream, for each --min-prefill-percent."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
mpl.rcParams["svg.hashsalt"] = "ringserve"  # the same figures give the same file

from matplotlib import pyplot as plt  # noqa: E402 - after the choice of the backend

_DEFAULT = "50"


def plot(trade: dict[str, Any], alone_tokens_per_s: float, path: Path) -> None:
    """Draw a point for each setting.

    Args:
        trade: --min-prefill-percent -> its figures beside one stream.
        alone_tokens_per_s: The speed without streams.
        path: File name; the suffix is replaced by .png.
    """
    figure, axes = plt.subplots(figsize=(6, 4))
    shares = [each["tokens_per_s"] / alone_tokens_per_s for each in trade.values()]
    gaps = [each["gap_ms"]["p99"] for each in trade.values()]
    axes.plot(gaps, shares, color="#73c2a5", linewidth=1.8, zorder=1)
    for percent, gap, share in zip(trade, gaps, shares, strict=True):
        is_default = percent == _DEFAULT
        axes.scatter(gap, share, color="#0b6e4f" if is_default else "#21a179", s=80 if is_default else 36, zorder=2)
        label = f"{percent} %, the default" if is_default else f"{percent} %"
        axes.annotate(label, (gap, share), textcoords="offset points", xytext=(8, 6) if is_default else (8, -10))
    axes.set_xlabel("gap of a stream beside a prompt of 2,000 tokens, p99, ms")
    axes.set_ylabel("prefill speed, 1: without streams")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1)
    axes.grid(visible=True, alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)
