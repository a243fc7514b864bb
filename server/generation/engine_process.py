"""Launches the engine as a process of its own and holds the server's ends of both rings. Main thread starts it.

Also the life of the rings: created here, unlinked as soon as the engine has attached, given up with the process.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ringserve.server.errors import StartupError
from ringserve.server.held_signals import held_signals
from ringserve.shm_transport import segment
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.errors import TransportError
from ringserve.shm_transport.heartbeat import Pulse, PulseReader
from ringserve.shm_transport.records import ENGINE_HANDLE, RecordKind
from ringserve.shm_transport.request_ring import Outbox
from ringserve.shm_transport.step_ring import Message, StepReader
from ringserve.shm_transport.strategies import make_waiter

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.005
_STOP_TIMEOUT_S = 2.0  # from the order to shut down to SIGKILL
_STEP, _REQUEST = "-step", "-request"  # ends of the rings' names
_SHUTDOWN_CALL = json.dumps({"method": "shutdown"}).encode()


class EngineProcess:
    """One engine process with its rings.

    Attributes:
        limits: What the engine said in READY: max_model_len, vocab_size, embedding_size, num_blocks.
        outbox: The request ring's end.
        reader: The step ring's end.
        waiter: Waits for `reader` in the event loop.
        is_stopping: Whether the engine was told to end.
        has_died: Whether `watch` has seen the process's end; costs nothing, where `death_cause` is a system call.
    """

    def __init__(
        self, command_config: dict[str, Any], rings: RingConfig, step_timeout_s: float, wait_strategy: str = "adaptive"
    ) -> None:
        """Start the engine and wait until it can serve.

        Args:
            command_config: The engine's JSON configuration, without its "link".
            rings: Geometry of the rings.
            step_timeout_s: A step open for longer means that the engine is stuck.
            wait_strategy: One of shm_transport.strategies.STRATEGIES.

        Raises:
            StartupError: If shared memory is too small, or the engine could not load.
        """
        self._step_timeout_s = step_timeout_s
        self._base_name, self._epoch = segment.new_base_name(), segment.new_epoch()
        self.is_stopping = self.has_died = False
        with contextlib.ExitStack() as undo:  # whatever ends this, Ctrl-C at any moment too, leaves no name behind
            undo.callback(self._unlink)
            step_segment, request_segment = self._create(rings)
            with held_signals():
                self.process = self._launch(command_config)
                undo.callback(self._end_process)
            self.reader = StepReader(step_segment)
            self.waiter = make_waiter(wait_strategy, self.reader.consumer, self.process.pid)
            undo.callback(self.waiter.close)
            self.outbox = Outbox(request_segment)
            self._pulse = PulseReader(step_segment)
            self._pidfd = os.pidfd_open(self.process.pid)
            undo.callback(os.close, self._pidfd)
            self.limits = self._await_ready()
            undo.pop_all()

    def watch(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
        """Call `on_death` in the loop, once, within milliseconds of the process's end."""

        def died() -> None:
            self.has_died = True
            loop.remove_reader(self._pidfd)
            on_death()

        loop.add_reader(self._pidfd, died)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `watch`."""
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)

    def death_cause(self) -> str | None:
        """Return how the process ended, or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if code < 0:
            return f"the engine process {self.process.pid} was killed by {signal.Signals(-code).name}"
        return f"the engine process {self.process.pid} exited with status {code}"

    def pulse(self) -> Pulse:
        """Return the engine's signs of life at this moment."""
        return self._pulse.read()

    def stuck_reason(self) -> str | None:
        """Return why the engine counts as stuck, or None."""
        return self.pulse().stuck_reason(self._step_timeout_s)

    def order_stop(self) -> None:
        """Tell the engine to end."""
        if not self.is_stopping:
            self.is_stopping = True
            self.outbox.call(0, _SHUTDOWN_CALL)
            self.outbox.flush()

    def stop(self) -> None:
        """End the engine: by order, by SIGKILL if it does not obey. Safe to call twice; blocks for up to 2 s."""
        if self.process.poll() is None:
            self.order_stop()
            deadline = time.monotonic() + _STOP_TIMEOUT_S
            while self.process.poll() is None and time.monotonic() < deadline:
                self.outbox.flush()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.02)
        self.kill()

    def kill(self) -> None:
        """End the engine now and give the rings up."""
        if self._pidfd < 0:
            return
        self._end_process()
        os.close(self._pidfd)
        self._pidfd = -1
        self.waiter.close()
        self._unlink()

    def _end_process(self) -> None:
        self.process.kill()
        self.process.wait()

    def _create(self, rings: RingConfig) -> tuple[segment.Segment, segment.Segment]:
        try:
            for name in segment.unlink_stale():
                logger.info("removed /dev/shm/%s, left by a server that was killed", name)
            step_segment = segment.create(self._base_name + _STEP, segment.step_header(rings, self._epoch))
            return step_segment, segment.create(self._base_name + _REQUEST, segment.request_header(rings, self._epoch))
        except TransportError as exc:
            raise StartupError(str(exc)) from exc

    def _launch(self, command_config: dict[str, Any]) -> subprocess.Popen[bytes]:
        link = {
            "step_ring": self._base_name + _STEP, "request_ring": self._base_name + _REQUEST, "epoch": self._epoch,
            "server_pid": os.getpid(),
        }  # fmt: skip
        # -P: no ./engine of the folder that the user happens to be in is run
        command = [sys.executable, "-P", "-m", "ringserve.engine", json.dumps({"link": link, **command_config})]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def _await_ready(self) -> dict[str, int]:
        while True:
            message = self._next_message()
            if message.kind == RecordKind.ATTACHED:
                self._unlink()
            elif message.kind == RecordKind.READY:
                limits: dict[str, int] = json.loads(message.body)
                return limits
            elif message.kind == RecordKind.ERROR and message.body[:8] == ENGINE_HANDLE.to_bytes(8, "little"):
                raise StartupError(f"the engine could not start: {message.body[8:].decode()}")
            else:
                raise StartupError(f"the engine sent {message.kind.name} before READY")

    def _next_message(self) -> Message:
        consumer = self.reader.consumer
        while True:
            has_ended = self.process.poll() is not None  # before the look: what it posted first is still drained
            if consumer.try_wait():
                record = self.reader.read()
                if isinstance(record, Message):
                    return record
            elif has_ended:
                raise StartupError(f"{self.death_cause()} while loading: its messages are above")
            else:
                # Not a semaphore wait: posix_ipc swallows what a signal handler raises in it, and Ctrl-C must end this.
                time.sleep(_READY_POLL_S)

    def _unlink(self) -> None:
        """Remove the rings' names, also those of a ring that a signal has left half made."""
        for suffix in (_STEP, _REQUEST):
            segment.unlink_names(self._base_name + suffix)
