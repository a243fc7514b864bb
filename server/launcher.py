"""Runs the server: port, engine, application, uvicorn; and ends it, by signal or with the engine.

Main thread only: the kernel ties the engine's life to the thread that started it.
"""

import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import math
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from ringserve.server.api.chat_settings import ChatSettings
from ringserve.server.api.response_store import ResponseStore
from ringserve.server.api.serving import Serving
from ringserve.server.app import build_app
from ringserve.server.errors import ShuttingDownError, StartupError
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.http.api_keys import guarded, read_keys
from ringserve.server.http.connection_sweep import ConnectionLimits, ConnectionSweep
from ringserve.server.http.cors import Cors, CorsPolicy
from ringserve.server.http.listener import accept, allow_connections, bound, is_loopback, listen, tls_context, url_of
from ringserve.server.http.page_guard import PageGuard
from ringserve.server.http.protocol import RingserveProtocol
from ringserve.server.http.request_body import BodyReader
from ringserve.server.http.turns import Turns
from ringserve.server.kept_memory import KeptMemory, trim_memory
from ringserve.server.settings.config import ServeConfig
from ringserve.server.telemetry.request_log import RequestLog
from ringserve.server.telemetry.throughput_log import ThroughputLog
from ringserve.server.telemetry.trace_headers import TraceHeadersLayer

if TYPE_CHECKING:
    from ringserve.server.telemetry.tracing import Tracer

logger = logging.getLogger(__name__)

_TOLD_LIMIT_S = 2.5  # how long clients may take to read that the engine has died
_HEALTH_503_S = 1.1  # /health answers 503 for so long after the last of them was told
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # where they are not ignored, as SIGHUP is by nohup
_LAST_WORDS_S = 0.1  # for errors to leave when a second signal ends everything, or connections are cut off
_CUT_OFF_S = 1.0  # for connections that were cut off to be gone; more than it takes
_DRAIN_POLL_S = 0.05
_GRACE_S = 1.0  # from the drain's deadline, when streams get their error event, to cutting connections
_DEATH_GRACE_S = 0.2  # the same after the engine's death: they had _TOLD_LIMIT_S before


class Server(uvicorn.Server):
    """uvicorn's server with a drain that tells its streams, and an exit status of its own."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, serve_config: ServeConfig, banner: str) -> None:
        super().__init__(config)
        self.exit_status = 0
        self._llm = llm
        self._serve_config = serve_config
        self._banner = banner
        limits = ConnectionLimits(
            keep_alive_s=serve_config.sse_keep_alive_interval,
            write_timeout_s=serve_config.write_timeout,
            receive_timeout_s=serve_config.receive_timeout,
        )
        self._sweep = ConnectionSweep(self.server_state.connections, limits)
        self._acceptors: list[asyncio.Server] = []
        self._death_task: asyncio.Task[None] | None = None
        self._throughput_log = ThroughputLog(llm.metrics)
        self._kept_memory = KeptMemory()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, say where, and watch the engine."""
        if not self._serve_config.keep_alive_on_engine_death:
            self._llm.call_on_death(self._on_engine_death)
        if not self._serve_config.disable_log_stats:
            self._throughput_log.start()
        await super().startup(sockets=[])  # it would give TLS handshakes a minute, whatever the limit
        make_protocol = functools.partial(
            RingserveProtocol, self.config, self.server_state, self.lifespan.state, turns=Turns()
        )
        (listener,) = sockets or []
        self._acceptors = await accept(listener, make_protocol, self.config.ssl, self._serve_config.receive_timeout)
        self._sweep.start()
        trim_memory()  # 18 MB that loading the tokenizer has left
        self._kept_memory.start()
        _announce(self._banner)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hear signals to end from here to the process's end: what comes after the drain must not disturb the rest."""
        for each in {*HANDLED_SIGNALS, *_heard_signals()}:  # uvicorn's also where a shell made them ignored
            signal.signal(each, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # a signal handler's
        """First signal: drain. Second: end at once. Neither is raised again afterwards: a drain exits with 0."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what is new, let what runs end, then tell those that are left.

        The port stays open meanwhile: /ready says 503, /health what is true, and new requests learn when to retry.
        """
        drain_s = self._serve_config.drain_timeout
        deadline_s = time.monotonic() + drain_s
        self._llm.drain()
        while self._llm.num_live and time.monotonic() < deadline_s and not self.force_exit:
            await asyncio.sleep(_DRAIN_POLL_S)
        if not self.force_exit:
            error = ShuttingDownError(f"the server is shutting down and its drain time of {drain_s:g} s is over")
            self._llm.fail_all(error)
        left_s = max(deadline_s - time.monotonic(), 0.0) + _GRACE_S  # for answers that are made, and on their way
        if self.exit_status:
            left_s = _DEATH_GRACE_S
        cutting_off = asyncio.get_running_loop().create_task(self._cut_off(left_s))
        self.config.timeout_graceful_shutdown = left_s + _CUT_OFF_S  # type: ignore[assignment]  # fractions too
        for acceptor in self._acceptors:
            acceptor.close()  # without wait_closed, as uvicorn has it: handshakes that never end would hold it up
        await super().shutdown(sockets)
        cutting_off.cancel()
        self._sweep.stop()
        self._kept_memory.stop()
        self._throughput_log.stop()
        if self.force_exit:
            self._llm.fail_all(ShuttingDownError("the server was told twice to end"))
            await self._cut_off(_LAST_WORDS_S)
            await self.lifespan.shutdown()  # which uvicorn leaves out then, and cancels with a traceback

    async def _cut_off(self, after_s: float) -> None:
        """End connections whose requests never came, or that nobody reads; uvicorn cancels them, with tracebacks."""
        await asyncio.sleep(after_s)
        connections: set[Any] = self.server_state.connections
        for connection in [*connections]:
            connection.refuse_at_end("the server is shutting down, and the request was not complete")
        await asyncio.sleep(_LAST_WORDS_S)
        for connection in [*connections]:
            connection.transport.abort()
        await asyncio.sleep(_DRAIN_POLL_S)  # for their tasks to end

    def _on_engine_death(self) -> None:
        self.exit_status = 1
        self._death_task = asyncio.get_running_loop().create_task(self._exit_after_death())

    async def _exit_after_death(self) -> None:
        deadline = time.monotonic() + _TOLD_LIMIT_S
        while self.server_state.tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.sleep(_HEALTH_503_S)
        self.should_exit = True


def serve(config: ServeConfig) -> int:
    """Serve until a signal or the engine's death; return the exit status.

    Raises:
        StartupError: If the port, the model or a flag is wrong.
    """
    started_s = time.monotonic()
    keys = read_keys(config)
    tls = tls_context(config)
    with _terminating_signals(), bound(config) as listener, _tracing(config) as tracer:
        llm = AsyncLLM.from_config(config)
        try:
            serving = _serving(config, llm)
            logger.info("configuration: %s; the engine's: %s", config.shown(), llm.engine_limits)
            if config.enable_log_requests:
                decode = llm.model.tokenizer.decode if config.log_prompts else None
                llm.metrics.on_finished.append(RequestLog(decode))
            if tracer is not None:
                llm.metrics.on_finished.append(tracer)
            banner = _banner(serving, config, url_of(listener, config), time.monotonic() - started_s)
            app = _layered(serving, config, keys, is_local=is_loopback(listener))
            server = Server(_uvicorn_config(config, app, tls), llm, config, banner)
            allow_connections()
            listen(listener, config)
            server.run(sockets=[listener])  # from here on its own signal handlers: a signal means drain
        finally:
            llm.kill()
    return server.exit_status


@contextlib.contextmanager
def _tracing(config: ServeConfig) -> "Iterator[Tracer | None]":
    """Make spans of requests until the end; import nothing where there is no endpoint for them."""
    if config.otlp_traces_endpoint is None:
        yield None
        return
    try:
        from ringserve.server.telemetry.tracing import Tracer
    except ImportError as exc:
        raise StartupError(
            f"--otlp-traces-endpoint needs OpenTelemetry, which is not installed ({exc}): pip install 'ringserve[otel]'"
        ) from exc
    with contextlib.closing(Tracer(config.otlp_traces_endpoint, importlib.metadata.version("ringserve"))) as tracer:
        yield tracer


def _serving(config: ServeConfig, llm: AsyncLLM) -> Serving:
    return Serving(
        llm=llm,
        model_names=_model_names(config, llm.model.directory_name),
        adapters=list(config.adapter_names),
        version=importlib.metadata.version("ringserve"),
        bodies=BodyReader(config.max_body_mb * 2**20),
        responses=ResponseStore(config.max_stored_responses),
        chat=ChatSettings.of(llm.model.chat_template, config.tool_call_parser, config.reasoning_parser),
    )


def _model_names(config: ServeConfig, directory_name: str) -> tuple[str, ...]:
    names = config.served_model_name or (config.model or directory_name,)
    if names[0] in config.adapter_names:
        raise StartupError(f"--adapters has an adapter {names[0]}: the model itself is served under that name")
    return names


def _layered(serving: Serving, config: ServeConfig, keys: tuple[str, ...], *, is_local: bool) -> ASGIApp:
    """Return the application inside the layers that the configuration asks for.

    A server for other machines cannot know by what names they call it: it checks those only if it is told them.
    """
    cors = CorsPolicy.of(config)
    app = guarded(build_app(serving, has_dev_routes=config.enable_dev_routes), keys, config)
    app = PageGuard(app, config.allowed_hosts if is_local or config.allowed_hosts else ("*",), cors)
    if config.allowed_origins:
        app = Cors(app, cors)
    return app if config.otlp_traces_endpoint is None else TraceHeadersLayer(app)


def _uvicorn_config(config: ServeConfig, app: ASGIApp, tls: ssl.SSLContext | None) -> uvicorn.Config:
    uvicorn_config = uvicorn.Config(
        app,
        root_path=config.root_path,
        loop="uvloop",
        ws="none",
        lifespan="on",
        timeout_keep_alive=config.keep_alive_timeout or math.inf,  # type: ignore[arg-type]  # fractions too
        log_config=None,  # its lines look like ours
        log_level="error",  # of what is wrong with requests their clients are told
        access_log=False,
        proxy_headers=False,  # nothing here looks at the client's address or the scheme
        server_header=False,
    )
    uvicorn_config.load()
    uvicorn_config.ssl = tls
    return uvicorn_config


@contextlib.contextmanager
def _terminating_signals() -> Iterator[None]:
    """Make a signal to end during start-up unwind, so that nothing is left behind; further ones do not disturb that."""

    def leave(signum: int, _: FrameType | None) -> None:
        for each in heard:  # not SIG_IGN: Python complains of one that had come before it
            signal.signal(each, lambda *_: None)
        sys.exit(128 + signum)

    heard = _heard_signals()
    previous = {each: signal.signal(each, leave) for each in heard}
    try:
        yield
    finally:
        for each, handler in previous.items():
            has_come = signal.getsignal(each) is not leave
            signal.signal(each, signal.SIG_IGN if has_come else handler)  # Python's own last steps need no other


def _heard_signals() -> list[signal.Signals]:
    return [each for each in _ENDING_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]


def _announce(banner: str) -> None:
    """Write to standard output; a full disk or a closed pipe there ends no server."""
    try:
        print(banner, flush=True)
    except OSError as exc:
        logger.warning("cannot write to standard output: %s; what was to be said is: %s", exc, banner)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own end fails


def _banner(serving: Serving, config: ServeConfig, url: str, elapsed_s: float) -> str:
    option, where = (f" --unix-socket {config.uds}", f", Unix socket {config.uds}") if config.uds else ("", "")
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"messages": {messages}, "temperature": 0, "stream": true}}'
    return (
        f"ringserve {serving.version} serves {serving.model_names[0]} at {url}/v1{where} (ready in {elapsed_s:.1f} s)\n"
        f"Try it:\n  curl -N{option} {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    )
