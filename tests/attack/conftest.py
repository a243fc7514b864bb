"""A server to attack: what it says is kept, and it has to be the same afterwards as before."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.attack.watch import Footprint, Watch
from tests.e2e.conftest import (  # noqa: F401  # fixtures
    RunningServer,
    default_model,
    shared_server,
    start_server,
    wait_until,
)

SCALE = int(os.environ.get("ATTACK_SCALE", "1"))  # times the inputs: 1 is what `make test-all` has time for
IDLE = {"server_load": 0, "num_requests_running": 0, "num_requests_waiting": 0}
FLAGS = ("--engine", "synthetic", "--max-model-len", "256", "--receive-timeout", "1", "--drain-timeout", "5")
# Memory: what allocators and caches keep of the largest inputs, however many there were.
MOST_GROWN_MB = 100
MOST_GROWN_FDS, MOST_GROWN_THREADS = 3, 16
MOST_LOG_LINES = 100  # a line each ten seconds; an attacker has no line of his own


class Target:
    """A running server under attack.

    Attributes:
        statuses: Of the answers, by kind of input. Tests count here.
        log: The lines that the server has written.
    """

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.port = server.port
        self.pid = server.process.pid
        self.statuses: Counter[tuple[str, int | str]] = Counter()
        self.log: list[str] = []
        assert server.process.stderr is not None
        self._reader = threading.Thread(target=self.log.extend, args=(server.process.stderr,))
        self._reader.start()  # a pipe that nobody reads would stop the server

    def watch(self) -> Watch:
        """Return the context of an attack."""
        return Watch(self.port, self.pid)

    def footprint(self) -> Footprint:
        """Return the idle server's."""
        wait_until(lambda: self.server.load() == IDLE, 30)
        return Footprint.of(self.pid)

    def check_unchanged(self, before: Footprint) -> None:
        """Fail if the server holds more than before the attack, or does not answer as before."""
        wait_until(lambda: self.footprint().num_fds <= before.num_fds + MOST_GROWN_FDS, 30)
        after = self.footprint()
        print(f"before {before}\nafter  {after}")
        assert after.num_threads <= before.num_threads + MOST_GROWN_THREADS
        assert after.rss_mb <= before.rss_mb + MOST_GROWN_MB
        assert self.server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2

    def show(self) -> None:
        """Print what the inputs were answered with."""
        kinds: dict[str, dict[int | str, int]] = {}
        for (kind, status), count in sorted(self.statuses.items(), key=str):
            kinds.setdefault(kind, {})[status] = count
        for kind, counts in kinds.items():
            print(f"{kind}: {sum(counts.values())} inputs {json.dumps(counts)}")

    def end(self) -> None:
        """Stop the server; it has to end well, and may not have complained of an error of its own."""
        server = self.server
        server.client.close()
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(30)
        self._reader.join()
        server.process.communicate()
        errors = [line for line in self.log if line.startswith(("ERROR", "CRITICAL", "Traceback", "Exception"))]
        print(f"the server wrote {len(self.log)} lines to its log")
        assert errors == [], "".join(self.log[-200:])
        assert len(self.log) < MOST_LOG_LINES, "".join(self.log[-50:])
        assert status == 0
        assert server.leftovers() == []


@pytest.fixture
def target(start_server) -> Iterator[Target]:  # noqa: F811
    """Return a server with the synthetic engine, which has served each route once."""
    made = Target(start_server(*FLAGS))
    warm_up(made.server)
    yield made
    made.show()
    made.end()


def warm_up(server: RunningServer) -> None:
    """Have everything imported and allocated that a server needs once."""
    for _ in range(20):
        server.complete(prompt=["a"] * 8, n=4, temperature=1, logprobs=2)
        messages = [{"role": "user", "content": "a"}]
        server.stream("/v1/chat/completions", messages=messages, max_tokens=5)
        assert server.post("/v1/responses", input="a", max_output_tokens=3).status_code == 200
        assert server.post("/v1/embeddings", input=["a"] * 8).status_code == 200
    for path in ("/metrics", "/openapi.json", "/v1/models"):
        assert server.client.get(path).status_code == 200
