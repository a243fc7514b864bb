"""How fast is the engine against transformers, on the same weights and threads? Times of steps, ms.

    python -m benchmarks.engine [--quick] [--json PATH] [--model DIRECTORY] [--threads N]

The engine's own loop (scheduler, model, sampler, publication into a real ring) with its default weights, with bfloat16
weights throughout, and with the generic `hf` runner, against transformers' generate() and continuous batching. Paths
take turns, round by round; figures are medians over all steps of all rounds. Prompts have 128 tokens. `--quick` takes
five minutes.
"""

import argparse
import contextlib
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks import report
from benchmarks.engine_paths import (
    DEFAULT_THREADS,
    NUM_STEPS,
    PROMPT_TOKENS,
    SIZES,
    ContinuousBatchingPath,
    EnginePath,
    GeneratePath,
    GenerationPath,
    Samples,
    add_arguments,
    decode_table,
    make_prompts,
    measure_decode,
    medians_of,
)
from benchmarks.report import Target
from ringserve.engine.weights.default_model import default_model_directory

GENERATE, CONTINUOUS = "generate()", "continuous batching"
ENGINE, BF16, HF = "engine", "engine bf16", "engine hf runner"
PREFIX_TOKENS, LONG_TOKENS = 512, 1024


def measure_prefill(paths: dict[str, GenerationPath], rng: np.random.Generator) -> dict[str, float]:
    """Return each path's time to the first token of a new prompt of 512 tokens."""
    return {name: path.first_token_ms(make_prompts(rng, 1, PREFIX_TOKENS)[0]) for name, path in paths.items()}


def measure_prefix(engine: EnginePath, rng: np.random.Generator) -> float:
    """Return the time to the first token of a second request with the same 512 tokens, over that of the first."""
    (prefix,), (first, second) = make_prompts(rng, 1, PREFIX_TOKENS), make_prompts(rng, 2, 8)
    cold_ms = engine.first_token_ms(np.concatenate((prefix, first)))
    return engine.first_token_ms(np.concatenate((prefix, second))) / cold_ms


def measure_gap(engine: EnginePath, rng: np.random.Generator) -> float:
    """Return the longest step of 8 decoding requests while a long prompt joins, over a quiet step."""
    handles = engine.start_decoding(make_prompts(rng, 8, PROMPT_TOKENS))
    quiet_ms = statistics.median(engine.step()[1] for _ in range(8))
    handles.append(engine.add(make_prompts(rng, 1, LONG_TOKENS)[0], 4))
    times: list[float] = []
    while True:
        step, elapsed_ms = engine.step()
        times.append(elapsed_ms)
        if handles[-1] in step.handles:
            break
    engine.core.abort(handles)
    return max(times) / quiet_ms


def measure_bookkeeping(engine: EnginePath, size: int, rng: np.random.Generator) -> float:
    """Return what a decode step of `size` requests costs beside model and sampler, ms."""
    handles = engine.start_decoding(make_prompts(rng, size, PROMPT_TOKENS))
    before, num_steps = engine.costs(), 12
    for _ in range(num_steps):
        engine.step()
    spent_ns = engine.costs().bookkeeping_ns - before.bookkeeping_ns
    engine.core.abort(handles)
    return spent_ns / num_steps / 1e6


def blocks_after_abort(engine: EnginePath, rng: np.random.Generator) -> int:
    """Return the blocks that are held once 8 requests were aborted between two steps."""
    engine.core.abort(engine.start_decoding(make_prompts(rng, 8, PROMPT_TOKENS)))
    return engine.core.idle_step().num_blocks_used


def measure_start(model: str, num_threads: int) -> float:
    """Return the seconds from the start of an interpreter to an engine that can take requests."""
    code = (
        "import sys; from ringserve.engine.config import EngineConfig; "
        "from ringserve.engine.core.core import EngineCore; "
        "EngineCore(EngineConfig(model=sys.argv[1], num_threads=int(sys.argv[2])))"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code, model, str(num_threads)], check=True, stderr=subprocess.DEVNULL)
    return time.monotonic() - started


def decode_targets(medians: dict[tuple[str, int], float]) -> list[Target]:
    """Compare medians of step times: how many times as many tokens each second."""

    def targets(path: str, other: str, name: str, limits: dict[int, tuple[float, float]]) -> list[Target]:
        made = []
        for size, (accept, aim) in limits.items():
            ratio = medians[other, size] / medians[path, size]
            made.append(Target(f"{name}_{size}_requests", ratio, accept, is_upper_bound=False))
            made.append(Target(f"{name}_{size}_requests_aim", ratio, aim, is_upper_bound=False))
        return made

    return [
        *targets(ENGINE, GENERATE, "decode_vs_generate", {1: (2.2, 3.0), 8: (1.5, 1.8), 32: (1.25, 1.5)}),
        *targets(BF16, GENERATE, "decode_bf16_vs_generate", {1: (1.5, 1.7), 8: (1.5, 1.8), 32: (1.25, 1.5)}),
        *targets(ENGINE, CONTINUOUS, "decode_vs_continuous_batching", {1: (2.3, 3.3), 8: (1.7, 2.0), 32: (1.9, 2.2)}),
        *targets(HF, GENERATE, "hf_runner_vs_generate", {1: (1.0, 1.15), 8: (1.1, 1.3)}),
    ]


def at_most(name: str, values: list[float], accept: float, aim: float) -> list[Target]:
    """Return the two targets of a figure that is better when it is small."""
    median = statistics.median(values)
    return [Target(name, median, accept), Target(f"{name}_aim", median, aim)]


@contextlib.contextmanager
def open_cells() -> Iterator[dict[str, Callable[[], dict[str, float]]]]:
    """Yield the engine's decode steps, a cold prompt and a long prompt beside 8 streams, for benchmarks.compare."""
    engine, rng = EnginePath(str(default_model_directory()), DEFAULT_THREADS), np.random.default_rng(0)

    def decode(size: int) -> dict[str, float]:
        prompts = make_prompts(rng, size, PROMPT_TOKENS)
        return {"step_ms": statistics.median(engine.decode_steps_ms(prompts, NUM_STEPS))}

    def prefill() -> dict[str, float]:
        return {"first_token_ms": engine.first_token_ms(make_prompts(rng, 1, PREFIX_TOKENS)[0])}

    yield {f"decode {size}": functools.partial(decode, size) for size in SIZES} | {
        "prefill": prefill,
        "longest step beside a prefill": lambda: {"quiet_steps": measure_gap(engine, rng)},
    }


def main() -> None:
    """Run, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, model_help="a Llama-like model")
    options = report.parse_arguments(parser, "engine")
    torch.set_num_threads(options.threads)
    num_rounds, num_repeats = (2, 2) if options.quick else (10, 9)
    rng, console = np.random.default_rng(0), Console()
    console.width = max(console.width, 96)  # the table's
    engine = EnginePath(options.model, options.threads)
    bf16 = EnginePath(options.model, options.threads, quantization="none")
    hf = EnginePath(options.model, options.threads, quantization="none", runner="hf")
    generate, continuous = GeneratePath(options.model), ContinuousBatchingPath(options.model)
    paths: dict[str, GenerationPath] = {ENGINE: engine, BF16: bf16, HF: hf, GENERATE: generate, CONTINUOUS: continuous}
    samples: Samples = {}
    for path in paths.values():  # the first steps are slower
        path.decode_steps_ms(make_prompts(rng, 8, PROMPT_TOKENS), NUM_STEPS)
    prefill, prefix, gap, books, start = [], [], [], {1: [], 32: []}, []
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=num_rounds + num_repeats)
        for _ in range(num_rounds):
            measure_decode(paths, samples, rng, PROMPT_TOKENS)
            progress.advance(task)
        for _ in range(num_repeats):
            prefill.append(measure_prefill({ENGINE: engine, BF16: bf16, GENERATE: generate}, rng))
            prefix.append(measure_prefix(engine, rng))
            gap.append(measure_gap(engine, rng))
            for size, values in books.items():
                values.append(measure_bookkeeping(engine, size, rng))
            start.append(measure_start(options.model, options.threads))
            progress.advance(task)
    medians = medians_of(samples)
    console.print(decode_table(medians, GENERATE))
    ratios = [times[GENERATE] / times[ENGINE] for times in prefill]
    targets = [
        *decode_targets(medians),
        Target("prefill_512_vs_generate", statistics.median(ratios), 1.0, is_upper_bound=False),
        Target("prefill_512_vs_generate_aim", statistics.median(ratios), 1.1, is_upper_bound=False),
        *at_most("bookkeeping_1_request_ms", books[1], 0.5, 0.25),
        *at_most("bookkeeping_32_requests_ms", books[32], 2.0, 0.8),
        *at_most("same_prefix_ttft_vs_cold", prefix, 0.25, 0.15),
        *at_most("worst_gap_beside_a_prefill_vs_quiet_step", gap, 2.5, 2.0),
        Target("blocks_held_after_abort", blocks_after_abort(engine, rng), 0),
        *at_most("start_s", start, 5.0, 3.0),
    ]
    figures = {
        "is_quick": options.quick, "model": Path(options.model).name, "threads": options.threads,
        "decode_ms": [{"path": name, "requests": size, **report.percentiles(v)} for (name, size), v in samples.items()],
        "prefill_512_ms": prefill, "same_prefix": prefix, "worst_gap": gap, "bookkeeping_ms": books, "start_s": start,
    }  # fmt: skip
    report.finish(options.json, "engine", figures, targets)


if __name__ == "__main__":
    main()
