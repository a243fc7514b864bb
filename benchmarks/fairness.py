"""Does a short prompt wait for long ones, and do streams wait for prompts? TTFT, prefill speed and gaps of a server.

    python -m benchmarks.fairness [--quick] [--json PATH]

A real server with the default model. Short chats come one after another while long prompts are computed and streams
decode; a chat that has no token when its cell ends counts with the time that it has waited. `--only-default` leaves the
other settings of --min-prefill-percent out, for the same figures of a commit that does not have it.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import uvloop
from rich.console import Console

from benchmarks import report
from benchmarks.fairness_plot import plot
from benchmarks.processes import Listening
from benchmarks.report import Target, percentiles

LONG_TOKENS, NUM_AT_ONCE = 2000, 32
NUM_LONG, NUM_STREAMS = (4, 16), (0, 1, 8)
PERCENTS = ("0", "25", "50", "75", "90")  # of --min-prefill-percent, for the plot
DEFAULT_PERCENT = "50"
_CELL_S, _QUICK_CELL_S = 12.0, 4.0
_PAUSE_S = 0.15  # between two chats of one cell
_NUM_QUIET = 40  # gaps of a stream that are a quiet step's
_FLAGS = ("--port", "0", "--kv-cache-tokens", "48000", "--disable-log-stats", "--drain-timeout", "1")
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=300)
console = Console(stderr=True)


class Load:
    """Requests to one server; no two share a prompt.

    Args:
        session: Of the server's address.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._numbers = itertools.count(1)
        self._rng = np.random.default_rng(0)

    async def chat(self) -> float:
        """Return the time to the first token of a short chat, s."""
        content = f"{next(self._numbers)}: what is the capital of France?"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        return (await self._stamps("/v1/chat/completions", body, most=1))[0]

    async def prompt(self, num_tokens: int) -> float:
        """Return the time to the first token of a prompt of random tokens, s."""
        body = {"prompt": self._rng.integers(1000, 40_000, num_tokens).tolist(), "max_tokens": 1}
        return (await self._stamps("/v1/completions", body, most=1))[0]

    async def stream(self, stamps: list[float]) -> None:
        """Decode until cancelled, and note when each token came."""
        prompt = self._rng.integers(1000, 40_000, 16).tolist()
        body = {"prompt": prompt, "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
        await self._stamps("/v1/completions", body, most=None, into=stamps)

    async def _stamps(
        self, path: str, body: dict[str, Any], *, most: int | None, into: list[float] | None = None
    ) -> list[float]:
        stamps = [] if into is None else into
        started_s = time.monotonic() if into is None else 0.0
        async with self._session.post(path, json=body | {"stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    stamps.append(time.monotonic() - started_s)
                    if len(stamps) == most:
                        break
        return stamps


@asynccontextmanager
async def streams(load: Load, count: int) -> AsyncIterator[list[list[float]]]:
    """Let streams decode meanwhile; gives each one's stamps, once all have had some tokens."""
    stamps: list[list[float]] = [[] for _ in range(count)]
    tasks = [asyncio.create_task(load.stream(each)) for each in stamps]
    try:
        while any(len(each) < _NUM_QUIET // (1 + count // 4) for each in stamps):
            await asyncio.sleep(0.02)
        yield stamps
    finally:
        await _cancel(tasks)


async def behind(load: Load, num_long: int, num_streams: int, cell_s: float) -> list[float]:
    """Return the TTFT of chats that come while long prompts are computed."""
    async with streams(load, num_streams):
        longs = [asyncio.create_task(load.prompt(LONG_TOKENS)) for _ in range(num_long)]
        await asyncio.sleep(0.3)
        times, ends_s = [], time.monotonic() + cell_s
        while (left_s := ends_s - time.monotonic()) > 0 and not all(task.done() for task in longs):
            started_s = time.monotonic()
            try:
                times.append(await asyncio.wait_for(load.chat(), left_s))
            except TimeoutError:
                times.append(time.monotonic() - started_s)
            await asyncio.sleep(_PAUSE_S)
        await _cancel(longs)
    return times


async def beside(load: Load, num_streams: int, num_prompts: int = 1) -> dict[str, Any]:
    """Return the speed of long prompts, one after the other, beside streams, and their gaps then and before, ms."""
    async with streams(load, num_streams) as stamps:
        began_s = time.monotonic()
        for _ in range(num_prompts):
            await load.prompt(LONG_TOKENS)
        ended_s = time.monotonic()
        gaps = [_gaps_ms(each, began_s, ended_s) for each in stamps]
        quiet = [_gaps_ms(each, 0.0, began_s) for each in stamps]
    return {
        "tokens_per_s": num_prompts * LONG_TOKENS / (ended_s - began_s),
        "gap_ms": percentiles(list(itertools.chain(*gaps))),
        "quiet_ms": statistics.median(list(itertools.chain(*quiet))),
    }


async def at_once(load: Load) -> list[float]:
    """Return the TTFT of as many chats at the same moment."""
    return await asyncio.gather(*(load.chat() for _ in range(NUM_AT_ONCE)))


async def all_their_tokens(load: Load) -> float:
    """Return the time that one prompt takes which is as long as all those chats."""
    chat_tokens = 40
    return await load.prompt(NUM_AT_ONCE * chat_tokens)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.5)  # until the engine has dropped them


def _gaps_ms(stamps: list[float], began_s: float, ended_s: float) -> list[float]:
    """Return the gaps that end in a span of time."""
    return [1e3 * (b - a) for a, b in itertools.pairwise(stamps) if began_s < b <= ended_s]


@asynccontextmanager
async def open_load(*flags: str) -> AsyncIterator[Load]:
    """Start a server, and warm it up."""
    server = Listening("ringserve.server.cli", "serve", *_FLAGS, *flags)
    try:
        base_url = f"http://127.0.0.1:{server.port}"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base_url, timeout=_TIMEOUT, connector=connector) as session:
            load = Load(session)
            await load.prompt(300)
            await load.chat()
            yield load
    finally:
        server.close()


async def measure(cell_s: float, *, is_quick: bool) -> dict[str, Any]:
    """Return all figures of the default settings."""
    async with open_load() as load:
        alone = [await load.chat() for _ in range(12)]
        prefill = [LONG_TOKENS / await load.prompt(LONG_TOKENS) for _ in range(1 if is_quick else 2)]
        bursts = [await at_once(load) for _ in range(1 if is_quick else 3)]
        burst_s = await all_their_tokens(load)
        console.print(f"alone {statistics.median(alone):.3f} s, {statistics.median(prefill):.0f} tokens/s")
        cells, speeds = {}, {}
        for num_streams in NUM_STREAMS:
            for num_long in NUM_LONG[: 1 if is_quick else None]:
                times = await behind(load, num_long, num_streams, cell_s)
                cells[f"{num_long} long, {num_streams} streams"] = percentiles(times)
                console.print(num_long, "long", num_streams, "streams", [round(each, 2) for each in times])
        for num_streams in NUM_STREAMS[1 : 2 if is_quick else None]:
            num_prompts = 1 if is_quick or num_streams > 1 else 3
            speeds[str(num_streams)] = await beside(load, num_streams, num_prompts)
            console.print(num_streams, speeds[str(num_streams)])
    return {
        "alone_s": percentiles(alone), "prefill_tokens_per_s": statistics.median(prefill), "behind_s": cells,
        "at_once_s": percentiles(list(itertools.chain(*bursts))), "at_once_alone_s": burst_s, "beside": speeds,
    }  # fmt: skip


async def measure_trade(default: dict[str, Any]) -> dict[str, Any]:
    """Return what each least share of prompts gives beside one stream: their speed, and its gaps."""
    trade = {}
    for percent in PERCENTS:
        if percent == DEFAULT_PERCENT:
            trade[percent] = default
            continue
        async with open_load("--min-prefill-percent", percent) as load:
            trade[percent] = await beside(load, 1)
            console.print(percent, trade[percent])
    return trade


def targets(figures: dict[str, Any]) -> list[Target]:
    """Compare with what a user may expect."""
    alone_s, prefill = figures["alone_s"]["p50"], figures["prefill_tokens_per_s"]
    made = []
    for name, times in figures["behind_s"].items():
        made.append(Target(f"ttft_p50_behind_{name}_s", times["p50"], round(3 * alone_s + 0.25, 3)))
        made.append(Target(f"ttft_p99_behind_{name}_s", times["p99"], round(3 * alone_s + 0.6, 3)))
    for num_streams, it in figures["beside"].items():
        speed, gap = it["tokens_per_s"] / prefill, it["gap_ms"]["p99"] / it["quiet_ms"]
        made.append(Target(f"prefill_beside_{num_streams}_vs_alone", speed, 0.5, is_upper_bound=False))
        made.append(Target(f"gap_p99_beside_{num_streams}_vs_quiet_step", gap, 4.0))
    burst_s = figures["at_once_alone_s"]
    made.append(Target("ttft_p50_of_32_vs_their_prefill", figures["at_once_s"]["p50"] / burst_s, 0.7))
    made.append(Target("ttft_max_of_32_vs_their_prefill", figures["at_once_s"]["max"] / burst_s, 1.2))
    return made


def main() -> None:
    """Run, print, plot, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only-default", action="store_true", help="no other settings, for schedulers without them")
    options = report.parse_arguments(parser, "fairness")
    cell_s = _QUICK_CELL_S if options.quick else _CELL_S
    figures = uvloop.run(measure(cell_s, is_quick=options.quick))
    if not (options.quick or options.only_default):
        figures["trade"] = uvloop.run(measure_trade(figures["beside"]["1"]))
        if options.json is not None:
            plot(figures["trade"], figures["prefill_tokens_per_s"], options.json)
    report.finish(options.json, "fairness", figures, targets(figures))


if __name__ == "__main__":
    main()
