"""What does a token cost from the ring to the socket, and how late does it arrive? CPU us a token, latency ms.

    python -m benchmarks.output_path [--quick] [--json PATH]

The real server (its command line, its endpoints) with the synthetic engine in a second process, N streams from a load
client in a third. Two floors, each a process too, take turns with it cell by cell: `raw`, a uvloop protocol that
writes ready chunks, and `asgi`, one task a stream and one `send` an event. Their events have the server's length.
`fallback` is the same server under uvicorn's own protocol, without the way to the transport; `guarded` one that asks
for an API key and bounds the requests of each.

Pacing: `lockstep`, the engine's next step once the client has every event of the last one, so that an event is a token,
which the step log must bear out; `free`, as fast as the ring takes steps, so that tokens merge; `20 ms` steps.
Variants: a stop string that never begins, so that nothing is held back; include_usage; logprobs 5; whole: no stream.

CPU is of the serving process alone. token: slope from 1 to T tokens. req: the run with 1 token, for each request.
Connections are open before, so that accepting them is in neither. added: the client's clock when it has read an event
minus the engine's publish stamp of that event's step, in steps that all N streams are in. Figures are medians over
rounds, latencies over all rounds. The serving process has a core to itself (processes.py). `--quick` takes the target
cells only.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import output_path_limits, report
from benchmarks.load_client import Load, LoadClient, Outcome, http_request
from benchmarks.output_path_plot import plot
from benchmarks.processes import Listening, StepLog, SyntheticServer, cores, pin
from benchmarks.report import Target

STEP_MS = 20
API_KEY = "output-path"
GUARDS = ("--api-key", API_KEY, "another-key", "--max-concurrency-per-key", "2000")
NUM_STREAMS = (1, 16, 64, 256, 1024)
MARKERS = {"completions": b'"text":', "chat": b'"delta":{"content":'}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Once upon a time"},
    "chat": {"messages": [{"role": "user", "content": "Once upon a time"}]},
}
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    (endpoint, variant): fields
    for endpoint, logprobs in (("completions", {"logprobs": 5}), ("chat", {"logprobs": True, "top_logprobs": 5}))
    for variant, fields in (
        ("", {}),
        ("stop", {"stop": "#END-OF-TEXT"}),  # no token of the text has its first character
        ("usage", {"stream_options": {"include_usage": True}}),
        ("logprobs", logprobs),
        ("whole", {"stream": False}),
    )
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: who answers, how the tokens come, how many streams, and what they ask for."""

    subject: str  # "server", "guarded", "fallback", "raw", "asgi"
    pacing: str  # "lockstep", "free", "20 ms"
    num_streams: int
    endpoint: str = "completions"
    variant: str = ""


LOCKSTEP = [Cell("server", "lockstep", n, endpoint) for endpoint in PATHS for n in NUM_STREAMS]
FLOORS = [Cell(kind, "lockstep", n) for kind in ("raw", "asgi", "fallback") for n in NUM_STREAMS]
CELLS = [
    *LOCKSTEP,
    *FLOORS,
    Cell("guarded", "lockstep", 64),
    *(Cell("raw", "lockstep", n, "chat") for n in (64, 256)),
    *(
        Cell("server", "lockstep", n, endpoint, variant)
        for n in (64, 256)
        for endpoint, variant in VARIANTS
        if variant not in ("", "whole")
    ),
    *(Cell("server", "free", n, endpoint) for endpoint in PATHS for n in NUM_STREAMS),
    *(Cell("server", "free", 64, endpoint, "whole") for endpoint in PATHS),
    *(Cell("server", f"{STEP_MS} ms", n, endpoint) for endpoint in PATHS for n in (1, 64, 256)),
    *(Cell("raw", f"{STEP_MS} ms", n) for n in (1, 64, 256)),
]
QUICK_CELLS = [
    *(cell for cell in LOCKSTEP if cell.num_streams in (64, 256) or cell == Cell("server", "lockstep", 1)),
    *(Cell("raw", "lockstep", n, endpoint) for endpoint in PATHS for n in (64, 256)),
    *(Cell(kind, "lockstep", 64) for kind in ("asgi", "fallback", "guarded")),
    *(Cell("server", "lockstep", 64, "completions", variant) for variant in ("stop", "usage", "logprobs")),
    Cell("server", "free", 64, "completions", "whole"),
    *(Cell(kind, f"{STEP_MS} ms", n) for kind in ("server", "raw") for n in (1, 64)),
]
EVENT_SIZES = [Cell(kind, "lockstep", 64, endpoint) for endpoint in PATHS for kind in ("server", "raw", "asgi")]


@dataclass(slots=True)
class Samples:
    """What one cell gave: of each round a value, of latencies all."""

    num_tokens: int  # of each stream
    num_streams: int
    short_cpu_us: list[float] = field(default_factory=list)  # of the run with 1 token
    long_cpu_us: list[float] = field(default_factory=list)
    events_per_s: list[float] = field(default_factory=list)
    tokens_per_event: list[float] = field(default_factory=list)
    bytes_per_event: list[float] = field(default_factory=list)
    client_share: list[float] = field(default_factory=list)  # of one core
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)

    @property
    def token_us(self) -> list[float]:
        """CPU for each further token; the short run's median, because one pause in it would shift a round's slope."""
        num_more = self.num_streams * (self.num_tokens - 1)
        return [(cpu_us - statistics.median(self.short_cpu_us)) / num_more for cpu_us in self.long_cpu_us]

    @property
    def request_us(self) -> list[float]:
        """CPU for each request with 1 token."""
        return [cpu_us / self.num_streams for cpu_us in self.short_cpu_us]

    @property
    def events_per_core_s(self) -> list[float]:
        """Events for each second of the serving process's CPU time."""
        return [1e6 / us / merged for us, merged in zip(self.token_us, self.tokens_per_event, strict=True)]

    @property
    def tokens_per_s(self) -> list[float]:
        """Of all streams."""
        return [events * tokens for events, tokens in zip(self.events_per_s, self.tokens_per_event, strict=True)]

    def add(self, cell: Cell, short: Outcome, long: Outcome, added_ms: list[float]) -> None:
        """Add a round: a run with 1 token and one with num_tokens for each stream."""
        num_tokens = cell.num_streams * self.num_tokens
        is_stream = cell.variant != "whole"
        num_events = long.num_events if is_stream else cell.num_streams
        self.short_cpu_us.append(short.server_cpu_ns / 1e3)
        self.long_cpu_us.append(long.server_cpu_ns / 1e3)
        self.events_per_s.append(num_events / long.wall_ns * 1e9)
        self.tokens_per_event.append(num_tokens / num_events)
        num_more_bytes, num_more_events = long.num_bytes - short.num_bytes, long.num_events - short.num_events
        self.bytes_per_event.append(num_more_bytes / num_more_events if is_stream else 0)
        self.client_share.append(long.client_cpu_ns / long.wall_ns)
        if is_stream:
            self.ttft_ms += [(times[0] - sent) / 1e6 for sent, times in zip(long.sent_ns, long.times_ns, strict=True)]
            self.gap_ms += (np.concatenate([np.diff(times) for times in long.times_ns]) / 1e6).tolist()
        self.added_ms += added_ms


class Bench:
    """The processes of a run.

    Attributes:
        client: The load client.
        skipped: Cells that the server refused, and its words.
    """

    def __init__(self, client: LoadClient, folder: Path, stack: contextlib.ExitStack) -> None:
        doorbell = posix_ipc.Semaphore(None, posix_ipc.O_CREX, initial_value=0)
        stack.callback(doorbell.unlink)
        self._doorbell = doorbell.name
        self.client = client
        start = functools.partial(SyntheticServer, folder)
        self.servers = {
            ("server", "lockstep"): start(is_lockstep=True),
            ("fallback", "lockstep"): start(is_lockstep=True, module="benchmarks.asgi_fallback"),
            ("guarded", "lockstep"): start(*GUARDS, is_lockstep=True),
            ("server", "free"): start(),
            ("server", f"{STEP_MS} ms"): start("--step-time-ms", str(STEP_MS)),
        }
        self._floors = {}
        self._steps = {key: server.steps for key, server in self.servers.items()}
        for kind in ("raw", "asgi"):
            self._steps[kind, f"{STEP_MS} ms"] = steps = StepLog(folder / kind)
            self._floors[kind] = Listening("benchmarks.floors", kind, doorbell.name, str(steps.path))
        for process in (*self.servers.values(), *self._floors.values()):
            stack.callback(process.close)
        self._payloads: dict[str, bytes] = {}
        self.skipped: dict[Cell, str] = {}

    def measure(self, cell: Cell, samples: Samples) -> None:
        """Run one round of a cell."""
        short = self.run(cell, 1)
        if short.error:
            head, _, body = short.error.partition("\r\n\r\n")
            self.skipped[cell] = body or head.splitlines()[0]
            return
        self._new_steps(cell)
        long = self.run(cell, samples.num_tokens)
        steps = self._new_steps(cell)
        is_timed = steps is not None and cell.pacing != "free"
        if steps is not None and cell.pacing == "lockstep":
            check_lockstep(steps, long)
        samples.add(cell, short, long, added_ms(steps, long, cell.num_streams) if is_timed else [])

    def round(self, cell: Cell) -> dict[str, float]:
        """Run one short round of a cell; return its figures, all better when smaller.

        Raises:
            RuntimeError: If the server refuses it.
        """
        samples = Samples(num_tokens_of(cell, is_quick=True), cell.num_streams)
        self.measure(cell, samples)
        if cell in self.skipped:
            raise RuntimeError(f"the server refuses {cell}: {self.skipped[cell]}")
        figures = {"token_us": samples.token_us[0], "request_us": samples.request_us[0]}
        return figures | ({"added_ms_p50": statistics.median(samples.added_ms)} if cell.pacing[0].isdigit() else {})

    def run(self, cell: Cell, num_tokens: int) -> Outcome:
        """Run a cell's load once."""
        self.client.start(self.load(cell, num_tokens))
        return self.client.result()

    def load(self, cell: Cell, num_tokens: int) -> Load:
        """Return a cell's load, with so many tokens for each stream."""
        num_streams = cell.num_streams
        shape: dict[str, Any] = {
            "num_streams": num_streams, "num_events": num_streams * num_tokens,
            "marker": None if cell.variant == "whole" else MARKERS[cell.endpoint],
        }  # fmt: skip
        if cell.subject in self._floors:
            floor = self._floors[cell.subject]
            is_paced = cell.pacing != "lockstep"
            path = f"/{num_streams}/{num_tokens}" + (f"/{STEP_MS}" if is_paced else "")
            request, doorbell = http_request(path, self._payload(cell.endpoint)), None if is_paced else self._doorbell
            return Load(port=floor.port, pid=floor.pid, request=request, doorbell=doorbell, **shape)
        server = self.servers[cell.subject, cell.pacing]
        body = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body |= PROMPTS[cell.endpoint] | VARIANTS[cell.endpoint, cell.variant]
        header_lines = [b"Authorization: Bearer " + API_KEY.encode()] if cell.subject == "guarded" else []
        header_lines += [b"Connection: close"] if cell.variant == "whole" else []
        request = http_request(PATHS[cell.endpoint], json.dumps(body).encode(), *header_lines)
        return Load(port=server.port, pid=server.pid, request=request, counter=server.counter, **shape)

    def _payload(self, endpoint: str) -> bytes:
        """Return an event of median length, as the server sends it: what the floors send."""
        if endpoint not in self._payloads:
            server = self.servers["server", f"{STEP_MS} ms"]
            body = PROMPTS[endpoint] | {"max_tokens": 32, "ignore_eos": True, "stream": True}
            events = output_path_limits.stream_events(server.port, PATHS[endpoint], body)
            texts = [event for event in events if MARKERS[endpoint] in event and b'"finish_reason":null' in event]
            self._payloads[endpoint] = sorted(texts[1:], key=len)[len(texts) // 2]
        return self._payloads[endpoint]

    def _new_steps(self, cell: Cell) -> np.ndarray | None:
        log = self._steps.get((cell.subject, cell.pacing))
        return None if log is None else log.new_steps()


def check_lockstep(steps: np.ndarray, outcome: Outcome) -> None:
    """Hold that each step was published after the client had every event of those before, and that none was merged.

    Raises:
        RuntimeError: If not: then the figures are no lockstep's.
    """
    num_rows = np.cumsum(steps[:, 1])
    arrivals = np.sort(np.concatenate(outcome.times_ns))
    num_arrived = np.searchsorted(arrivals, steps[1:, 0], "right")
    if len(arrivals) != num_rows[-1] or (num_arrived < num_rows[:-1]).any():
        raise RuntimeError(f"no lockstep: {num_rows[-1]} rows in {len(steps)} steps, {len(arrivals)} events")


def added_ms(steps: np.ndarray, outcome: Outcome, num_streams: int) -> list[float]:
    """Return the latency of every event in the steps that all streams are in.

    A stream's last event belongs to the last step that was published before it arrived, its k-th from the end to the
    k-th step back from there. The rows that this gives for a step must be those that the engine logged: steps up to the
    last one where they are not, when N requests arrived at once and tokens merged, are left out.

    Raises:
        RuntimeError: If that is more than half of the steps: the server does not keep up, and nothing can be matched.
    """
    published_ns, num_rows = steps[:, 0], steps[:, 1]
    last = [int(np.searchsorted(published_ns, times[-1], "right")) - 1 for times in outcome.times_ns]
    index = np.concatenate([end - np.arange(len(t))[::-1] for end, t in zip(last, outcome.times_ns, strict=True)])
    wrong = np.flatnonzero(np.bincount(index[index >= 0], minlength=len(steps)) != num_rows)
    first = int(wrong[-1]) + 1 if len(wrong) else 0
    if first > len(steps) / 2:
        raise RuntimeError(f"the client's events do not match the engine's steps: {first} of {len(steps)} differ")
    is_matched = (index >= first) & (num_rows[index] == num_streams)
    latencies: list[float] = ((np.concatenate(outcome.times_ns) - published_ns[index])[is_matched] / 1e6).tolist()
    return latencies


def num_tokens_of(cell: Cell, is_quick: bool) -> int:
    """Return the tokens of each stream: for a fair share of a second, however fast the cell is."""
    if cell.pacing == f"{STEP_MS} ms":
        return 50 if is_quick else 150
    num_events = 24_000 if is_quick else 40_000
    if cell.pacing == "free":
        num_events *= 8
    return max(33, min(1000 if cell.pacing == "lockstep" else 4000, num_events // cell.num_streams + 1))


def targets_of(samples: dict[Cell, Samples]) -> list[Target]:
    """Compare with the floors of the same round, and with the aims."""

    def pairs(cell: Cell, other: Cell, get: Callable[[Samples], list[float]]) -> list[tuple[float, float]]:
        return list(zip(get(samples[cell]), get(samples[other]), strict=True))

    def ratio(cell: Cell, other: Cell, get: Callable[[Samples], list[float]] = lambda s: s.token_us) -> float:
        return statistics.median(a / b for a, b in pairs(cell, other, get))

    def of(cell: Cell, get: Callable[[Samples], list[float]] = lambda s: s.token_us) -> float:
        return statistics.median(get(samples[cell]))

    def lockstep(n: int, endpoint: str = "completions", variant: str = "", subject: str = "server") -> Cell:
        return Cell(subject, "lockstep", n, endpoint, variant)

    targets = []
    for n in (64, 256):
        targets.append(Target(f"cpu_{n}_streams_vs_raw_floor", ratio(lockstep(n), lockstep(n, subject="raw")), 2.2))
        targets.append(Target(f"cpu_us_{n}_streams_aim", of(lockstep(n)), 7))
    core, raw_256 = (lambda s: s.events_per_core_s), lockstep(256, subject="raw")
    targets += [
        Target("events_per_core_256_streams_vs_raw_floor", ratio(lockstep(256), raw_256, core), 0.45, False),
        Target("events_per_core_256_streams_aim", of(lockstep(256), core), 120_000, False),
    ]
    for n in (64, 256):
        chat, raw = lockstep(n, "chat"), lockstep(n, "chat", subject="raw")
        targets.append(Target(f"chat_cpu_{n}_streams_vs_raw_floor", ratio(chat, raw), 2.4))
    fallback, asgi = lockstep(64, subject="fallback"), lockstep(64, subject="asgi")
    targets.append(Target("fallback_cpu_vs_asgi_floor", ratio(fallback, asgi), 1.5))
    plain, stop, usage, logprobs = (lockstep(64, variant=variant) for variant in ("", "stop", "usage", "logprobs"))
    targets.append(Target("stop_string_cpu_vs_none", ratio(stop, plain), 1.15))
    targets.append(Target("include_usage_cpu_vs_none", ratio(usage, plain), 1.05))
    guarded = lockstep(64, subject="guarded")
    targets.append(Target("guarded_cpu_vs_unguarded", ratio(guarded, plain), 1.05))
    targets.append(Target("guarded_request_vs_unguarded", ratio(guarded, plain, lambda s: s.request_us), 1.05))
    if logprobs in samples:
        extra = statistics.median(a - b for a, b in pairs(logprobs, plain, lambda s: s.token_us))
        targets.append(Target("logprobs_5_extra_us", extra, 6))
    paced_1, paced_64 = (report.percentiles(samples[Cell("server", f"{STEP_MS} ms", n)].added_ms) for n in (1, 64))
    return [
        *targets,
        Target("cpu_us_1_stream_aim", of(lockstep(1)), 60),
        Target("cpu_us_a_request_aim", of(plain, lambda s: s.request_us), 290),
        Target("whole_cpu_us_a_token_64_requests_aim", of(Cell("server", "free", 64, "completions", "whole")), 1.5),
        Target("added_ms_64_streams_p50", paced_64["p50"], 0.7),
        Target("added_ms_64_streams_p99", paced_64["p99"], 2),
        Target("added_ms_1_stream_p50", paced_1["p50"], 0.2),
        Target("lockstep_tokens_per_event", max(max(s.tokens_per_event) for s in samples_in_lockstep(samples)), 1.02),
    ]


def samples_in_lockstep(samples: dict[Cell, Samples]) -> Iterator[Samples]:
    """Return the server's."""
    return (
        s
        for cell, s in samples.items()
        if cell.pacing == "lockstep" and cell.subject in ("server", "fallback", "guarded")
    )


def request_slope_us(samples: dict[Cell, Samples]) -> float:
    """Return the CPU of a request with one token as the slope over N, completions in lockstep."""
    cells = [cell for cell in samples if cell == Cell("server", "lockstep", cell.num_streams)]
    cpu_us = [cell.num_streams * statistics.median(samples[cell].request_us) for cell in cells]
    return float(np.polyfit([cell.num_streams for cell in cells], cpu_us, 1)[0])


def show(samples: dict[Cell, Samples], console: Console) -> None:
    """Print what tokens cost, then how late they are."""
    cost = _table("CPU of the serving process, us, and rates")
    _add_columns(cost, "token", "req", "ev/s", "tok/s", "tok/ev")
    delays = _table("ms, p50/p99; cpu: the client's share of a core")
    _add_columns(delays, "TTFT", "gap", "added", "cpu")
    for cell, s in samples.items():
        values = [statistics.median(v) for v in (s.token_us, s.request_us, s.events_per_s, s.tokens_per_s)]
        asks = f"{cell.endpoint.replace('completions', 'compl')} {cell.variant}"
        name = (cell.subject, cell.pacing.removesuffix("step"), str(cell.num_streams), asks)
        cost.add_row(
            *name, f"{values[0]:.4g}", *(f"{value:.0f}" for value in values[1:]),
            f"{statistics.median(s.tokens_per_event):.4g}",
        )  # fmt: skip
        if s.ttft_ms:
            latencies = map(_ms, (s.ttft_ms, s.gap_ms, s.added_ms))
            delays.add_row(*name, *latencies, f"{statistics.median(s.client_share):.0%}")
    console.print(cost)
    console.print(delays)
    sizes = [(cell, statistics.median(samples[cell].bytes_per_event)) for cell in EVENT_SIZES if cell in samples]
    print("bytes of an event: " + ", ".join(f"{cell.subject} {cell.endpoint} {size:.1f}" for cell, size in sizes))


def _table(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("who", "pacing", "N", "asks"):
        table.add_column(column, justify="right" if column == "N" else "left", no_wrap=True)
    return table


def _add_columns(table: Table, *columns: str) -> None:
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)


def _ms(values: list[float]) -> str:
    if not values:
        return ""
    figures = report.percentiles(values)
    return "/".join(f"{figures[key]:.{2 if figures[key] < 100 else 3}g}" for key in ("p50", "p99"))


def figures_of(cell: Cell, s: Samples) -> dict[str, Any]:
    """Return what the JSON keeps of a cell."""
    lists = {"ttft_ms": s.ttft_ms, "gap_ms": s.gap_ms, "added_ms": s.added_ms}
    names = ("request_us", "events_per_s", "events_per_core_s", "tokens_per_s", "tokens_per_event", "bytes_per_event",
             "client_share")  # fmt: skip
    medians = {name: statistics.median(getattr(s, name)) for name in names}
    latencies = {name: report.percentiles(values) for name, values in lists.items() if values}
    token_us = {"token_us": statistics.median(s.token_us), "round_token_us": s.token_us}
    return asdict(cell) | {"num_tokens": s.num_tokens} | token_us | medians | latencies


def measure(
    bench: Bench, cells: list[Cell], num_rounds: int, is_quick: bool, progress: Progress
) -> dict[Cell, Samples]:
    """Run every cell in turn, round by round; leave out what the server refuses.

    Each round has an order of its own: the server's garbage collections would fall into the same cells else.
    """
    orders = random.Random(5)
    samples = {cell: Samples(num_tokens_of(cell, is_quick), cell.num_streams) for cell in cells}
    task = progress.add_task("measuring", total=num_rounds * len(cells))
    for _ in range(num_rounds):
        for cell in orders.sample(cells, len(cells)):
            if cell not in bench.skipped:
                bench.measure(cell, samples[cell])
            progress.advance(task)
    return {cell: figures for cell, figures in samples.items() if cell not in bench.skipped}


@contextlib.contextmanager
def open_cells() -> Iterator[dict[str, Callable[[], dict[str, float]]]]:
    """Yield the server's target cells, for benchmarks.compare."""
    with contextlib.ExitStack() as stack:
        bench = open_bench(stack)
        cells = [cell for cell in QUICK_CELLS if cell.subject == "server"]
        yield {" ".join(map(str, astuple(cell))).rstrip(): functools.partial(bench.round, cell) for cell in cells}


def open_bench(stack: contextlib.ExitStack) -> "Bench":
    """Start a run's processes; `stack` ends them."""
    client = LoadClient()
    stack.callback(client.close)
    pin(os.getpid(), cores()[1])
    return Bench(client, Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)


def main() -> None:
    """Run, print, and save."""
    options = report.parse_arguments(argparse.ArgumentParser(description=__doc__), "output_path")
    cells, num_rounds = (QUICK_CELLS, 3) if options.quick else (CELLS, 7)
    console = Console()
    with contextlib.ExitStack() as stack:
        bench = open_bench(stack)
        limits = output_path_limits.Limits(bench.client, bench.servers["server", f"{STEP_MS} ms"])
        memory = limits.measure_memory(bench.load(Cell("server", f"{STEP_MS} ms", 256), 50))
        with Progress(console=console) as progress:
            samples = measure(bench, cells, num_rounds, options.quick, progress)
        block = limits.measure_block(bench.load(Cell("server", f"{STEP_MS} ms", 1024), 75))
        stalled_cell = bench.load(Cell("server", "free", 100), output_path_limits.ENDLESS)
        stalled = limits.measure_stalled(stalled_cell, bench.servers["server", "free"], 4 if options.quick else 60)
    show(samples, console)
    for cell, reason in bench.skipped.items():
        print(f"skipped {cell.endpoint} {cell.variant} at {cell.num_streams} streams, the server refuses it: {reason}")
    request_us = request_slope_us(samples)
    print(f"a request with 1 token: {request_us:.0f} us more for each stream")
    output_path_limits.show(memory, block, stalled)
    if options.json is not None:
        plot({cell: s for cell, s in samples.items() if not cell.variant}, options.json)
    result = {
        "is_quick": options.quick, "serving_core": sorted(cores()[0]), "other_cores": sorted(cores()[1]),
        "memory": memory, "event_loop": block, "stalled_clients": stalled,
        "request_us_slope": request_us, "cells": [figures_of(cell, s) for cell, s in samples.items()],
        "skipped": [asdict(cell) | {"reason": reason} for cell, reason in bench.skipped.items()],
    }  # fmt: skip
    targets = targets_of(samples) + output_path_limits.targets_of(memory, block, stalled)
    report.finish(options.json, "output_path", result, targets)


if __name__ == "__main__":
    main()
