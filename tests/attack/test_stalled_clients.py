"""A hundred clients that stop reading: they cost memory as much as waits for them, and nobody else any time."""

import json
import socket
import threading
import time

import pytest

from tests.attack.conftest import Target
from tests.attack.watch import Footprint
from tests.e2e.conftest import RunningServer, wait_until

NUM_STALLED, NUM_READING = 100, 10
WRITE_TIMEOUT_S = 60
SETTLE_S = 5.0  # until all buffers between the server and a client that does not read are full
MOST_PER_PENDING = 3.0  # bytes of memory for each of pending text
MOST_TOKENS = 50_000_000  # more than any stream here gets
STEP_MS, TOKENS_PER_STEP = 20, 24
# With loopback's own buffers the kernel takes megabytes of each stream before the server sees that nobody reads.
RCVBUF, MSS = 4096, 1460


def stream(port: int, max_tokens: int = MOST_TOKENS, **options: int) -> socket.socket:
    client = socket.socket()
    client.settimeout(30)
    if options:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["rcvbuf"])
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, options["mss"])
    client.connect(("127.0.0.1", port))
    data = json.dumps({"prompt": "a", "stream": True, "max_tokens": max_tokens}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


class Reader(threading.Thread):
    """Reads a stream, and notes how many bytes came and the longest gap between them. Ends with its connection."""

    def __init__(self, port: int, max_tokens: int = MOST_TOKENS) -> None:
        super().__init__()
        self.num_bytes = 0
        self.worst_gap_s = 0.0
        self.client = stream(port, max_tokens)
        self.start()

    def run(self) -> None:
        before_s = None
        while data := self.client.recv(1 << 16):
            now_s = time.monotonic()
            if before_s is not None:
                self.worst_gap_s = max(self.worst_gap_s, now_s - before_s)
            before_s = now_s
            self.num_bytes += len(data)

    def end(self) -> None:
        self.client.shutdown(socket.SHUT_RDWR)
        self.join()
        self.client.close()


def rate(readers: list[Reader], duration_s: float) -> float:
    """Return the bytes a second of all readers, over a while."""
    for reader in readers:
        reader.worst_gap_s = 0.0
    before, started_s = sum(reader.num_bytes for reader in readers), time.monotonic()
    wait_until(lambda: time.monotonic() - started_s > duration_s, duration_s + 30)
    return (sum(reader.num_bytes for reader in readers) - before) / (time.monotonic() - started_s)


def num_tokens(server: RunningServer) -> float:
    """Return how many tokens have been generated."""
    lines = server.client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("ringserve:generation_tokens_total")]
    return float(line.split()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_clients_that_stop_reading_cost_what_waits_for_them(start_server) -> None:
    flags = ("--engine", "synthetic", "--step-time-ms", str(STEP_MS), "--tokens-per-step", str(TOKENS_PER_STEP))
    limits = ("--max-model-len", "100000000", "--write-timeout", str(WRITE_TIMEOUT_S), "--drain-timeout", "1")
    target = Target(start_server(*flags, *limits))
    server = target.server
    bytes_per_token = len(server.complete(prompt="a", max_tokens=2000)["choices"][0]["text"]) / 2000
    readers = [Reader(target.port) for _ in range(NUM_READING)]
    with target.watch():
        rate_before = rate(readers, SETTLE_S)
        stalled = [stream(target.port, rcvbuf=RCVBUF, mss=MSS) for _ in range(NUM_STALLED)]
        started_s = time.monotonic()
        rate(readers, SETTLE_S)
        before, tokens_before = Footprint.of(target.pid), num_tokens(server)
        rate_with = rate(readers, WRITE_TIMEOUT_S - 2 * SETTLE_S)
        assert server.load()["server_load"] == NUM_STALLED + NUM_READING
        share = NUM_STALLED / (NUM_STALLED + NUM_READING)
        pending_mb = (num_tokens(server) - tokens_before) * share * bytes_per_token / 1e6
        grown_mb = Footprint.of(target.pid).rss_mb - before.rss_mb
        worst_gap_s = max(reader.worst_gap_s for reader in readers)
        wait_until(lambda: server.load()["server_load"] == NUM_READING, 5 * WRITE_TIMEOUT_S)
        ended_s = time.monotonic() - started_s
        print(
            f"{pending_mb:.1f} MB of text pending, memory grew by {grown_mb:.1f} MB; the readers' bytes/s "
            f"{rate_before:.0f} before, {rate_with:.0f} beside, worst gap {worst_gap_s * 1e3:.0f} ms at steps of "
            f"{STEP_MS} ms; the stalled were ended after {ended_s:.1f} s"
        )
    assert pending_mb > 10
    assert grown_mb < MOST_PER_PENDING * pending_mb
    assert rate_with > rate_before / 2
    assert worst_gap_s < 5 * 0.1
    assert ended_s >= WRITE_TIMEOUT_S
    for reader in readers:
        assert reader.is_alive()
        reader.end()
    for client in stalled:
        client.close()
    target.end()
