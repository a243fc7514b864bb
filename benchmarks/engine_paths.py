"""The ways to generate that `benchmarks.engine` compares: the engine's own step loop, and transformers'.

All are greedy, on the same prompts, with the same number of threads; a sample is the time of one decode step.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from ringserve.engine.config import Device, EngineConfig
from ringserve.engine.core.make import make_engine
from ringserve.engine.schedule.step_costs import StepCosts
from ringserve.engine.weights.default_model import default_model_directory
from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.messages import AddRequest
from ringserve.shm_transport.step import Step
from ringserve.shm_transport.step_ring import StepReader, StepWriter

SIZES = (1, 8, 32)  # requests at once
NUM_STEPS = 6  # of a round
PROMPT_TOKENS = 128
MAX_MODEL_LEN = 2048
DEFAULT_THREADS = max(1, len(os.sched_getaffinity(0)) - 1)
_LOW, _HIGH = 1000, 40_000  # token ids of the made-up prompts: no special ones

Prompts = Sequence[NDArray[np.int32]]
Samples = dict[tuple[str, int], list[float]]  # path, requests at once -> times of its steps, ms
Medians = dict[tuple[str, int], float]


def make_prompts(rng: np.random.Generator, count: int, num_tokens: int) -> Prompts:
    """Return random prompts, which share no prefix."""
    return list(rng.integers(_LOW, _HIGH, (count, num_tokens)).astype(np.int32))


class GenerationPath(Protocol):
    """One way to generate."""

    def decode_steps_ms(self, prompts: Prompts, num_steps: int) -> list[float]:
        """Generate `num_steps` tokens for each prompt at once, after its first; return the time of each step."""

    def first_token_ms(self, prompt: NDArray[np.int32]) -> float:
        """Return the time from a prompt to its first token."""


def add_arguments(parser: argparse.ArgumentParser, *, model_help: str) -> None:
    """Add what says which model runs, and on how many threads."""
    parser.add_argument("--model", default=str(default_model_directory()), metavar="DIRECTORY", help=model_help)
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS, metavar="N")


def measure_decode(
    paths: dict[str, GenerationPath], samples: Samples, rng: np.random.Generator, prompt_tokens: int
) -> None:
    """Run one round, and add its step times to `samples`."""
    for size in SIZES:
        for name, path in paths.items():
            times = path.decode_steps_ms(make_prompts(rng, size, prompt_tokens), NUM_STEPS)
            samples.setdefault((name, size), []).extend(times)


def medians_of(samples: Samples) -> Medians:
    """Return the median step of each path and size."""
    return {key: statistics.median(times) for key, times in samples.items()}


def decode_table(medians: Medians, baseline: str) -> Table:
    """Return the step times as a table, each compared with those of the path `baseline`."""
    table = Table(title=f"one decode step, ms; tokens/s; times {baseline}", box=box.SIMPLE_HEAD)
    table.add_column("path", no_wrap=True)
    for size in SIZES:
        table.add_column(f"{size} request{'s' if size > 1 else ''}", justify="right", no_wrap=True)
    for name in dict.fromkeys(name for name, _ in medians):
        row = [(medians[name, size], medians[baseline, size] / medians[name, size], size) for size in SIZES]
        cells = [f"{median:.1f}  {1000 * size / median:.0f}/s  {ratio:.2f}x" for median, ratio, size in row]
        table.add_row(name, *cells)
    return table


class EnginePath:
    """The engine stepped as engine/loop/loop.py does, publishing into a real ring that is emptied between the steps."""

    def __init__(self, model: str, num_threads: int, *, device: Device = "cpu", **settings: Any) -> None:
        config = EngineConfig(
            model=model, device=device, num_threads=num_threads, max_model_len=MAX_MODEL_LEN,
            **{"kv_cache_tokens": 64 * 1024, **settings},
        )  # fmt: skip
        self.core = make_engine(config)
        ring = segment.create(f"{segment.new_base_name()}-step", segment.step_header(RingConfig(), epoch=1))
        ring.unlink()
        self._writer, self._reader = StepWriter(ring, on_full=lambda: None), StepReader(ring)
        self._next_handle = 1

    def add(self, prompt: NDArray[np.int32], max_tokens: int) -> int:
        """Queue a request; return its handle."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.core.add(AddRequest(handle=handle, prompt_token_ids=prompt, max_tokens=max_tokens, temperature=0.0))
        return handle

    def step(self) -> tuple[Step, float]:
        """Run one step with everything that belongs to it; return it and its time, ms."""
        started = time.perf_counter()
        step = self.core.step()
        if step is not None:
            self._writer.publish(step)
        self.core.after_step()
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        if failures := self.core.take_failures():
            raise failures[0]
        if self._reader.consumer.try_wait():
            self._reader.read()
        return step or self.core.idle_step(), elapsed_ms

    def finish(self) -> None:
        """Step until nothing is left."""
        while self.core.has_work:
            self.step()

    def decode_steps_ms(self, prompts: Prompts, num_steps: int) -> list[float]:
        handles, times = self.start_decoding(prompts), []
        for _ in range(num_steps):
            step, elapsed_ms = self.step()
            assert len(step.handles) == len(prompts)
            times.append(elapsed_ms)
        self.core.abort(handles)
        return times

    def start_decoding(self, prompts: Prompts) -> list[int]:
        """Add requests that never end and run their prompts; return their handles once all decode."""
        handles = [self.add(prompt, MAX_MODEL_LEN) for prompt in prompts]
        while len(self.step()[0].handles) < len(handles):
            pass
        return handles

    def first_token_ms(self, prompt: NDArray[np.int32]) -> float:
        started = time.perf_counter()
        self.add(prompt, 1)
        self.finish()
        return 1e3 * (time.perf_counter() - started)

    def costs(self) -> StepCosts:
        """Return what the steps have cost until now."""
        return self.core.costs


class GeneratePath:
    """transformers' generate()."""

    def __init__(self, model: str, device: Device = "cpu") -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
        self.model: Any = loaded.eval().to(device)

    def decode_steps_ms(self, prompts: Prompts, num_steps: int) -> list[float]:
        stamps: list[float] = []

        def note(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        self._generate(np.stack(prompts), num_steps + 1, [note])
        return (1e3 * np.diff(stamps)).tolist()

    def first_token_ms(self, prompt: NDArray[np.int32]) -> float:
        started = time.perf_counter()
        self._generate(prompt[None], 1, None)
        return 1e3 * (time.perf_counter() - started)

    @torch.inference_mode()
    def _generate(self, prompts: NDArray[np.int32], num_tokens: int, criteria: list[Any] | None) -> None:
        ids = torch.from_numpy(prompts.astype(np.int64)).to(self.model.device)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, pad_token_id=0, stopping_criteria=criteria,
        )  # fmt: skip


class ContinuousBatchingPath:
    """transformers' continuous batching, on the model of a GeneratePath's own copy: it changes its attention."""

    def __init__(self, model: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True).eval()

    def decode_steps_ms(self, prompts: Prompts, num_steps: int) -> list[float]:
        answers = self._generate(prompts, num_steps + 1)
        stamps = min((answer.timestamps for answer in answers.values()), key=lambda times: -times[0])
        return (1e3 * np.diff(stamps)).tolist()

    def first_token_ms(self, prompt: NDArray[np.int32]) -> float:
        started = time.perf_counter()
        self._generate([prompt], 1)
        return 1e3 * (time.perf_counter() - started)

    def _generate(self, prompts: Prompts, num_tokens: int) -> Any:
        generation = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=4096)
        return self.model.generate_batch(
            [prompt.tolist() for prompt in prompts], generation_config=generation, record_timestamps=True,
            continuous_batching_config=batching, warmup=False,
        )  # fmt: skip
