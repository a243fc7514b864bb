"""/metrics and the log of the real server: formats, names, what clients do to the counts, what lines say."""

import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import send

ROOT = Path(__file__).parents[2]
BODY = {"prompt": "hello you", "max_tokens": 10, "ignore_eos": True}
NAME = re.compile(r"\b(?:ringserve:|process_)\w+")
SUFFIXES = ("", "_bucket", "_count", "_sum", "_total")


def samples(server: Any) -> dict[str, float]:
    """Return every sample; by its name, and by its name with each label but the common ones."""
    values = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            values[",".join((sample.name.removeprefix("ringserve:"), *labels.values()))] = sample.value
    return values


@pytest.fixture
def paced(shared_server: Callable[..., Any]) -> Any:
    return shared_server("--engine", "synthetic", "--step-time-ms", "5", "--served-model-name", 'a "model"')


def test_the_text_format_says_what_clients_have_done(paced, wait) -> None:
    before = samples(paced)
    paced.complete(**BODY, n=2)
    paced.stream("/v1/completions", **BODY)
    assert paced.post("/v1/completions", prompt="a", max_tokens=0).status_code == 400
    wait(lambda: samples(paced)["num_requests_running"] == 0, 10)
    after = samples(paced)

    def more(name: str) -> float:
        return after[name] - before[name]

    assert more("request_success_total,length") == 3
    assert sum(more(f"request_success_total,{reason}") for reason in ("stop", "abort", "error")) == 0
    assert more("generation_tokens_total") == more("request_generation_tokens_sum") == 30
    assert more("prompt_tokens_total") == 4  # two prompts of two tokens
    assert more("inter_token_latency_seconds_count") == 27
    assert more("time_to_first_token_seconds_count") == more("e2e_request_latency_seconds_count") == 3
    assert more("request_params_n_count") == 2
    assert more("ring_tokens_total") == 30
    assert more("step_hop_seconds_count,published_to_read") >= 20
    assert after["process_resident_memory_bytes"] > 2**20


def test_clients_that_go_away_are_aborts(paced, wait) -> None:
    before = samples(paced)
    for stream in (True, False):
        with send(paced.port, "/v1/completions", **BODY | {"max_tokens": 2000, "n": 2, "stream": stream}):
            wait(lambda: samples(paced)["num_requests_running"] == 2, 30)
        wait(lambda: samples(paced)["num_requests_live"] == 0, 30)
    assert samples(paced)["request_success_total,abort"] - before["request_success_total,abort"] == 4
    wait(lambda: samples(paced)["abort_latency_seconds_count"] - before["abort_latency_seconds_count"] == 2, 30)


def test_a_scraper_that_accepts_openmetrics_gets_the_same_names(paced) -> None:
    plain = {family.name for family in text_string_to_metric_families(paced.client.get("/metrics").text)}
    for accept in (
        "application/openmetrics-text;version=1.0.0",
        "application/openmetrics-text",
        "text/plain;version=1.0.0",
    ):
        answer = paced.client.get("/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith(accept.partition(";")[0])
        parse = openmetrics.text_string_to_metric_families if "open" in accept else text_string_to_metric_families
        assert {family.name for family in parse(answer.text)} == plain
        assert answer.text.count("# EOF") == ("open" in accept)


def test_the_dashboard_and_the_documentation_know_the_names_and_no_others(paced) -> None:
    families = list(text_string_to_metric_families(paced.client.get("/metrics").text))
    names = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads((ROOT / "deploy/grafana/ringserve.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {name for expr in targets for name in NAME.findall(expr)}
    assert len(targets) > 40
    assert used <= names
    document = (ROOT / "docs/metrics.md").read_text()
    listed = set(re.findall(r"\w+", " ".join(line.split("|")[1] for line in document.splitlines() if line[:1] == "|")))
    assert {family.name.removeprefix("ringserve:") for family in families} <= listed
    ours = {family.name for family in families if family.name.startswith("ringserve:")}
    assert all(any(name + suffix in used for suffix in SUFFIXES) for name in ours), "a metric that no panel shows"
    for panel in dashboard["panels"]:
        assert panel["title"] in document or panel["type"] == "row"


def run_and_stop(start_server: Callable[..., Any], *flags: str) -> list[str]:
    """Complete one request, then stop; return the server's log, without its first line, the configuration."""
    server = start_server("--engine", "synthetic", *flags)
    server.complete(**BODY, n=2)
    assert server.stop(signal.SIGTERM) == 0
    return server.stderr.splitlines()


def test_the_log_has_the_configuration_and_no_requests_unless_asked(start_server) -> None:
    (line,) = run_and_stop(start_server)
    assert line.startswith("INFO [server] configuration: host='127.0.0.1', port=0")
    assert "max_model_len" in line


def test_requests_are_logged_by_flag_and_their_text_only_by_another(start_server) -> None:
    _, line = run_and_stop(start_server, "--enable-log-requests")
    form = r"INFO \[server\] request cmpl-\w+: prompt tokens 2, cached 0, output tokens 20, "
    form += r"TTFT [\d.]+ ms, total [\d.]+ ms, "
    assert re.fullmatch(form + "finish length,length", line)
    _, line = run_and_stop(start_server, "--enable-log-requests", "--log-prompts")
    assert re.fullmatch(form + "finish length,length, prompt 'hello you'", line)


def test_the_log_can_be_json(start_server) -> None:
    lines = [json.loads(line) for line in run_and_stop(start_server, "--enable-log-requests", "--log-format", "json")]
    assert [sorted(line) for line in lines] == [["level", "logger", "message", "process", "time"]] * 2
    assert [line["logger"] for line in lines] == ["ringserve.server.launcher", "ringserve.server.telemetry.request_log"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"])


def test_both_processes_write_json(start_server) -> None:
    server = start_server("--dtype", "float32", "--log-format", "json")
    assert server.client.get("/health").status_code == 200
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"no HTTP\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.stderr.splitlines()]
    assert {line["process"] for line in lines} == {"server", "engine"}


def test_a_scrape_is_answered_while_streams_run(paced) -> None:
    with httpx.stream(
        "POST", f"{paced.url}/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}
    ) as stream:
        events = stream.iter_raw()  # closes the connection when it goes
        next(events)
        assert samples(paced)["num_requests_running"] == 1
