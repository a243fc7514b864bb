"""Prompts that are far too long, beside streams: nobody else waits for their refusal."""

import http.client
import json
import threading

import pytest

from tests.attack.conftest import Target
from tests.attack.test_stalled_clients import Reader

NUM_READERS, STEP_MS = 8, 20
PROMPT_BYTES = 27_000_000  # refused by its length
TOKENIZED_BYTES = 2_500_000  # refused by its tokens, which take a while
MAX_MODEL_LEN = 200_000
WATCHDOG_S = 5 * (0.1 + STEP_MS / 1e3)  # for 100 ms beyond what is normal


@pytest.mark.slow
def test_a_prompt_of_27_mb_holds_up_neither_streams_nor_health(start_server) -> None:
    flags = ("--engine", "synthetic", "--step-time-ms", str(STEP_MS), "--max-body-mb", "64")
    target = Target(start_server(*flags, "--max-model-len", str(MAX_MODEL_LEN), "--drain-timeout", "1"))
    readers = [Reader(target.port, MAX_MODEL_LEN - 100) for _ in range(NUM_READERS)]
    texts = (
        "word " * (PROMPT_BYTES // 5),
        "a" * PROMPT_BYTES,
        "\u00e9" * (PROMPT_BYTES // 2),
        "word " * (TOKENIZED_BYTES // 5),
    )
    bodies = [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts]
    statuses: list[int] = []

    def ask() -> None:
        for body in bodies:
            connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=100)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            statuses.append(connection.getresponse().status)
            connection.close()

    with target.watch():
        for reader in readers:
            reader.worst_gap_s = 0.0
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
    worst_gap_s = max(reader.worst_gap_s for reader in readers)
    print(f"answers {statuses}; worst gap of a stream {worst_gap_s * 1e3:.0f} ms at steps of {STEP_MS} ms")
    for reader in readers:
        reader.end()
    assert worst_gap_s < WATCHDOG_S
    assert statuses == [400] * len(bodies)
    target.end()
