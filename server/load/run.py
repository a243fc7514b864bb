"""Makes the load: closed loop, so many requests at once; or open loop, arrivals that wait for nobody."""

import asyncio
import functools
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from ringserve.server.errors import StartupError
from ringserve.server.load.client import Client, Record
from ringserve.server.load.config import DEFAULT_CONCURRENCY, BenchConfig
from ringserve.server.load.prompts import make_prompts
from ringserve.server.workers import run_all

_MAX_PAUSE_S = 10.0  # whatever Retry-After asks for


@dataclass(frozen=True, slots=True)
class Run:
    """A load that has ended.

    Attributes:
        started_s: time.perf_counter, as in the records.
        num_unfinished: Requests under way when it was interrupted.
        client_cpu_s: What this process has used meanwhile.
    """

    model: str
    records: list[Record]
    started_s: float
    duration_s: float
    num_unfinished: int
    is_interrupted: bool
    client_cpu_s: float


async def run_load(config: BenchConfig) -> Run:
    """Warm up, run the load, return what became of it; a cancellation (Ctrl-C) ends it early.

    Raises:
        StartupError: If there is no such server, or it fails the first warm-up request.
    """
    prompts = make_prompts(config)
    async with Client(config, config.api_key or os.environ.get("OPENAI_API_KEY")) as client:
        for prompt in prompts[: config.num_warmups]:
            _check(await client.send(prompt))
        return await _Load(config, client, prompts[config.num_warmups :]).run()


class _Load:
    """One load; what its requests share."""

    def __init__(self, config: BenchConfig, client: Client, prompts: list[str]) -> None:
        self._config = config
        self._client = client
        self._prompts = prompts
        self._records: list[Record] = []
        self._num_sent = 0
        self._num_tokens = 0
        self._bar: Any = None

    async def run(self) -> Run:
        cpu_s, started_s = time.process_time(), time.perf_counter()
        is_interrupted = False
        with tqdm(total=len(self._prompts), unit="req", desc="bench", dynamic_ncols=True) as self._bar:
            try:
                if self._config.request_rate is None:
                    await self._run_closed(self._config.concurrency or DEFAULT_CONCURRENCY)
                else:
                    await self._run_open(self._config.request_rate)
            except asyncio.CancelledError:
                is_interrupted = True
        return Run(
            model=self._client.model,
            records=self._records,
            started_s=started_s,
            duration_s=time.perf_counter() - started_s,
            num_unfinished=self._num_sent - len(self._records),
            is_interrupted=is_interrupted,
            client_cpu_s=time.process_time() - cpu_s,
        )

    async def _run_closed(self, concurrency: int) -> None:
        await run_all([functools.partial(self._send_politely, prompt) for prompt in self._prompts], at_once=concurrency)

    async def _send_politely(self, prompt: str) -> None:
        """Send a prompt; after a refusal wait as long as it asks for."""
        record = await self._send(prompt)
        if record.retry_after_s:
            await asyncio.sleep(min(record.retry_after_s, _MAX_PAUSE_S))

    async def _run_open(self, rate: float) -> None:
        gaps = np.random.default_rng(self._config.seed).exponential(1 / rate, len(self._prompts))
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for due_s, prompt in zip(np.cumsum(gaps).tolist(), self._prompts, strict=True):
                await asyncio.sleep(max(0.0, started_s + due_s - time.perf_counter()))
                tasks.create_task(self._send(prompt))

    async def _send(self, prompt: str) -> Record:
        self._num_sent += 1
        record = await self._client.send(prompt)
        self._records.append(record)
        self._num_tokens += record.completion_tokens
        self._bar.set_postfix_str(f"{self._num_tokens} tokens", refresh=False)
        self._bar.update()
        return record


def _check(record: Record) -> None:
    """Stop at a failure that all requests would share; a server that is merely busy is measured."""
    if record.error and not record.error.endswith("refused"):
        raise StartupError(f"a first request failed: {record.error}: {record.detail}")
