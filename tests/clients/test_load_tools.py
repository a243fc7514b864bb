"""guidellm and aiperf, unchanged, against the synthetic engine; each needs an environment of its own (pipx)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.e2e.conftest import RunningServer

pytestmark = pytest.mark.slow
NUM_REQUESTS, NUM_TOKENS, STEP_MS = 12, 16, 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "synthetic", "--max-model-len", "1024", "--step-time-ms", str(STEP_MS))
    yield running
    assert running.stop() == 0


def run(tool: str, directory: Path, *arguments: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    binary = shutil.which(tool, path=path)
    if binary is None:
        pytest.skip(f"{tool} is not installed: pipx install {tool}")
    done = subprocess.run([binary, *arguments], cwd=directory, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_runs_and_reads_the_engines_step(
    server: RunningServer, model_directory: Path, tmp_path: Path, path: str
) -> None:
    run(
        "guidellm", tmp_path, "run", "--backend", f"kind=openai_http,target={server.url},request_format={path}",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={model_directory}", "--disable-progress",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}",
    )  # fmt: skip
    metrics = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"][0]["metrics"]
    print(metrics["inter_token_latency_ms"]["successful"]["median"])
    assert metrics["request_totals"] == {
        "successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS,
    }  # fmt: skip
    assert metrics["output_token_count"]["successful"]["mean"] == NUM_TOKENS
    assert metrics["inter_token_latency_ms"]["successful"]["median"] >= STEP_MS - 2


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_runs_and_reads_the_engines_step(
    server: RunningServer, model_directory: Path, tmp_path: Path, endpoint: str
) -> None:
    run(
        "aiperf", tmp_path, "profile", "--model", MODEL, "--url", server.url, "--endpoint-type", endpoint,
        "--streaming", "--tokenizer", str(model_directory), "--concurrency", "4", "--request-count", str(NUM_REQUESTS),
        "--isl", "32", "--osl", str(NUM_TOKENS), "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
        "--artifact-dir", str(tmp_path), "--ui", "none",
    )  # fmt: skip
    figures = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    print(figures["inter_token_latency"])
    assert figures["request_count"]["avg"] == NUM_REQUESTS
    assert figures["error_summary"] == []
    assert figures["output_sequence_length"]["avg"] == NUM_TOKENS
    assert figures["inter_token_latency"]["p50"] >= STEP_MS - 2
