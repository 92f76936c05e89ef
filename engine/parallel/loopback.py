"""The loopback, where the processes of one engine find each other and nobody else finds them."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)


def make_store(fd: int | None = None) -> c10d.TCPStore:
    """Rank 0's: listens on a free port of the loopback, and nowhere else. `fd`: of a socket that
    listens there already."""
    with (
        socket.create_server((_LOOPBACK, 0)) if fd is None else socket.socket(fileno=fd) as listener
    ):
        port = listener.getsockname()[1]
        return c10d.TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def connect_store(port: int) -> c10d.TCPStore:
    """Another rank's view of it."""
    return c10d.TCPStore(
        _LOOPBACK, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False
    )


def gloo_options(to_connect: timedelta) -> Any:
    """Of a ProcessGroupGloo."""
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = to_connect
    return options
