"""The mix of requests of benchmarks/soak.py, and the clients that send it: raw asyncio streams on the caller's loop."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_BAD_BODIES: tuple[bytes, ...] = (
    b"", b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "n": 0}', b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "stop": [""]}', b'{"prompt": "a", "model": "another"}', b'{"prompt": "\\ud800"}',
)  # fmt: skip
_TIMEOUT_S = 60.0
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@dataclass(slots=True)
class Tally:
    """What happened in a period: sent and ended in it.

    Attributes:
        errors: Of requests that should have gone well: by what went wrong.
        ttft_s: Of streams whose client stayed: from sending to the first event.
        gaps_s: Of streams: between two reads.
    """

    num_requests: int = 0
    num_left: int = 0
    num_refused: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One client's request.

    Attributes:
        leaves_after_s: When it closes its connection; None: it stays to the end.
        is_good: Whether the answer must be 200; else it must be 400 or 404.
    """

    request: bytes
    is_stream: bool
    leaves_after_s: float | None
    is_good: bool


class Mix:
    """Draws visits.

    Args:
        seed: Of all that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def draw(self) -> Visit:
        """Return the next one."""
        rng = self.rng
        path = rng.choice(["/v1/chat/completions", "/v1/completions"])
        if rng.random() < 0.04:
            return Visit(
                request=_post(path, rng.choice(_BAD_BODIES)), is_stream=False, leaves_after_s=None, is_good=False
            )
        body = self._body(path)
        return Visit(
            request=_post(path, json.dumps(body).encode()),
            is_stream=body["stream"],
            leaves_after_s=rng.uniform(0, 0.5) if rng.random() < 0.05 else None,
            is_good=True,
        )

    def _body(self, path: str) -> dict[str, Any]:
        rng = self.rng
        prompt = " ".join(rng.choices(_WORDS, k=int(rng.paretovariate(1.2)) % 400 + 1))
        is_chat = path.endswith("chat/completions")
        body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        body |= {"stream": rng.random() < 0.7, "max_tokens": int(rng.lognormvariate(3.5, 0.8)) + 1, "temperature": 1}
        if rng.random() < 0.1:
            body["n"] = rng.choice([2, 4])
        if rng.random() < 0.2:
            body["stop"] = rng.choice([["never there"], [" the", "zz"], ["\n\n"]])
        if rng.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
        return body


class Clients:
    """Runs visits against a server on 127.0.0.1, each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.tally = Tally()
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Visits that have not ended."""
        return len(self._tasks)

    def start(self, visit: Visit) -> asyncio.Task[None]:
        """Send a request now."""
        task = asyncio.get_running_loop().create_task(self._visit(visit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Wait for the end of all of them."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _visit(self, visit: Visit) -> None:
        tally = self.tally
        tally.num_requests += 1
        try:
            limit_s = _TIMEOUT_S if visit.leaves_after_s is None else visit.leaves_after_s
            async with asyncio.timeout(limit_s):
                await self._exchange(visit, tally)
        except TimeoutError:
            if visit.leaves_after_s is None:
                tally.errors["time-out"] += 1
            else:
                tally.num_left += 1
        except OSError as exc:
            tally.errors[type(exc).__name__] += 1

    async def _exchange(self, visit: Visit, tally: Tally) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            sent_s = time.monotonic()
            writer.write(visit.request)
            head = await reader.read(65536)
            before_s = time.monotonic()
            status = head[9:12].decode()
            if visit.is_stream and status == "200":
                tally.ttft_s.append(before_s - sent_s)
            end = head[-200:]
            while data := await reader.read(65536):
                now_s = time.monotonic()
                if visit.is_stream:
                    tally.gaps_s.append(now_s - before_s)
                before_s = now_s
                end = (end + data)[-200:]
            self._judge(visit, status, end)
        finally:
            writer.transport.abort()

    def _judge(self, visit: Visit, status: str, end: bytes) -> None:
        if not visit.is_good:
            self.tally.num_refused += 1
            if status not in ("400", "404"):
                self.tally.errors[f"a bad request got {status or 'nothing'}"] += 1
        elif status != "200":
            self.tally.errors[status or "no answer"] += 1
        elif not (end.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if visit.is_stream else end.endswith(b"}")):
            self.tally.errors["cut off"] += 1


def _post(path: str, body: bytes) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head % path.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
