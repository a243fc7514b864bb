"""Looks after all connections with one timer: idle streams, clients that stop reading, requests that never arrive.

A token and a stream cost no timer: the kernel knows when a connection last sent, and the transport how much it holds.
Loop thread only.
"""

import asyncio
import math
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ringserve.server.http.protocol import RingserveProtocol

_PERIOD_S = 1.0
_TLS_END_S = 1.0  # for a client to confirm that a TLS connection ends; many never do
_LOOKS = 4  # in the shortest of the limits
_TCP_INFO_BYTES = 64
_LAST_DATA_SENT = struct.Struct("=44xI")  # tcpi_last_data_sent, ms, of Linux' struct tcp_info


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Seconds; 0: no such limit."""

    keep_alive_s: float  # a stream that has sent nothing for so long gets a comment
    write_timeout_s: float  # a client that has read nothing for so long, while output waits for it, is cut off
    receive_timeout_s: float  # a request's head must be there in that time, its body never pause for as long


class ConnectionSweep:
    """The timer. `start` it in the loop of the connections; it ends with the loop, or with `stop`."""

    def __init__(self, connections: Collection[Any], limits: ConnectionLimits) -> None:
        self._connections = connections
        self._limits = limits
        given = [limit for limit in (limits.keep_alive_s, limits.write_timeout_s, limits.receive_timeout_s) if limit]
        self._period_s = min([_PERIOD_S, *(limit / _LOOKS for limit in given)])
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look at every connection, and again each period."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in [*self._connections]:
            self._look(connection, now_s)
        self._timer = loop.call_later(self._period_s, self.start)

    def stop(self) -> None:
        """End it."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, connection: RingserveProtocol, now_s: float) -> None:
        limits = self._limits
        if connection.transport.is_closing():
            self._look_at_closing(connection, now_s)
            return
        if connection.flow.write_paused:
            if limits.write_timeout_s and connection.stalled_s(now_s) >= limits.write_timeout_s:
                connection.transport.abort()
            return
        if limits.receive_timeout_s and connection.receiving_s(now_s) >= limits.receive_timeout_s:
            connection.refuse_slow_request(limits.receive_timeout_s)
            return
        sink = connection.sink
        if limits.keep_alive_s and sink is not None and sink.on_idle is not None and now_s >= sink.next_look_s:
            quiet_s = min(_quiet_s(connection.transport), now_s - sink.opened_s)
            if quiet_s >= limits.keep_alive_s:
                sink.on_idle()
                quiet_s = 0.0
            sink.next_look_s = now_s + limits.keep_alive_s - quiet_s

    def _look_at_closing(self, connection: RingserveProtocol, now_s: float) -> None:
        """Cut off a client that takes neither the rest of its output nor, over TLS, the connection's end."""
        limit_s = self._limits.write_timeout_s if connection.num_unsent() else _TLS_END_S
        if limit_s and connection.stalled_s(now_s) >= limit_s:
            connection.transport.abort()


def _quiet_s(transport: asyncio.Transport) -> float:
    """Return how long ago the connection has last sent data; infinity where the kernel does not tell, as of UDS."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:
        return math.inf
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return math.inf
    return float(_LAST_DATA_SENT.unpack_from(info)[0]) / 1e3
