"""Clients that leave at random moments, by the thousand: nothing of them stays in the server or in the engine."""

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from collections import Counter

import pytest

from tests.attack.conftest import IDLE, SCALE, Target
from tests.attack.watch import Footprint
from tests.e2e.conftest import RunningServer, wait_until

NUM_CLIENTS = 2000 * SCALE
NUM_AT_ONCE = 64
NUM_CLIENTS_OF_MODEL, NUM_AT_ONCE_OF_MODEL = 300, 6
PREFILL_MS, STEP_MS = 40, 5
LONGEST_STAY_S = 0.2
_SAMPLE = re.compile(r"^ringserve:(num_requests_\w+|kv_cache_usage_perc)\{.*\} (\S+)$", re.MULTILINE)


class Crowd:
    """Clients, so many of them there at a time.

    Attributes:
        left: How many left without an answer, in the midst of one, or at its end.
    """

    def __init__(self, port: int, longest_stay_s: float, num_at_once: int = NUM_AT_ONCE) -> None:
        self.left: Counter[str] = Counter()
        self._port = port
        self._longest_stay_s = longest_stay_s
        self._num_at_once = num_at_once
        self._rng = random.Random(7)

    async def come_and_go(self, num_clients: int) -> None:
        places = iter(range(num_clients))

        async def one_after_the_other() -> None:
            for _ in places:
                async with asyncio.timeout(30):
                    await self._client()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_at_once):
                group.create_task(one_after_the_other())

    async def _client(self) -> None:
        rng = self._rng
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self._request())
        received = bytearray()
        stay = asyncio.create_task(read_on(reader, received))  # to the end, if the client stays as long
        await asyncio.wait([stay], timeout=rng.uniform(0, self._longest_stay_s))
        self.left["at the end" if stay.done() else "in the midst" if received else "before any byte"] += 1
        if rng.random() < 0.5:  # RST instead of FIN
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await stay
        assert not received or received.startswith(b"HTTP/1.1 200 "), received

    def _request(self) -> bytes:
        rng = self._rng
        body = {
            "prompt": [f"{rng.random()} of many"] * rng.choice([1, 1, 2]),
            "n": rng.choice([1, 4]),
            "temperature": 1,
            "stream": rng.random() < 0.6,
            "max_tokens": rng.choice([5, 200]),
            "stop": rng.choice([None, ["never there"]]),
            "logprobs": rng.choice([None, 1]),
        }
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def read_on(reader: asyncio.StreamReader, received: bytearray) -> None:
    """Keep what comes, until the connection has ended."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            received += data


def check_empty(server: RunningServer) -> None:
    """Fail unless server and engine hold nothing: no request, no sequence, no block."""
    wait_until(lambda: server.load() == IDLE, 10)
    found = dict(_SAMPLE.findall(server.client.get("/metrics").text))
    print(found)
    assert len(found) == 4
    assert set(map(float, found.values())) == {0.0}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clients_that_leave_at_any_moment_leave_nothing(start_server) -> None:
    flags = ("--engine", "synthetic", "--prefill-time-ms", str(PREFILL_MS), "--step-time-ms", str(STEP_MS))
    target = Target(start_server(*flags))
    asyncio.run(Crowd(target.port, LONGEST_STAY_S).come_and_go(NUM_AT_ONCE * 2))
    before = target.footprint()
    crowd = Crowd(target.port, LONGEST_STAY_S)
    with target.watch():
        asyncio.run(crowd.come_and_go(NUM_CLIENTS))
    print(dict(crowd.left))
    assert len(crowd.left) == 3
    check_empty(target.server)
    target.check_unchanged(before)
    target.end()


@pytest.mark.slow
def test_clients_that_leave_a_model_leave_no_block(default_model) -> None:
    before = Footprint.of(default_model.engine_pid)
    crowd = Crowd(default_model.port, 1.0, NUM_AT_ONCE_OF_MODEL)
    asyncio.run(crowd.come_and_go(NUM_CLIENTS_OF_MODEL))
    print(dict(crowd.left))
    assert crowd.left["before any byte"]
    assert crowd.left["in the midst"]
    check_empty(default_model)
    print(f"engine: before {before}, after {Footprint.of(default_model.engine_pid)}")
    text = default_model.complete(prompt="One, two, three,", max_tokens=4, temperature=0)["choices"][0]["text"]
    assert text == default_model.complete(prompt="One, two, three,", max_tokens=4, temperature=0)["choices"][0]["text"]
