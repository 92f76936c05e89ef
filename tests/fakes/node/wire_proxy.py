"""A TCP proxy that resets connections after some bytes, or drops the bytes of a direction.

    puller ══ WireProxy ══► source        ON: what the puller sends      BACK: what the source sends

It does not interpret the bytes. A reset goes to both ends, as a RST.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

ON, BACK = "on", "back"


class WireProxy:
    """Listens in front of a port of this host. `lost`: the directions whose bytes are dropped.

    `delay_s`: the delay before each `at_once_bytes` are passed on.
    """

    def __init__(self, target_port: int, host: str = "127.0.0.1", port: int = 0) -> None:
        self.lost: frozenset[str] = frozenset()
        self.delay_s = 0.0
        self.at_once_bytes = 65536
        self.num_connections = 0
        self.num_resets = 0
        self.resets_all = False  # every new connection
        self._target_port = target_port
        self._lock = threading.Lock()
        # By direction: bytes to pass until the event, and the directions lost then; None: a reset.
        self._cuts: dict[str, tuple[int, frozenset[str] | None]] = {}
        self._again_bytes: int | None = None
        self._open: set[tuple[socket.socket, socket.socket]] = set()
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut_after(self, num_bytes: int, way: str) -> None:
        """Reset once, after `num_bytes` more bytes in this direction."""
        with self._lock:
            self._cuts[way] = (num_bytes, None)

    def cut_every(self, num_bytes: int, way: str) -> None:
        """Reset each time after `num_bytes` more bytes in this direction."""
        self._again_bytes = num_bytes
        self.cut_after(num_bytes, way)

    def lose_after(self, num_bytes: int, way: str, lost: frozenset[str]) -> None:
        """Set `lost` once, after `num_bytes` more bytes in this direction."""
        with self._lock:
            self._cuts[way] = (num_bytes, lost)

    @property
    def has_cut(self) -> bool:
        """Whether all requested resets have happened."""
        return not self._cuts

    def reset_all(self) -> int:
        """Reset all open connections; returns their number."""
        with self._lock:
            pairs = list(self._open)
        for pair in pairs:
            self._reset(pair)
        return len(pairs)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.num_connections += 1
                try:
                    far = socket.create_connection(("127.0.0.1", self._target_port))
                except OSError:
                    _send_reset(near)
                    continue
                pair = (near, far)
                for end in pair:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open.add(pair)
                if self.resets_all:
                    self._reset(pair)
                for way, source, target in ((ON, near, far), (BACK, far, near)):
                    threading.Thread(
                        target=self._pass, args=(pair, way, source, target), daemon=True
                    ).start()

    def _pass(
        self,
        pair: tuple[socket.socket, socket.socket],
        way: str,
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(self.at_once_bytes):
                if self.delay_s:
                    time.sleep(self.delay_s)
                passed, is_reset = self._take(data, way)
                if passed:
                    target.sendall(passed)
                if is_reset:
                    self._reset(pair)
                    return
            if pair in self._open and way not in self.lost:  # the end of the stream is dropped too
                target.shutdown(socket.SHUT_WR)

    def _take(self, data: bytes, way: str) -> tuple[bytes, bool]:
        """Returns the bytes to pass on, and whether to reset the connection after them."""
        with self._lock:
            is_lost = way in self.lost
            if way in self._cuts:
                left, lost = self._cuts.pop(way)
                if len(data) < left:
                    self._cuts[way] = (left - len(data), lost)
                elif lost is None:
                    if self._again_bytes is not None:
                        self._cuts[way] = (self._again_bytes, None)
                    return data[:left], True
                else:
                    self.lost = lost
                    return data[:left] if way in lost else data, False
            return b"" if is_lost else data, False

    def _reset(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            if pair not in self._open:
                return
            self._open.discard(pair)
            self.num_resets += 1
        for end in pair:
            _send_reset(end)


def _send_reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Another thread may block in recv and keep the socket open: wake it, without a FIN.
        connection.shutdown(socket.SHUT_RD)
    connection.close()
