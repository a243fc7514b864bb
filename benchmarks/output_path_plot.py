"""The plot of `benchmarks.output_path`: CPU a token over streams, how late tokens arrive, what merging gives."""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
import numpy as np

mpl.use("agg")
mpl.rcParams["svg.hashsalt"] = "ringserve"  # the same figures give the same file

from matplotlib import pyplot as plt  # noqa: E402 - after the choice of the backend
from matplotlib.axes import Axes  # noqa: E402

_COLOURS = {
    "server, completions": "#0b6e4f", "server, chat": "#73c2a5", "fallback, completions": "#c8553d",
    "asgi, completions": "#e9a03b", "raw, completions": "#3d5a80", "raw, chat": "#9a8c98",
}  # fmt: skip
_NAMES = {"asgi": "ASGI floor", "raw": "raw floor", "server": "ringserve", "fallback": "ringserve over ASGI"}


class _Cell(Protocol):
    """benchmarks.output_path.Cell."""

    subject: str
    pacing: str
    num_streams: int
    endpoint: str


class _Samples(Protocol):
    """benchmarks.output_path.Samples."""

    token_us: list[float]
    events_per_s: list[float]
    added_ms: list[float]

    @property
    def tokens_per_s(self) -> list[float]: ...


def plot(samples: Mapping[_Cell, _Samples], path: Path) -> list[Path]:
    """Draw the plain cells, those without a variant.

    Returns:
        The files written beside `path`: PNG and SVG.
    """
    figure, (cost, latency, merging) = plt.subplots(1, 3, figsize=(14, 4))
    _draw_cost(cost, {cell: s for cell, s in samples.items() if cell.pacing == "lockstep"})
    _draw_latency(latency, {cell: s for cell, s in samples.items() if cell.pacing.endswith("ms")})
    _draw_merging(merging, {cell: s for cell, s in samples.items() if cell.pacing == "free"})
    for panel in (cost, latency, merging):
        panel.grid(visible=True, which="both", alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.lines:  # a quick run has nothing free-running
            panel.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def _draw_cost(panel: Axes, samples: Mapping[_Cell, _Samples]) -> None:
    for key, colour in _COLOURS.items():
        subject, endpoint = key.split(", ")
        cells = {c: s for c, s in samples.items() if (c.subject, c.endpoint) == (subject, endpoint)}
        _draw_line(panel, cells, lambda s: s.token_us, label=f"{_NAMES[subject]}, {endpoint}", colour=colour)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("streams")
    panel.set_ylabel("CPU of the serving process, us a token")
    panel.set_title("lockstep: an event is a token")


def _draw_latency(panel: Axes, samples: Mapping[_Cell, _Samples]) -> None:
    shares = np.linspace(0, 1, 201)
    for cell, s in samples.items():
        is_chat = cell.endpoint == "chat"
        who = cell.endpoint if cell.subject == "server" else "raw floor"
        label = f"{cell.num_streams} stream{'s' if cell.num_streams > 1 else ''}, {who}"
        panel.plot(np.quantile(s.added_ms, shares), shares, label=label, linestyle="--" if is_chat else "-")
    panel.set_xscale("log")
    panel.set_xlabel("published to read by the client, ms")
    panel.set_ylabel("share of tokens")
    panel.set_title("added latency, a step each 20 ms")


def _draw_merging(panel: Axes, samples: Mapping[_Cell, _Samples]) -> None:
    cells = {cell: s for cell, s in samples.items() if cell.endpoint == "completions"}
    _draw_line(panel, cells, lambda s: s.tokens_per_s, label="tokens/s", colour="#0b6e4f")
    _draw_line(panel, cells, lambda s: s.events_per_s, label="events/s", colour="#c8553d")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("streams")
    panel.set_title("free-running: tokens merge into events")


def _draw_line(
    panel: Axes, cells: Mapping[_Cell, _Samples], get: Callable[[_Samples], list[float]], *, label: str, colour: str
) -> None:
    points = sorted((cell.num_streams, statistics.median(get(s))) for cell, s in cells.items())
    if points:
        panel.plot(*zip(*points, strict=True), label=label, color=colour, marker="o", markersize=4, linewidth=1.8)
