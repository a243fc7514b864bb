"""What is written in the log of requests and rates, and how lines look."""

import io
import json
import logging

from ringserve.server.telemetry.finished_sequence import FinishedSequence, FirstToken
from ringserve.server.telemetry.metrics import Metrics
from ringserve.server.telemetry.request_log import RequestLog
from ringserve.server.telemetry.throughput_log import ThroughputLog
from ringserve.shm_transport.log_format import ColourFormatter, JsonFormatter
from ringserve.shm_transport.ring import RecordHeader

MS = 1_000_000
PROMPT = [1, 2, 3, 4]


def sequence(n: int = 1, left: int = 0, first: FirstToken | None = None, **fields: object) -> FinishedSequence:
    values = {
        "request_id": "r", "index": 0, "num_siblings_left": left, "finish_reason": "stop", "prompt_token_ids": PROMPT,
        "num_tokens": 7, "n": n, "max_tokens": 9, "temperature": 0.0, "top_p": 1.0, "arrival_ns": 0,
        "ended_ns": 30 * MS, "last_published_ns": 0, "first": first,
    }  # fmt: skip
    return FinishedSequence(**{**values, **fields})


def test_a_request_is_one_line_once_all_its_sequences_have_ended(caplog) -> None:
    caplog.set_level(logging.INFO)
    log, first = RequestLog(), FirstToken(0, 0, 0, 5 * MS, 3)
    log(sequence(n=2, left=1, first=first))
    assert not caplog.messages
    log(sequence(n=2, finish_reason="abort"))
    text = "request r: prompt tokens 4, cached 3, output tokens 14, TTFT 5.0 ms, total 30.0 ms, finish stop,abort"
    assert caplog.messages == [text]
    assert not log._siblings


def test_a_request_that_ends_before_its_first_token_has_no_ttft(caplog) -> None:
    caplog.set_level(logging.INFO)
    RequestLog()(sequence(finish_reason="error", num_tokens=0))
    assert "output tokens 0, TTFT -, total" in caplog.messages[0]


def test_a_shown_prompt_is_quoted_and_cut(caplog) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLog(lambda ids: "\n" * len(ids))
    log(sequence())
    log(sequence(prompt_token_ids=[0] * 5000))
    assert caplog.messages[0].endswith(", prompt '\\n\\n\\n\\n'")
    assert caplog.messages[1].endswith("\\n'...")
    assert len(caplog.messages[1]) < 2500


def test_rates_are_of_the_time_since_the_last_line_and_idleness_is_silent(caplog) -> None:
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    log = ThroughputLog(metrics)
    log.write()
    assert not caplog.messages
    metrics.header = RecordHeader(*[0] * 18)._replace(num_running=2, num_waiting=1, num_blocks_used=5, num_blocks=20)
    metrics.num_generation_tokens += 100
    metrics.note_prompt(40, 30, was_looked_for=True)
    log.write()
    assert caplog.messages[0].endswith("running 2, waiting 1, KV cache 25.0%, prefix hits 75.0%")
    log.write()  # those who run without a token are worth a line too
    assert caplog.messages[1].startswith("prompt 0.0 tokens/s, generation 0.0 tokens/s, running 2")
    metrics.header = RecordHeader(*[0] * 18)
    log.write()
    assert len(caplog.messages) == 2


def test_json_lines_hold_the_traceback_and_no_line_break() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("server"))
    log = logging.Logger("a.b")
    log.addHandler(handler)
    try:
        raise ValueError("of two\nlines")
    except ValueError:
        log.exception("it %s", "failed")
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("ERROR", "a.b", "it failed")
    assert fields["exception"].endswith("ValueError: of two\nlines")


def test_a_terminal_sees_the_level_in_colour() -> None:
    record = logging.LogRecord("a", logging.WARNING, "", 0, "WARNING: %d", (5,), None)
    line = ColourFormatter("%(levelname)s [server] %(message)s").format(record)
    assert line == "\033[33mWARNING\033[0m [server] WARNING: 5"
