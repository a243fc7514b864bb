"""The part of benchmarks/output_path.py that is no cost or latency: memory, event-loop blocks, clients that stall."""

import http.client
import json
import random
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import report
from benchmarks.load_client import Load, LoadClient
from benchmarks.processes import SyntheticServer, peak_rss_bytes, rss_bytes
from benchmarks.report import Target
from ringserve.server.settings import model_path

ENDLESS = 50_000_000  # tokens: more than any run generates
_STALL_SETTLE_S = 4.0  # until every buffer between the server and a client that does not read is full
_MOST_LEFT = 0.01  # of the pending text: what the kernel may still have taken
_PROBE_GAP_S = (0.0005, 0.0025)
_PING = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_SYNTHETIC_TEXT = Path(__file__).parents[1] / "engine" / "synthetic_text.txt"


class Limits:
    """Measures on the server with a step time; it must be fresh when this is made.

    Args:
        client: The load client.
        paced: The server.
    """

    def __init__(self, client: LoadClient, paced: SyntheticServer) -> None:
        self._client = client
        self._paced = paced
        assert paced.port  # it has started
        self._start_bytes = rss_bytes(paced.pid)

    def measure_memory(self, load: Load) -> dict[str, float]:
        """Return the server's resident memory after its start and the most while a load runs, MB."""
        self._client.start(load)
        peak_bytes = peak_rss_bytes(self._paced.pid, self._client.is_done)
        self._client.result()
        return {"rss_start_mb": self._start_bytes / 1e6, f"rss_{load.num_streams}_streams_mb": peak_bytes / 1e6}

    def measure_block(self, load: Load) -> dict[str, Any]:
        """Ask /ping again and again from this process, while the load runs; its latencies, ms.

        From outside a block shows as a late answer. So these are upper bounds: an answer takes two or three turns of
        the loop, and waits for a core besides. `arriving`: until every stream has begun; `streaming`: after that.
        """
        self._client.start(load)
        probes = _probe(self._paced.port, self._client)
        outcome = self._client.result()
        begun_ns, first_end_ns = max(t[0] for t in outcome.times_ns), min(t[-1] for t in outcome.times_ns)
        arriving = [(end - begin) / 1e6 for begin, end in probes if begin < begun_ns]
        streaming = [(end - begin) / 1e6 for begin, end in probes if begun_ns <= begin and end < first_end_ns]
        return {"num_streams": load.num_streams, "arriving_ms": report.percentiles(arriving),
                "streaming_ms": report.percentiles(streaming)}  # fmt: skip

    def measure_stalled(self, load: Load, server: SyntheticServer, stall_s: float) -> dict[str, float]:
        """Return how memory grows while clients do not read and a free-running engine goes on.

        It counts from when all buffers on the way are full: whatever is generated from then on is pending output.

        Raises:
            RuntimeError: If the sockets' buffers went on filling: then some of it has left the process.
        """
        rate = _text_bytes_per_token()
        self._client.start(replace(load, stall_s=stall_s + _STALL_SETTLE_S + 0.5))
        time.sleep(_STALL_SETTLE_S)
        server.steps.new_steps()
        before_bytes, queued_bytes, started_s = rss_bytes(server.pid), _queued_bytes(server.port), time.monotonic()
        time.sleep(stall_s)
        num_tokens = int(server.steps.new_steps()[:, 2].sum())
        grown_bytes, elapsed_s = rss_bytes(server.pid) - before_bytes, time.monotonic() - started_s
        num_left = _queued_bytes(server.port) - queued_bytes
        self._client.result()
        if num_left > _MOST_LEFT * num_tokens * rate:
            raise RuntimeError(f"clients that should have stalled took {num_left} bytes of {num_tokens} tokens")
        return {
            "num_clients": load.num_streams, "elapsed_s": elapsed_s, "num_tokens": num_tokens,
            "pending_text_mb": num_tokens * rate / 1e6, "grown_mb": grown_bytes / 1e6,
            "grown_bytes_a_token": grown_bytes / num_tokens, "text_bytes_a_token": rate,
        }  # fmt: skip


def targets_of(memory: dict[str, float], block: dict[str, Any], stalled: dict[str, float]) -> list[Target]:
    """Compare with the limits."""
    return [
        Target("probe_ms_1024_streams_max", block["streaming_ms"]["max"], 5),
        Target("rss_start_mb_aim", memory["rss_start_mb"], 100),
        Target("rss_256_streams_mb_aim", memory["rss_256_streams_mb"], 150),
        Target("stalled_rss_vs_pending_text", stalled["grown_mb"] / stalled["pending_text_mb"], 3),
    ]


def show(memory: dict[str, float], block: dict[str, Any], stalled: dict[str, float]) -> None:
    """Print a line for each."""
    print("RSS MB: " + ", ".join(f"{name[4:-3]} {value:.0f}" for name, value in memory.items()))
    for phase in ("arriving", "streaming"):
        p50, p99, worst = (block[f"{phase}_ms"][key] for key in ("p50", "p99", "max"))
        print(
            f"/ping while {block['num_streams']} streams are {phase}: p50 {p50:.2f}, p99 {p99:.2f}, max {worst:.2f} ms"
        )
    print(
        f"{stalled['num_clients']} clients that do not read for {stalled['elapsed_s']:.0f} s: {stalled['num_tokens']} "
        f"tokens pending, {stalled['pending_text_mb']:.1f} MB of text; RSS grew by {stalled['grown_mb']:.1f} MB, "
        f"{stalled['grown_bytes_a_token']:.1f} bytes a token of {stalled['text_bytes_a_token']:.1f}"
    )


def stream_events(port: int, path: str, body: dict[str, Any]) -> list[bytes]:
    """Return the events of one stream, each as it is sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    data = connection.getresponse().read()
    connection.close()
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def _probe(port: int, client: LoadClient) -> list[tuple[int, int]]:
    """Return when each /ping was sent and answered, until the client has finished."""
    gaps = random.Random(5)
    probes = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not client.is_done(gaps.uniform(*_PROBE_GAP_S)):
            begin_ns = time.monotonic_ns()
            connection.sendall(_PING)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            probes.append((begin_ns, time.monotonic_ns()))
    return probes


def _queued_bytes(port: int) -> int:
    """Return what the kernel holds for the connections of a port, sent and not read, or not sent yet."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queues = [row[4].split(":") for row in rows if f"{port:04X}" in (row[1].split(":")[1], row[2].split(":")[1])]
    return sum(int(sent, 16) + int(received, 16) for sent, received in queues)


def _text_bytes_per_token() -> float:
    text = _SYNTHETIC_TEXT.read_text()
    tokenizer = Tokenizer.from_file(str(model_path.resolve(None) / "tokenizer.json"))
    return len(text.encode()) / len(tokenizer.encode(text, add_special_tokens=False).ids)
