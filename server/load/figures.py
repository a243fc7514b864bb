"""From what became of each request to the figures: percentiles, rates, errors by kind; as a table and as JSON.

An inter-token gap is the time between the arrivals of two tokens that follow one another. Tokens of one event arrive
together, 0 apart; how many there were is known from the server's own count, so that merged events are counted rightly.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from ringserve.server.load.client import Record
from ringserve.server.load.config import DEFAULT_CONCURRENCY, BenchConfig
from ringserve.server.load.run import Run

_QUANTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
_COLUMNS = (*_QUANTILES, "max", "mean")
_ROWS = {
    "ttft_ms": "time to first token",
    "inter_token_ms": "inter-token",
    "inter_event_ms": "between events",
    "time_per_output_token_ms": "time per output token",
    "end_to_end_ms": "end to end",
}
_BUSY_CLIENT = 0.8  # share of a core from which on the client may be what is measured


def inter_token_s(record: Record) -> list[float]:
    """Return the gaps between a request's tokens."""
    gaps = np.diff(record.event_s).tolist()
    return gaps + [0.0] * max(0, record.completion_tokens - len(record.event_s))


def samples(run: Run) -> dict[str, list[float]]:
    """Return all samples of each latency, ms, of the requests that succeeded."""
    done = [record for record in run.records if not record.error and record.event_s]
    seconds = {
        "ttft_ms": [record.event_s[0] - record.sent_s for record in done],
        "inter_token_ms": [gap for record in done for gap in inter_token_s(record)],
        "inter_event_ms": [gap for record in done for gap in np.diff(record.event_s).tolist()],
        "time_per_output_token_ms": [
            (record.event_s[-1] - record.event_s[0]) / (record.completion_tokens - 1)
            for record in done
            if record.completion_tokens > 1
        ],
        "end_to_end_ms": [record.ended_s - record.sent_s for record in done],
    }
    return {name: [value * 1e3 for value in values] for name, values in seconds.items()}


def summarize(config: BenchConfig, run: Run) -> dict[str, Any]:
    """Return all figures, ready for JSON."""
    done = [record for record in run.records if not record.error]
    num_output = sum(record.completion_tokens for record in done)
    num_input = sum(record.prompt_tokens for record in done)
    num_events = sum(len(record.event_s) for record in done)
    errors = Counter(record.error for record in run.records if record.error)
    return {
        "config": {name: value for name, value in asdict(config).items() if name != "api_key"},
        "model": run.model,
        "duration_s": run.duration_s,
        "num_completed": len(done),
        "num_failed": len(run.records) - len(done),
        "num_unfinished": run.num_unfinished,
        "is_interrupted": run.is_interrupted,
        "errors": dict(errors.most_common()),
        "error_details": {record.error: record.detail for record in reversed(run.records) if record.error},
        "num_prompt_tokens": num_input,
        "num_completion_tokens": num_output,
        "has_usage": all(record.has_usage for record in done),
        "tokens_per_event": num_output / num_events if num_events else None,
        "requests_per_s": len(done) / run.duration_s,
        "output_tokens_per_s": num_output / run.duration_s,
        "total_tokens_per_s": (num_input + num_output) / run.duration_s,
        "client_cpu_share": run.client_cpu_s / run.duration_s,
        "latencies": {name: _percentiles(values) for name, values in samples(run).items()},
        "requests": [_request(record, run.started_s) for record in run.records],
    }


def table(summary: dict[str, Any]) -> str:
    """Return what the command prints."""
    lines = [_title(summary), "", f"{'ms':24}" + "".join(f"{column:>11}" for column in _COLUMNS)]
    for name, label in _ROWS.items():
        values = summary["latencies"][name]
        lines.append(f"{label:24}" + "".join(f"{_number(values.get(column)):>11}" for column in _COLUMNS))
    completed = max(1, summary["num_completed"])
    per_event = summary["tokens_per_event"]
    lines += [
        "",
        f"requests/s {_number(summary['requests_per_s'])}   output tokens/s {_number(summary['output_tokens_per_s'])}"
        f"   all tokens/s {_number(summary['total_tokens_per_s'])}",
        f"tokens a request: {_number(summary['num_prompt_tokens'] / completed)} in,"
        f" {_number(summary['num_completion_tokens'] / completed)} out;"
        f" tokens an event: {'-' if per_event is None else f'{per_event:.3f}'} (those of one event are 0 ms apart)",
    ]
    return "\n".join([*lines, *_errors(summary), *_warnings(summary)])


def _title(summary: dict[str, Any]) -> str:
    config = summary["config"]
    rate, at_once = config["request_rate"], config["concurrency"] or DEFAULT_CONCURRENCY
    load = f"{at_once} at once" if rate is None else f"{rate:g} a second"
    title = f"{config['url']}, {summary['model']}, {config['endpoint']}, {load}: {summary['num_completed']} requests"
    title += f" in {summary['duration_s']:.2f} s, {summary['num_failed']} failed"
    return title + (f", {summary['num_unfinished']} cut short by Ctrl-C" if summary["is_interrupted"] else "")


def _errors(summary: dict[str, Any]) -> list[str]:
    if not summary["errors"]:
        return []
    details = summary["error_details"]
    return ["", "failed:", *(f"{count:7} {kind}: {details[kind]}" for kind, count in summary["errors"].items())]


def _warnings(summary: dict[str, Any]) -> list[str]:
    lines = []
    if summary["num_completed"] and not summary["has_usage"]:
        lines.append("warning: the server sent no usage: each event is taken for one token")
    if summary["client_cpu_share"] > _BUSY_CLIENT:
        lines.append(
            f"warning: this client used {summary['client_cpu_share']:.0%} of a core and may be what was measured"
        )
    return ["", *lines] if lines else []


def _percentiles(values: list[float]) -> dict[str, float]:
    """Return n, and the columns unless there is nothing."""
    if not values:
        return {"n": 0}
    array = np.asarray(values)
    quantiles = dict(zip(_QUANTILES, np.percentile(array, list(_QUANTILES.values())).tolist(), strict=True))
    return {"n": len(values), **quantiles, "max": float(array.max()), "mean": float(array.mean())}


def _request(record: Record, started_s: float) -> dict[str, Any]:
    return {
        "sent_s": record.sent_s - started_s,
        "ttft_ms": (record.event_s[0] - record.sent_s) * 1e3 if record.event_s else None,
        "end_to_end_ms": (record.ended_s - record.sent_s) * 1e3,
        "num_prompt_tokens": record.prompt_tokens, "num_completion_tokens": record.completion_tokens,
        "num_events": len(record.event_s), "error": record.error or None,
    }  # fmt: skip


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10_000 else f"{value:.2f}"
