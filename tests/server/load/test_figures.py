import pytest

from ringserve.server.load.client import Record
from ringserve.server.load.config import BenchConfig
from ringserve.server.load.figures import inter_token_s, samples, summarize, table
from ringserve.server.load.run import Run

CONFIG = BenchConfig(url="http://a", api_key="secret")


def record(*event_s: float, tokens: int | None = None, finish_s: float | None = None, error: str = "") -> Record:
    made = Record(0.0, event_s=list(event_s), finish_s=finish_s, ended_s=10.0, error=error)
    if tokens is not None:
        made.has_usage, made.prompt_tokens, made.completion_tokens = True, 7, tokens
    made.close()
    return made


def run_of(*records: Record) -> Run:
    return Run("m", list(records), 0.0, 10.0, num_unfinished=0, is_interrupted=False, client_cpu_s=1.0)


def test_one_token_an_event_gives_the_gaps_between_events() -> None:
    assert inter_token_s(record(1.0, 1.5, 3.5, tokens=3)) == [0.5, 2.0]


def test_tokens_of_one_event_are_zero_apart_wherever_they_merged() -> None:
    """Three events with six tokens: however those are shared out, three tokens came together with one before them."""
    assert inter_token_s(record(1.0, 2.0, 4.0, tokens=6)) == [1.0, 2.0, 0.0, 0.0, 0.0]


def test_a_finish_without_text_is_a_token_only_if_the_server_counts_one() -> None:
    assert inter_token_s(record(1.0, 2.0, tokens=3, finish_s=2.25)) == [1.0, 0.25]
    assert inter_token_s(record(1.0, 2.0, tokens=2, finish_s=2.25)) == [1.0]
    assert record(tokens=1, finish_s=2.25).event_s == [2.25]


def test_without_usage_an_event_counts_as_a_token_and_the_table_says_so() -> None:
    summary = summarize(CONFIG, run_of(record(1.0, 2.0)))
    assert summary["num_completion_tokens"] == 2
    assert "no usage" in table(summary)
    assert "no usage" not in table(summarize(CONFIG, run_of(record(1.0, 2.0, tokens=2))))


def test_latencies_are_of_the_requests_that_succeeded() -> None:
    values = samples(run_of(record(1.0, 2.0, 3.0, tokens=5), record(0.5, tokens=1), record(9.0, error="timeout")))
    assert values["ttft_ms"] == [1000.0, 500.0]
    assert values["time_per_output_token_ms"] == [500.0]  # two seconds for the four tokens after the first
    assert values["inter_event_ms"] == [1000.0, 1000.0]
    assert values["end_to_end_ms"] == [10_000.0, 10_000.0]


def test_rates_count_tokens_by_usage_over_the_whole_run() -> None:
    summary = summarize(CONFIG, run_of(record(1.0, 2.0, tokens=30), record(1.0, error="HTTP 503, refused")))
    assert summary["output_tokens_per_s"] == 3.0
    assert summary["total_tokens_per_s"] == 3.7
    assert summary["requests_per_s"] == 0.1
    assert summary["tokens_per_event"] == 15.0
    assert (summary["num_completed"], summary["num_failed"]) == (1, 1)


def test_errors_are_counted_by_kind_with_the_first_message_of_each() -> None:
    failed = [record(error="timeout"), record(error="HTTP 500"), record(error="timeout")]
    for number, each in enumerate(failed):
        each.detail = f"detail {number}"
    summary = summarize(CONFIG, run_of(*failed))
    assert summary["errors"] == {"timeout": 2, "HTTP 500": 1}
    lines = table(summary).splitlines()
    assert "      2 timeout: detail 0" in lines
    assert "      1 HTTP 500: detail 1" in lines


def test_percentiles_are_those_of_the_samples() -> None:
    summary = summarize(CONFIG, run_of(*(record(n / 1000, tokens=1) for n in range(1, 102))))
    figures = summary["latencies"]["ttft_ms"]
    assert figures["n"] == 101
    assert [figures[name] for name in ("p50", "p90", "p95", "p99", "max", "mean")] == pytest.approx(
        [51, 91, 96, 100, 101, 51]
    )


def test_a_client_that_was_busy_itself_is_told() -> None:
    run = run_of(record(1.0, tokens=1))
    assert "of a core" not in table(summarize(CONFIG, run))
    busy = Run(run.model, run.records, 0.0, 10.0, num_unfinished=0, is_interrupted=False, client_cpu_s=9.5)
    assert "used 95% of a core" in table(summarize(CONFIG, busy))


def test_the_key_is_not_among_the_figures() -> None:
    assert "secret" not in str(summarize(CONFIG, run_of(record(1.0, tokens=1))))
