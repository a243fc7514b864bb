"""Raw bytes on raw sockets: what is no HTTP, half of it, too much of it. No answer is a 5xx, no connection hangs."""

import contextlib
import itertools
import json
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.attack.conftest import SCALE, Target

NUM_INPUTS = 250 * SCALE  # of each kind
NUM_CONNECTS = 10_000
NUM_SLOW = 500  # at once
NUM_THREADS = 8
HANG_S = 10.0  # the server's time-outs are 1 s (receive) and 5 s (keep-alive)
ANSWER_S = 0.02  # how long most attackers wait for an answer
MOST_OPEN = 1000  # connects at once
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")

BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
POST = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SLOWLY = (  # how a request begins, and the bytes that come from time to time
    (b"", b""), (b"", b"\r\n"), (GET[:10], b"a"), (GET[:25], b"b"), (GET[:-2], b"a"), (HEAD, b""),
    (HEAD + b"X: ", b"c"),
)  # fmt: skip
VALID = (
    GET, POST, POST.replace(b'"a"', b'"a","stream":true').replace(b": %d" % len(BODY), b": %d" % (len(BODY) + 14)),
    CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    b"GET /nowhere?a=%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"OPTIONS /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", GET.replace(b"HTTP/1.1", b"HTTP/1.0"),
)  # fmt: skip


def half(rng: random.Random) -> bytes:
    request = rng.choice(VALID)
    return request[: rng.randrange(len(request))]


def mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(VALID))
    for _ in range(rng.randint(1, 6)):
        i, j = sorted(rng.choices(range(len(data) + 1), k=2))
        match rng.randrange(4):
            case 0:
                data[i : i + 1] = bytes([rng.randrange(256)])
            case 1:
                data[i:i] = data[i:j]
            case 2:
                del data[i : i + rng.randint(1, 8)]
            case _:
                data[i:i] = rng.choice([b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"\t", b"\xff", b"HTTP/1.1", b"0"])
    return bytes(data)


def pipelined(rng: random.Random) -> bytes:
    return b"".join(rng.choices((*VALID, mutated(rng)), weights=[10] * len(VALID) + [1], k=rng.randint(2, 90)))


def huge_head(rng: random.Random) -> bytes:
    size = rng.choice([100, 8_000, 60_000, 65_530, 65_540, 70_000, 200_000, 1_000_000])
    filler = rng.choice([b"a", b"/", b"%00", b"\xc3\xa9", b" ", b":"]) * size
    return rng.choice([
        b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % filler, b"%b / HTTP/1.1\r\nHost: localhost\r\n\r\n" % filler,
        b"GET /health HTTP/1.1\r\nX: %b\r\n\r\n" % filler, b"GET /health HTTP/1.1\r\n%b: a\r\n\r\n" % filler,
        b"GET /health HTTP/1.1%b\r\n\r\n" % filler, b"GET /health?%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % filler,
        b"GET /health HTTP/1.1\r\nCookie: a\r\n" + b"\r\n" * size, b"\r\n" * size + GET,
    ])  # fmt: skip


def many_headers(rng: random.Random) -> bytes:
    num = rng.choice([90, 99, 100, 101, 1000, 20_000])
    line = rng.choice(
        [b"A: b\r\n", b"Host: localhost\r\n", b"Connection: close\r\n", b"X-Request-Id: b\r\n", b"a:\r\n"]
    )
    return b"GET /health HTTP/1.1\r\n" + line * num + b"\r\n"


def bad_chunks(rng: random.Random) -> bytes:
    sizes = (b"zz", b"-1", b"0x5", b"", b"ffffffffffffffff", b"10000000000000000", b"5 ", b" 5", b"5;a=b",
             b"5;" + b"a" * 100_000, b"00000000000000000000005", b"\xff", b"1d", b"1D", b"7fffffffffffffff",
             b"+5")  # fmt: skip
    parts = [b"%b%b%b%b" % (rng.choice(sizes), rng.choice([b"\r\n", b"\n", b""]), rng.choice([BODY, b"a" * 5, b""]),
                            rng.choice([b"\r\n", b"\n", b""])) for _ in range(rng.randint(1, 4))]  # fmt: skip
    trailers = rng.choice([b"", b"A: b\r\n", b"A: b\r\n" * 500, b"A: " + b"b" * 200_000, b"Content-Length: 5\r\n"])
    return CHUNKED + b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


def bad_length(rng: random.Random) -> bytes:
    lengths = (b"-1", b"+5", b"5, 5", b"5,6", b"abc", b"", b"1e3", b"0x10", b"99999999999999999999", b"0x",
               b"9" * 5000, b"0" * 5000 + b"%d" % len(BODY), b"0", b"5", b"1000000", b"999999999999", b" 29 ", b"29;",
               b"\xb2", b"2\x009", b"18446744073709551615")  # fmt: skip
    extra = rng.choice([b"", b"Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
                        b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding: gzip\r\n"])  # fmt: skip
    return HEAD + b"Content-Length: %b\r\n%b\r\n%b" % (rng.choice(lengths), extra, BODY) + rng.choice([b"", GET])


def zeros(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(VALID))
    for _ in range(rng.randint(1, 3)):
        data.insert(rng.randrange(len(data)), 0)
    return rng.choice([bytes(data), bytes(rng.randint(1, 70_000)), bytes(data) + bytes(10)])


def other_protocols(rng: random.Random) -> bytes:
    upgrade = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n"
    return rng.choice([
        b"GET /health\r\n", b"GET /health\r\n\r\n", b"GET\r\n\r\n", b"\r\n\r\n", b"\n", b"GET / HTTP/0.9\r\n\r\n",
        b"GET /health HTTP/2.0\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200), b"SSH-2.0-OpenSSH_9.0\r\n", b"EHLO a\r\n",
        b"*1\r\n$4\r\nPING\r\n", b"CONNECT a:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://a/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET //[::1/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /%ff%fe/\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n", b"GET /health HTTP/1.1\r\n folded: a\r\n\r\n",
        upgrade % b"h2c" + GET, upgrade % b"websocket" + rng.randbytes(50), upgrade % b"a" + bytes(70_000),
    ])  # fmt: skip


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 2000))


KINDS = (half, mutated, pipelined, huge_head, many_headers, bad_chunks, bad_length, zeros, other_protocols, noise)


def reset(client: socket.socket) -> None:
    """Close with RST instead of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=HANG_S)


class Attacker:
    """Sends one input after the other, each on a connection of its own, and ends each in one of four ways."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._rng = random.Random(seed)

    def attack(self, kind: Callable[[random.Random], bytes], num: int) -> None:
        for _ in range(num):
            data = kind(self._rng)
            try:
                status = self._send(data)
            except TimeoutError:
                pytest.fail(f"{kind.__name__}: the server neither answered nor closed: {data[:500]!r}")
            self._target.statuses[f"socket {kind.__name__}", status] += 1
            assert isinstance(status, str) or status < 500, f"{status} for {data[:2000]!r}"

    def _send(self, data: bytes) -> int | str:
        """Return the worst status of what came back, or how it ended without an answer."""
        rng = self._rng
        end = rng.choices(["wait", "shut", "leave", "reset"], [1, 8, 2, 2])[0]
        received = bytearray()
        try:
            with connect(self._target.port) as client:
                self._exchange(client, data, end, received)
        except TimeoutError:
            raise
        except OSError as exc:  # the server was the first to close
            if not received:
                return type(exc).__name__
        if end in ("leave", "reset"):
            return end
        found = [*map(int, _STATUS.findall(received))]
        return max(found) if found else "closed"

    def _exchange(self, client: socket.socket, data: bytes, end: str, received: bytearray) -> None:
        self._write(client, data)
        if end == "leave":
            return
        if end == "reset":
            reset(client)
            return
        client.settimeout(ANSWER_S)
        with contextlib.suppress(TimeoutError):
            received += client.recv(1 << 16)
        client.settimeout(HANG_S)
        if end == "shut":
            client.shutdown(socket.SHUT_WR)
        while part := client.recv(1 << 16):
            received += part

    def _write(self, client: socket.socket, data: bytes) -> None:
        rng = self._rng
        if rng.random() < 0.7:
            client.sendall(data)
            return
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cuts = sorted(rng.choices(range(len(data) + 1), k=3))
        for begin, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            client.sendall(data[begin:stop])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_bytes_make_the_server_fail_or_hang(target: Target) -> None:
    before = target.footprint()
    with target.watch(), ThreadPoolExecutor(NUM_THREADS) as pool:
        attackers = [Attacker(target, seed) for seed in range(NUM_THREADS)]
        for kind in KINDS:
            jobs = [pool.submit(each.attack, kind, NUM_INPUTS // NUM_THREADS) for each in attackers]
            for job in jobs:
                job.result()
    target.check_unchanged(before)


@pytest.mark.slow
def test_ten_thousand_connects_leave_nothing(target: Target) -> None:
    rng, held = random.Random(7), []
    before = target.footprint()
    with target.watch():
        for i in range(NUM_CONNECTS):
            client = connect(target.port)
            client.sendall(rng.choices([b"", GET, GET[:20], HEAD, POST], [50, 15, 15, 15, 5])[0])
            held.append(client)
            target.statuses["connect", "made"] += 1
            if len(held) == MOST_OPEN or i == NUM_CONNECTS - 1:
                for each in held:
                    rng.choice([reset, socket.socket.close])(each)
                held.clear()
    target.check_unchanged(before)


@pytest.mark.slow
def test_slow_requests_are_let_go_and_hold_nobody_up(target: Target) -> None:
    before = target.footprint()
    with target.watch():
        slow = [(connect(target.port), *each) for each in itertools.islice(itertools.cycle(SLOWLY), NUM_SLOW)]
        for client, beginning, _ in slow:
            client.setblocking(False)
            client.sendall(beginning)
        started_s = time.monotonic()
        while slow:
            assert time.monotonic() - started_s < HANG_S, f"{len(slow)} of {NUM_SLOW} are still waited for"
            time.sleep(0.2)  # the attackers' own pace
            slow = [each for each in slow if is_waited_for(target, each[0], each[2])]
    assert target.statuses["slow", 408] == NUM_SLOW
    target.check_unchanged(before)


def is_waited_for(target: Target, client: socket.socket, more: bytes) -> bool:
    """Send the next bytes; whether the server still waits for the rest. Its answer is counted."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        client.sendall(more)
    try:
        data = client.recv(4096)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        data = b""
    client.close()
    found = _STATUS.match(data)
    target.statuses["slow", int(found[1]) if found else "closed"] += 1
    return False
