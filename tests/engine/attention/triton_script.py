"""What test_triton_paged.py runs in processes of their own; the last line is the result as JSON."""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringserve.engine.attention import triton_paged
from ringserve.engine.attention.choose import candidates, options_to_check, relative_error
from ringserve.engine.attention.kernels import Options
from ringserve.engine.attention.kv_cache import LayerShape

CPU = torch.device("cpu")


def interpret(key_dim: int, value_dim: int, group: int, block_size: int) -> dict[str, list[float]]:
    """Return by dtype how far the kernels are from the reference, in tolerances, for some options."""
    backend = next(each for each in candidates(block_size) if each.name == "Triton")
    errors = {}
    for dtype in (torch.float32, torch.float16):
        shape = LayerShape(2, key_dim, value_dim, dtype)
        errors[str(dtype).removeprefix("torch.")] = [
            relative_error(backend, shape, group, options, block_size, CPU)
            for options in options_to_check(2 * group, CPU)
        ]
    return errors


def compile_all(head_dim: int, group: int) -> dict[str, int]:
    """Compile for compute capability 9.0; return each kernel's shared memory, bytes."""
    shared = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        for options in (Options(), Options(0.3, 50, 5.0, torch.zeros(1))):
            keys = torch.empty(1, 1, 32, head_dim, dtype=dtype)
            constants = triton_paged._constants(keys, keys, options)
            width, queries = triton_paged._side(head_dim), max(1, triton_paged._TILE_ROWS // group)
            kind = f"{name} {options.is_plain}"
            shared[f"decode {kind}"] = _compile(
                triton_paged._decode_kernel, name, GROUP=group, NUM_SPLITS=8, BLOCK_M=triton_paged._side(group),
                BLOCK_V=width, **constants,
            )  # fmt: skip
            shared[f"chunk {kind}"] = _compile(
                triton_paged._chunk_kernel, name, HAS_SINKS=options.sinks is not None, GROUP=group, NUM_QUERIES=queries,
                BLOCK_M=triton_paged._side(queries * group), BLOCK_V=width, **constants,
            )  # fmt: skip
        shared[f"reduce {name}"] = _compile(
            triton_paged._reduce_kernel, name, HAS_SINKS=True, NUM_SPLITS=8, VALUE_DIM=head_dim, BLOCK_V=width
        )
    return shared


def _compile(kernel: Any, dtype: str, **constants: Any) -> int:
    types = dict.fromkeys(("block_tables", "lengths", "spans", "tiles"), "*i32") | {
        "partial": "*fp32", "states": "*fp32", "scale": "fp32", "softcap": "fp32", "window": "i32",
    }  # fmt: skip
    signature = {}
    for name in kernel.arg_names:
        default = "i64" if name.startswith("stride") else f"*{dtype}"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return int(compiled.metadata.shared)


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    print(json.dumps({"interpret": interpret, "compile": compile_all}[task](*map(int, arguments))))
