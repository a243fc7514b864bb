"""Does the engine's GPU side work, and how fast is it? Errors in tolerances, ms, GB/s, us.

    python -m benchmarks.gpu_check [--quick] [--json PATH] [--model DIRECTORY]

Under 5 minutes, for a machine with a CUDA device; without one it says `unrun` and ends. Attention: each back end
against the reference, and its decode speed against the memory's. Engine: the same tokens with CUDA graphs, without
them, and with two steps in flight; decode and prefill of each against transformers' generate(), in turns. Server: what
a stream's tokens take from their publication to the client, through the real server. Models are made up on the spot
(the weights are random, their shapes those of a 135M and a 1B model), so nothing is downloaded; `--model` replaces the
first.
"""

import argparse
import gc
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.report import Target
from ringserve.engine.config import Device
from ringserve.engine.interface import Engine
from ringserve.shm_transport.messages import AddRequest

NUM_THREADS = 8
DECODE_SIZES, NUM_STEPS, PROMPT_TOKENS = (1, 8, 32), 32, 128
STREAM_TOKENS = 400
# Dtype, kv heads, query heads of each, head dim: each costs the Triton kernels some seconds of compilation.
LAYERS = (
    (torch.bfloat16, 3, 3, 64), (torch.bfloat16, 8, 4, 128), (torch.bfloat16, 2, 1, 256), (torch.float16, 8, 4, 128),
    (torch.float32, 3, 3, 64),
)  # fmt: skip
SMALL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip
LARGE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
VOCAB_SIZE = 49_152


def make_model(path: Path, shape: dict[str, int], device: Device) -> None:
    """Write a Llama of random bf16 weights, and a tokenizer whose tokens are mostly four letters."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, vocab_size=VOCAB_SIZE, max_position_embeddings=8192, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device(device):
        LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    letters = "abcdefghijklmnopqrstuvwxyz"
    singles = sorted(pre_tokenizers.ByteLevel.alphabet())
    made_up = (a + b + c + d for a in letters for b in letters for c in letters for d in letters)
    tokens = [*singles, *(next(made_up) for _ in range(VOCAB_SIZE - len(singles)))]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def gpu_ms(function: Callable[[], object], num_repeats: int = 30) -> float:
    """Return a function's median time on the GPU."""
    for _ in range(5):
        function()
    times = []
    for _ in range(num_repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure_bandwidth() -> float:
    """Return what a large copy reads and writes, GB/s."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_ms(lambda: target.copy_(source)) / 1e6


def check_attention(device: torch.device) -> list[dict[str, Any]]:
    """Return each back end's error, in tolerances, for several layers, dtypes, options and block sizes."""
    from ringserve.engine.attention.choose import candidates, options_to_check, relative_error
    from ringserve.engine.attention.kv_cache import LayerShape

    rows = []
    for block_size, layers in ((32, LAYERS), (256, LAYERS[:2])):
        for backend in candidates(block_size):
            for dtype, kv_heads, group, dim in layers:
                shape = LayerShape(kv_heads, dim, dim, dtype)
                row = {"backend": backend.name, "block_size": block_size, "dtype": str(dtype), "dim": dim}
                try:
                    errors = [
                        relative_error(backend, shape, group, options, block_size, device)
                        for options in options_to_check(kv_heads * group, device)
                    ]
                    rows.append(row | {"errors": errors})
                except Exception as exc:  # the check goes on with the next: that is what it is for
                    rows.append(row | {"failed": f"{type(exc).__name__}: {exc}"[:300]})
    return rows


@torch.inference_mode()
def time_attention(device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    """Return how fast each back end reads the cache for decodes, of the memory's bandwidth; 32 heads, 8 kv heads."""
    from ringserve.engine.attention.choose import REFERENCE, candidates
    from ringserve.engine.attention.kernels import Options
    from ringserve.engine.attention.kv_cache import KVCache, LayerShape
    from ringserve.engine.attention.model_inputs import upload
    from ringserve.engine.schedule.batch import Batch

    rows = []
    shape = LayerShape(8, 128, 128, torch.bfloat16)
    for block_size in (32, 256):
        for num_rows, length in ((1, 4096), (32, 2048), (128, 1024)):
            blocks = length // block_size
            tables = np.random.default_rng(0).permutation(num_rows * blocks).reshape(num_rows, blocks) + 1
            cache = KVCache({0: shape}, tables.size + 1, block_size, device)
            zeros, slots = np.zeros(num_rows, np.int64), tables[:, -1].astype(np.int64) * block_size + block_size - 1
            batch = Batch(
                zeros, zeros, slots, tables.astype(np.int32), np.full(num_rows, length), np.arange(num_rows)
            )  # fmt: skip
            last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
            _, paged = upload(batch, device, last_tokens, max_length=length)
            query = torch.randn(num_rows, 32, 128, device=device, dtype=torch.bfloat16)
            new = torch.randn(num_rows, 8, 128, device=device, dtype=torch.bfloat16)
            for backend in (*candidates(block_size), REFERENCE):
                attend = partial(backend.make(paged, cache).attend, 0, query, new, new, Options())
                try:
                    elapsed_ms = gpu_ms(attend)
                except Exception as exc:  # the check goes on with the next
                    rows.append({"backend": backend.name, "rows": num_rows, "failed": f"{exc}"[:300]})
                    continue
                rate = num_rows * length * shape.num_bytes / elapsed_ms / 1e6
                rows.append(
                    {
                        "backend": backend.name, "block_size": block_size, "rows": num_rows, "length": length,
                        "ms": elapsed_ms, "share_of_bandwidth": rate / bandwidth,
                    }
                )  # fmt: skip
    return rows


def check_tokens(model: str, device: Device) -> dict[str, float]:
    """Return how many of some requests get the tokens of an engine without graphs and overlap, in fp32, by path.

    All should: what is recorded, padded or carried on the device must change nothing but rounding.
    """
    from ringserve.engine.config import EngineConfig
    from ringserve.engine.core.make import make_engine

    found = {}
    for overlap in ("off", "on"):
        config = EngineConfig(
            model=model, device=device, dtype="float32", num_threads=NUM_THREADS, max_model_len=1024, overlap=overlap,
            kv_cache_tokens=16 * 1024,
        )  # fmt: skip
        engine = make_engine(config)
        found["engine" if overlap == "off" else "engine, two steps in flight"] = _run_requests(engine)
        if overlap == "off":
            engine._runner._graphs = None  # type: ignore[union-attr, attr-defined]
            wanted = _run_requests(engine)
    return {
        name: statistics.fmean(tokens[handle] == wanted[handle] for handle in wanted) for name, tokens in found.items()
    }


def _run_requests(engine: Engine) -> dict[int, list[int]]:
    """Return what some requests of all kinds get, whose steps are of many sizes."""
    rng = np.random.default_rng(0)
    tokens: dict[int, list[int]] = {}
    for handle in range(40):
        prompt = rng.integers(1000, 40_000, rng.integers(1, 300)).astype(np.int32)
        sampling = ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 20})[handle % 4]
        engine.add(
            AddRequest(handle=handle, prompt_token_ids=prompt, max_tokens=10 + handle, seed=handle, **sampling)  # type: ignore[arg-type]
        )
    while engine.has_work:
        step = engine.step()
        engine.after_step()
        if failures := engine.take_failures():
            raise failures[0]
        if step is not None:
            for handle, token_id in zip(step.handles.tolist(), step.token_ids.tolist(), strict=True):
                tokens.setdefault(handle, []).append(token_id)
    return tokens


def measure_engine(model: str, device: Device, *, is_quick: bool) -> dict[str, Any]:
    """Return decode steps and prefills of one model, by path, ms."""
    from benchmarks.engine_paths import EnginePath, GeneratePath, GenerationPath, make_prompts

    settings: dict[str, Any] = {"device": device, "kv_cache_tokens": 128 * 1024}
    without_graphs = EnginePath(model, NUM_THREADS, overlap="off", **settings)
    graphs = EnginePath(model, NUM_THREADS, overlap="off", **settings)
    overlap = EnginePath(model, NUM_THREADS, overlap="on", **settings)
    runner = graphs.core._runner  # type: ignore[union-attr]
    what = {
        "attention": runner._backend.name if runner._backend else "none",  # type: ignore[attr-defined]
        "has_graphs": runner._graphs is not None,  # type: ignore[attr-defined]
        "runner": type(runner.model).__name__,  # type: ignore[attr-defined]
    }
    without_graphs.core._runner._graphs = None  # type: ignore[union-attr, attr-defined]
    paths: dict[str, GenerationPath] = {
        "engine": graphs, "engine without graphs": without_graphs, "engine, two steps in flight": overlap,
        "generate()": GeneratePath(model, device),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    decode: dict[str, list[float]] = {}
    prefill: dict[str, list[float]] = {}
    for round_number in range(2 if is_quick else 4):  # the first warms up
        for size in DECODE_SIZES:
            for name, path in paths.items():
                times = path.decode_steps_ms(make_prompts(rng, size, PROMPT_TOKENS), NUM_STEPS)
                if round_number:
                    decode.setdefault(f"{name} / {size}", []).extend(times[2:])
        for length in (512, 1900):
            for name, path in paths.items():
                elapsed_ms = path.first_token_ms(make_prompts(rng, 1, length)[0])
                if round_number:
                    prefill.setdefault(f"{name} / {length}", []).append(elapsed_ms)
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    del paths, graphs, without_graphs, overlap, runner
    gc.collect()
    torch.cuda.empty_cache()
    medians = {key: statistics.median(values) for key, values in {**decode, **prefill}.items()}
    return {**what, "weight_bytes": weights, "median_ms": medians, "decode_ms": decode, "prefill_ms": prefill}


def measure_server(model: str, scratch: Path) -> dict[str, Any]:
    """Return what a token takes from its publication to the client, us, for one stream of the real server."""
    log = scratch / "steps.log"
    command = [
        sys.executable,
        "-P",
        "-m",
        "ringserve.server.cli",
        "serve",
        model,
        "--port",
        "0",
        "--step-log",
        str(log),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://[\d.]+:(\d+)/v1", line)
        if found is None:
            return {"failed": (line + (server.stderr.read() if server.stderr else ""))[-2000:]}
        body = {"prompt": [5, 6, 7], "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
        for _ in range(2):  # the first warms up
            stamps = _stream(int(found[1]), body)
        published = np.array([int(each.split()[0]) for each in log.read_text().splitlines() if each.split()[1] != "0"])
        index = np.searchsorted(published, stamps, side="right") - 1  # the last step that the event can hold
        added_us = (np.array(stamps) - published[index]) / 1e3
        gaps_us = np.diff(published[-STREAM_TOKENS:]) / 1e3
        return {
            "added_us": report.percentiles(added_us.tolist()), "step_us": report.percentiles(gaps_us.tolist()),
            "events": len(stamps),
        }  # fmt: skip
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)


def _stream(port: int, body: dict[str, Any]) -> list[int]:
    """Return when each event of a stream came, CLOCK_MONOTONIC ns."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response, stamps = connection.getresponse(), []
    assert response.status == 200, response.read()
    while line := response.readline():
        if line.startswith(b"data: {"):
            stamps.append(time.monotonic_ns())
    connection.close()
    return stamps


def choose_targets(figures: dict[str, Any]) -> list[Target]:
    """Return what the figures should reach; the speeds are projections until this has been run."""
    targets = []
    for name in ("Triton", "torch's varlen_attn"):
        plain = [row for row in figures["attention"] if row["backend"] == name and row["dtype"] != "torch.float32"]
        errors = [row["errors"][0] if "errors" in row else float("inf") for row in plain]
        if errors:
            targets.append(Target(f"{name} error, tolerances", max(errors), 1.0))
    for name, share in figures["tokens"].items():
        targets.append(
            Target(f"{name}: requests with the plain engine's tokens in fp32", share, 0.9, is_upper_bound=False)
        )
    for name, engine in figures["engine"].items():
        ms = engine["median_ms"]
        best = min(ms["engine / 1"], ms["engine, two steps in flight / 1"])
        bandwidth_ms = engine["weight_bytes"] / figures["bandwidth_gb_s"] / 1e6
        targets += [
            Target(f"{name}: generate() over engine, 1 request", ms["generate() / 1"] / best, 3, is_upper_bound=False),
            Target(f"{name}: step over the weights' time at full bandwidth", best / bandwidth_ms, 3),
            Target(f"{name}: engine over generate(), prefill 1900", ms["engine / 1900"] / ms["generate() / 1900"], 1.0),
        ]
    if "added_us" in figures["server"]:
        targets.append(Target("added latency p50, us", figures["server"]["added_us"]["p50"], 300))
    return targets


def main() -> None:
    """Run, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", metavar="DIRECTORY", help="a Llama-like model, instead of the small made-up one")
    options = report.parse_arguments(parser, "gpu_check")
    if not torch.cuda.is_available():
        print("gpu_check: unrun: torch sees no CUDA device here")
        if options.json is not None and options.json.parent != report.RESULTS:
            report.save(options.json, "gpu_check", {"status": "unrun"}, [])
        return
    started = time.monotonic()
    device = torch.device("cuda")
    figures: dict[str, Any] = {
        "status": "run", "is_quick": options.quick, "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__, "bandwidth_gb_s": measure_bandwidth(), "engine": {},
    }  # fmt: skip
    figures["attention"] = check_attention(device)
    figures["attention_speed"] = time_attention(device, figures["bandwidth_gb_s"])
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        models = {"135M": options.model or str(scratch / "small"), "1B": str(scratch / "large")}
        if options.model is None:
            make_model(scratch / "small", SMALL, "cuda")
        make_model(scratch / "large", LARGE, "cuda")
        figures["tokens"] = check_tokens(models["135M"], "cuda")
        for label, model in models.items():
            figures["engine"][label] = measure_engine(model, "cuda", is_quick=options.quick)
        figures["server"] = measure_server(models["135M"], scratch)
    figures["elapsed_s"] = time.monotonic() - started
    print(json.dumps({key: value for key, value in figures.items() if key != "engine"}, indent=1))
    for label, engine in figures["engine"].items():
        print(label, json.dumps({key: value for key, value in engine.items() if not key.endswith("_ms")}))
        for key, value in engine["median_ms"].items():
            print(f"  {key:40} {value:8.3f} ms")
    report.finish(options.json, "gpu_check", figures, choose_targets(figures))


if __name__ == "__main__":
    main()
