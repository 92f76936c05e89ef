"""A client that ended its direction of the connection while it waits for an answer: is it there?

    FIN ── our bytes ──┬─ taken: the client reads on (shutdown(SHUT_WR)), and gets its answer
                       └─ RST: it closed the socket, or is no more; its request is cancelled
The two look alike until something is sent, so something is sent: an interim answer before the
answer's head, a comment in a stream of events. Behind other beginnings the rest is on its way.
Knows no request; asyncio reads no more from such a connection, so the RST is looked for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from enum import Enum, auto

_FIRST_LOOK_S, _LOOK_S = 0.01, 0.05
_PROBE_LOOKS = 20  # looks between two probes: who half-closes first may go away later
_TCP_CLOSE = 7  # tcpi_state, the first byte of the kernel's struct tcp_info
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"  # of server-sent events, as an HTTP chunk


class WaitsFor(Enum):
    """What the client gets next."""

    HEAD = auto()
    EVENT = auto()
    REST = auto()
    NOTHING = auto()


_PROBES = {WaitsFor.HEAD: _INTERIM, WaitsFor.EVENT: _COMMENT}


class HalfClosed:
    """Watches one connection from its FIN on. `stop` it when the connection is lost."""

    def __init__(self, transport: asyncio.Transport, waits_for: Callable[[], WaitsFor]) -> None:
        self._transport = transport
        self._waits_for = waits_for
        self._num_looks = 0
        # What came with the FIN is on its way to its handler.
        self._timer = asyncio.get_running_loop().call_later(_FIRST_LOOK_S, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        waits_for = self._waits_for()
        if waits_for is WaitsFor.NOTHING:
            self._transport.close()
            return
        if _was_reset(self._transport):
            self._transport.abort()
            return
        if self._num_looks % _PROBE_LOOKS == 0 and waits_for in _PROBES:
            self._transport.write(_PROBES[waits_for])
        self._num_looks += 1
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)


def _was_reset(transport: asyncio.Transport) -> bool:
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return bool(info[0] == _TCP_CLOSE)
