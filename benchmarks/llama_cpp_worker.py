"""llama.cpp for benchmarks/engine_llama_cpp.py, in a process and, if need be, an interpreter of its own.

Run as a file by an interpreter that has llama-cpp-python: `python llama_cpp_worker.py GGUF THREADS`. Reads one JSON
object a line, {"prompts": [[token ids]], "num_steps": N}, and answers each with one line: {"first_ms": from the prompts
to their first tokens, "steps_ms": the time of each step after that, "token_ids": [[...]]}. The first line that it
writes is {"version", "system"}. Must know nothing of the project.

The library's own C interface, batches of sequences, no sampler: the most likely token is numpy's argmax, which is
faster than the library's greedy sampler. One context for each number of sequences, so that nobody pays for the others.
"""

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np

CONTEXT_TOKENS = 1024  # of a sequence


class Decoder:
    """One context for a number of sequences that run together."""

    def __init__(self, model: Any, num_sequences: int, num_threads: int) -> None:
        params = llama.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = params.n_batch = num_sequences * CONTEXT_TOKENS
        params.n_threads = params.n_threads_batch = num_threads
        params.no_perf = True
        self._context = llama.llama_init_from_model(model, params)
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def generate(self, prompts: list[list[int]], num_steps: int) -> dict[str, Any]:
        """Run the prompts, then `num_steps` tokens for each at once."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        started = time.perf_counter()
        tokens = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        last = self._decode(tokens)
        stamps = [time.perf_counter()]
        outputs = [last]
        for step in range(num_steps):
            last = self._decode([(last[n], len(prompt) + step, n, True) for n, prompt in enumerate(prompts)])
            outputs.append(last)
            stamps.append(time.perf_counter())
        return {
            "first_ms": 1e3 * (stamps[0] - started),
            "steps_ms": (1e3 * np.diff(stamps)).tolist(),
            "token_ids": np.array(outputs).T.tolist(),
        }

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, whether its logits are wanted); return the most likely next ones."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, (token_id, position, sequence, is_wanted) in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.logits[row] = token_id, position, is_wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        num_wanted = sum(is_wanted for *_, is_wanted in tokens)
        # The rows lie one after the other, in the order of the batch.
        pointer = ctypes.cast(llama.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(pointer, (num_wanted, self._vocab_size))
        return logits.argmax(axis=1).tolist()  # type: ignore[no-any-return]


def main() -> None:
    """Load, then answer each line."""
    path, num_threads = sys.argv[1], int(sys.argv[2])
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(path.encode(), params)
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    system = llama.llama_print_system_info().decode()
    print(json.dumps({"version": llama.__version__, "system": system}), flush=True)
    decoders: dict[int, Decoder] = {}
    for line in sys.stdin:
        order = json.loads(line)
        size = len(order["prompts"])
        decoders[size] = decoders.get(size) or Decoder(model, size, num_threads)
        print(json.dumps(decoders[size].generate(order["prompts"], order["num_steps"])), flush=True)


if __name__ == "__main__":
    main()
