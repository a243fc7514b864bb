"""The engine's end of both rings: what comes in, what goes out, and the signs of life. Used by the loop's thread."""

import json
import struct
import time
from collections import deque

from ringserve.engine.interface import RequestFailedError
from ringserve.shm_transport import segment
from ringserve.shm_transport.errors import PeerDiedError
from ringserve.shm_transport.heartbeat import Heartbeat
from ringserve.shm_transport.messages import Data
from ringserve.shm_transport.process import PeerProcess
from ringserve.shm_transport.records import ENGINE_HANDLE, RecordKind, RingKind
from ringserve.shm_transport.request_ring import Inbox, InMessage
from ringserve.shm_transport.step import Step
from ringserve.shm_transport.step_ring import StepWriter

_U64 = struct.Struct("<Q")


class EngineLink:
    """Both rings, attached. The rings' names are unlinked by the server once it has read ATTACHED.

    Raises:
        SegmentError: If the rings are not there, or are not the ones that the server meant.
        PeerDiedError: If the server is gone.
    """

    def __init__(self, *, step_ring: str, request_ring: str, epoch: int, server_pid: int) -> None:
        step_segment = segment.attach(step_ring, RingKind.STEP, epoch)
        try:
            self._server = PeerProcess(server_pid)
        except ProcessLookupError as exc:
            raise PeerDiedError(f"the server process {server_pid} is gone") from exc
        self._inbox = Inbox(segment.attach(request_ring, RingKind.REQUEST, epoch))
        self._early: deque[InMessage] = deque()  # drained while the step ring was full
        self._writer = StepWriter(step_segment, on_full=self._while_full)
        self.heartbeat = Heartbeat(step_segment)
        self._writer.publish_message(RecordKind.ATTACHED)

    def drain(self) -> list[InMessage]:
        """Return the messages that are there, without waiting."""
        messages = [*self._early, *self._inbox.drain()]
        self._early.clear()
        return messages

    def wait(self, slice_s: float) -> list[InMessage]:
        """Wait up to `slice_s` for messages; [], after a look at the server, if there were none.

        Raises:
            PeerDiedError: If the server is gone.
        """
        if self._early:
            return self.drain()
        messages = self._inbox.wait(slice_s)
        if not messages:
            self._check_server()
        return messages

    def publish(self, step: Step) -> int:
        """Write one step record; return its stamp. Waits while the ring is full, for as long as the server lives."""
        published_ns = self._writer.publish(step)
        self._count_stalls()
        return published_ns

    def note_aborted(self, num_handles: int) -> None:
        """Have the next step records say that aborts have been carried out."""
        self._writer.num_aborted += num_handles
        self._writer.aborted_ns = time.monotonic_ns()

    def send_ready(self, limits: dict[str, int]) -> None:
        """Tell the server that requests may come."""
        self._writer.publish_message(RecordKind.READY, json.dumps(limits).encode())

    def send_failure(self, failure: RequestFailedError) -> None:
        """Tell the server that one request failed."""
        kind = RecordKind.REFUSAL if failure.is_refusal else RecordKind.ERROR
        self._writer.publish_message(kind, _U64.pack(failure.handle) + str(failure).encode())

    def send_data(self, data: Data) -> None:
        """Hand the server an array that a request asked for."""
        self._writer.publish_message(RecordKind.DATA, data.encode())

    def send_fatal(self, message: str) -> None:
        """Tell the server why the engine is about to exit."""
        self._writer.publish_message(RecordKind.ERROR, _U64.pack(ENGINE_HANDLE) + message.encode())

    def send_reply(self, call_id: int, body: dict[str, object]) -> None:
        """Answer a CALL."""
        self._writer.publish_message(RecordKind.REPLY, _U64.pack(call_id) + json.dumps(body).encode())

    def _count_stalls(self) -> None:
        self.heartbeat.count_stalls(self._writer.num_stalls, self._writer.stall_ns)

    def _while_full(self) -> None:
        self._count_stalls()
        self._check_server()
        self._early.extend(self._inbox.drain())

    def _check_server(self) -> None:
        if not self._server.is_alive():
            raise PeerDiedError(f"the server process {self._server.pid} is gone")
