"""The Triton kernels without a GPU: their arithmetic in Triton's interpreter, and that they compile for one.

Both run in processes of their own, since Triton decides at import how it runs a kernel. The interpreter knows no bf16.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not there: it comes with torch for CUDA"
    ),
]
SCRIPT = Path(__file__).with_name("triton_script.py")


def run(task: str, *arguments: object, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), task, *map(str, arguments)]
    path = os.pathsep.join((str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "group", "block_size"),
    [(16, 16, 1, 32), (16, 16, 3, 4), (64, 64, 4, 32), (40, 24, 2, 256)],
)
def test_kernels_agree_with_the_reference_in_the_interpreter(
    key_dim: int, value_dim: int, group: int, block_size: int
) -> None:
    try:
        errors = run("interpret", key_dim, value_dim, group, block_size, TRITON_INTERPRET="1")
    except AssertionError as exc:
        if "0-dimensional arrays" in str(exc):
            pytest.skip("this Triton's interpreter does not work with this numpy: 3.7 works with 2.4")
        raise
    assert set(errors) == {"float32", "float16"}
    assert all(error <= 1 for each in errors.values() for error in each)
    assert all(len(each) == 3 for each in errors.values())  # plain, a window, all options at once


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 8), (256, 1)])
def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(head_dim: int, group: int) -> None:
    shared = run("compile", head_dim, group)
    assert len(shared) == 10  # two kernels, plain and with all options, and the reduction; in bf16 and fp32
    assert max(shared.values()) <= 160 * 1024  # an A100's is 164 KiB, an H200's 228
