"""`ringserve bench` as a user runs it, against engines whose figures are known."""

import importlib.util
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ringserve.server.errors import StartupError
from ringserve.server.load import command
from ringserve.server.load.config import BenchConfig
from tests.e2e.conftest import CLI, RunningServer

pytestmark = pytest.mark.slow

STEP_MS, PREFILL_MS, NUM_TOKENS = 20, 100, 25


def bench(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, "bench", url, *arguments], capture_output=True, text=True, timeout=120, check=False)


def figures(url: str, path: Path, *arguments: str) -> dict[str, Any]:
    done = bench(url, "--json", str(path), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("load", [("--concurrency", "4"), ("--request-rate", "20")])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_figures_are_those_of_the_engine(
    shared_server, tmp_path: Path, endpoint: str, load: tuple[str, str]
) -> None:
    """A step each 20 ms, 100 ms to the first token, and its token a step after: waiting for steps adds up to three."""
    server = shared_server(
        "--engine", "synthetic", "--step-time-ms", str(STEP_MS), "--prefill-time-ms", str(PREFILL_MS),
        "--max-model-len", "512",
    )  # fmt: skip
    arguments = ("--endpoint", endpoint, "--num-prompts", "12", "--input-len", "50", "--output-len", str(NUM_TOKENS))
    found = figures(server.url, tmp_path / "figures.json", "--ignore-eos", *arguments, *load)
    latencies = found["latencies"]
    print({name: values["p50"] for name, values in latencies.items()})
    assert latencies["inter_token_ms"]["n"] == 12 * (NUM_TOKENS - 1)
    assert STEP_MS - 1 <= latencies["inter_token_ms"]["p50"] <= STEP_MS + 10
    assert STEP_MS - 1 <= latencies["time_per_output_token_ms"]["p50"] <= STEP_MS + 10
    assert PREFILL_MS <= latencies["ttft_ms"]["p50"] <= PREFILL_MS + 5 * STEP_MS
    whole = latencies["ttft_ms"]["mean"] + (NUM_TOKENS - 1) * latencies["time_per_output_token_ms"]["mean"]
    assert whole == pytest.approx(latencies["end_to_end_ms"]["mean"], rel=0.02)
    assert (found["num_completed"], found["num_failed"]) == (12, 0)
    assert found["num_completion_tokens"] == 12 * NUM_TOKENS
    assert found["num_prompt_tokens"] == sum(request["num_prompt_tokens"] for request in found["requests"])
    assert 50 <= found["num_prompt_tokens"] / 12 < 100


def test_merged_events_are_counted_by_their_tokens(start_server, tmp_path: Path) -> None:
    arguments = ["--engine", "synthetic", "--step-time-ms", "40", "--tokens-per-step", "4", "--max-model-len", "512"]
    server = start_server(*arguments)
    found = figures(
        server.url, tmp_path / "figures.json", "--num-prompts", "4", "--output-len", "40", "--ignore-eos",
        "--endpoint", "completions",
    )  # fmt: skip
    assert found["tokens_per_event"] == 4
    assert found["num_completion_tokens"] == 160
    assert found["latencies"]["inter_token_ms"]["n"] == 4 * 39
    assert found["latencies"]["inter_token_ms"]["p50"] == 0  # three gaps of four are within an event
    assert found["latencies"]["inter_event_ms"]["p50"] >= 35
    mean_ms = found["latencies"]["time_per_output_token_ms"]["mean"]
    assert found["latencies"]["inter_token_ms"]["mean"] == pytest.approx(mean_ms, rel=0.01)


def test_the_table_and_the_plot_are_made(synthetic: RunningServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot's extra is not installed")
    plot = tmp_path / "plot.png"
    done = bench(synthetic.url, "--num-prompts", "6", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    for word in ("time to first token", "inter-token", "time per output token", "end to end", "p99", "requests/s"):
        assert word in done.stdout
    assert "6/6" in done.stderr  # the progress bar
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_refusals_are_counted_and_waited_for(start_server, tmp_path: Path) -> None:
    server = start_server(
        "--engine", "synthetic", "--step-time-ms", "20", "--max-num-queued-reqs", "2", "--max-model-len", "512"
    )
    found = figures(server.url, tmp_path / "figures.json", "--num-prompts", "8", "--concurrency", "4")
    assert found["num_completed"] + found["num_failed"] == 8
    assert set(found["errors"]) == {"HTTP 503, refused"}
    assert found["num_failed"] >= 2
    assert found["duration_s"] > 1  # two of four waited for the second that Retry-After asks for


def test_a_dead_server_is_an_error_that_says_so() -> None:
    done = bench("http://127.0.0.1:9")
    assert done.returncode == 2
    assert done.stderr.startswith("ringserve: error: nothing answers at http://127.0.0.1:9/v1/models")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_the_load(option: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot's extra is not installed")
    for path, reason in (("missing/file", "there is no such directory"), ("", "name a file")):
        done = bench("http://127.0.0.1:9", option, str(tmp_path / path))
        assert done.returncode == 2
        assert reason in done.stderr


def test_a_plot_without_its_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StartupError, match=r"pip install 'ringserve\[bench\]'"):
        command.bench(BenchConfig(url="http://127.0.0.1:9", plot="a.png"))


def test_a_request_that_cannot_succeed_stops_before_the_load(synthetic: RunningServer) -> None:
    done = bench(synthetic.url, "--model", "gpt-4")
    assert done.returncode == 2
    assert "HTTP 404" in done.stderr
    assert "gpt-4" in done.stderr


def test_a_server_that_dies_in_mid_load_leaves_its_figures(start_server) -> None:
    server = start_server("--engine", "synthetic", "--step-time-ms", "50", "--max-model-len", "4096")
    process = start_bench(server, "--num-prompts", "3", "--concurrency", "2", "--output-len", "2000", "--ignore-eos")
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "connection lost" in stdout
    assert "cannot connect" in stdout


def test_ctrl_c_prints_what_there_is(start_server) -> None:
    server = start_server("--engine", "synthetic", "--step-time-ms", "50", "--max-model-len", "4096")
    process = start_bench(server, "--num-prompts", "50", "--concurrency", "2", "--output-len", "2000", "--ignore-eos")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "2 cut short by Ctrl-C" in stdout
    assert "Traceback" not in stderr


def start_bench(server: RunningServer, *arguments: str) -> subprocess.Popen[str]:
    """Return a bench whose requests have reached the server."""
    command = [*CLI, "bench", server.url, "--num-warmups", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while server.load()["server_load"] < 2:
        assert process.poll() is None
    return process
