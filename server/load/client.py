"""One request of a load: what is sent, when its tokens arrive, how it fails.

aiohttp, because httpx takes a multiple of its CPU for an event: the client limits later.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from ringserve.server.errors import StartupError, shown
from ringserve.server.load.config import BenchConfig

_CONNECT_TIMEOUT_S = 10
_IDLE_S = 3  # of a connection; servers close theirs after 5 s and more, and a request must not meet that
_UNAVAILABLE = 503


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether there is something of the answer in it."""
        delta = self.delta
        return bool(self.text) or (
            delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
        )


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _ErrorBody(msgspec.Struct):
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """What became of one request. Times are time.perf_counter's, seconds.

    Attributes:
        event_s: Arrival of each event that carried a part of the answer.
        finish_s: Arrival of an event that carried the finish reason alone.
        ended_s: Arrival of the last byte.
        has_usage: Whether the server counted; else an event is taken for a token.
        error: The kind of failure; "" is none.
        detail: The failure's message.
        retry_after_s: What a refusal asks for.
    """

    sent_s: float
    event_s: list[float] = field(default_factory=list)
    finish_s: float | None = None
    ended_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    has_usage: bool = False
    error: str = ""
    detail: str = ""
    retry_after_s: float = 0.0

    def take(self, payload: bytes, now_s: float) -> None:
        """Note one event.

        Raises:
            _StreamError: If it reports one.
        """
        chunk = _decode_chunk(payload)
        if chunk.error is not None:
            raise _StreamError(_message(chunk.error))
        if chunk.usage is not None:
            self.has_usage = True
            self.prompt_tokens, self.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        if any(choice.has_tokens for choice in chunk.choices):
            self.event_s.append(now_s)
        elif any(choice.finish_reason for choice in chunk.choices):
            self.finish_s = now_s

    def close(self) -> None:
        """Complete the figures once the stream has ended.

        An event with a finish reason alone may stand for a last token without text, such as the end-of-text one.
        """
        if not self.has_usage:
            self.completion_tokens = len(self.event_s)
        if self.finish_s is not None and self.completion_tokens > len(self.event_s):
            self.event_s.append(self.finish_s)


class _StreamError(Exception):
    """An event of the stream reported an error."""


class Client:
    """Sends prompts to one endpoint of one server. Used within `async with`, in one loop."""

    def __init__(self, config: BenchConfig, api_key: str | None) -> None:
        self._config = config
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = f"{config.base_url}/{'chat/completions' if config.endpoint == 'chat' else 'completions'}"
        self.model = config.model or ""

    async def __aenter__(self) -> "Client":
        """Open the session; find the model's name if none is given.

        Raises:
            StartupError: If the server does not tell.
        """
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=self._config.timeout, sock_connect=_CONNECT_TIMEOUT_S),
            headers=self._headers,
        )
        try:
            self.model = self.model or await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._session.close()

    async def send(self, prompt: str) -> Record:
        """Send one prompt and read its stream to the end. Failures are in the record."""
        body = msgspec.json.encode(self._body(prompt))
        record = Record(time.perf_counter())
        try:
            await self._exchange(body, record)
        except _StreamError as exc:
            record.error, record.detail = "error in the stream", str(exc)
        except TimeoutError:
            record.error, record.detail = "timeout", f"not within {self._config.timeout:g} s"
        except aiohttp.ClientConnectorError as exc:
            record.error, record.detail = "cannot connect", str(exc)
        except (aiohttp.ClientError, OSError) as exc:
            record.error, record.detail = "connection lost", f"{type(exc).__name__}: {exc}"
        except msgspec.DecodeError as exc:
            record.error, record.detail = "no OpenAI stream", str(exc)
        record.ended_s = time.perf_counter()
        record.close()
        return record

    def _body(self, prompt: str) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if config.endpoint == "chat":
            body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": config.output_len}
        else:
            body |= {"prompt": prompt, "max_tokens": config.output_len}
        if config.ignore_eos:
            body["ignore_eos"] = True
        return body | config.extra_fields()

    async def _exchange(self, body: bytes, record: Record) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                _note_refusal(record, response.status, response.headers.get("Retry-After"), await response.read())
                return
            if not await _read_stream(response.content, record):
                record.error, record.detail = "cut off", "the stream ended without [DONE]"

    async def _first_model(self) -> str:
        url = f"{self._config.base_url}/models"
        remedy = "start the server, correct URL, or name the model with --model"
        try:
            async with self._session.get(url) as response:
                text = await response.text()
                if response.status != 200:
                    raise StartupError(f"{url} answers {response.status}: {text[:200]}; {remedy}")
                return str(msgspec.json.decode(text)["data"][0]["id"])
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise StartupError(f"nothing answers at {url}: {exc}; {remedy}") from exc
        except (msgspec.DecodeError, LookupError, TypeError) as exc:
            raise StartupError(f"{url} lists no models: {shown(text)}; {remedy}") from exc


async def _read_stream(content: aiohttp.StreamReader, record: Record) -> bool:
    """Note each event with the time at which its last byte was read; return whether [DONE] came."""
    carry, is_done = b"", False
    async for data in content.iter_any():
        now_s = time.perf_counter()
        *lines, carry = (carry + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    is_done = True
                else:
                    record.take(payload, now_s)
    return is_done


def _note_refusal(record: Record, status: int, retry_after: str | None, body: bytes) -> None:
    record.error = f"HTTP {status}" + (", refused" if status == _UNAVAILABLE else "")
    try:
        record.detail = _message(msgspec.json.decode(body, type=_ErrorBody).error)
    except msgspec.DecodeError:
        record.detail = body[:200].decode(errors="replace")
    if retry_after is not None and retry_after.strip().isdigit():
        record.retry_after_s = float(retry_after)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
