"""Rendezvous of the ranks of one engine on the loopback, out of reach of other hosts."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from ...core.errors import StartupFailed

_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)


def make_store(fd: int | None = None) -> c10d.TCPStore:
    """The store of rank 0, which listens on a free port of the loopback only. `fd`: a socket that
    already listens there."""
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
    """Connect another rank to the store at `port`."""
    return c10d.TCPStore(
        _LOOPBACK, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False
    )


def connect_gloo(
    store: c10d.Store, rank: int, size: int, timeouts_s: tuple[float, float], what: str
) -> Any:
    """A ProcessGroupGloo. `timeouts_s`: of connecting, and of an operation. `what`: the name of
    the processes in the message of StartupFailed, raised if they do not connect."""
    gloo: Any = c10d.ProcessGroupGloo
    to_connect, to_operate = (timedelta(seconds=timeout_s) for timeout_s in timeouts_s)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = to_connect
    try:
        group = gloo(store, rank, size, options)
    except RuntimeError as error:
        raise StartupFailed(f"gloo does not connect the {what}: {error}") from error
    group.set_timeout(to_operate)
    return group
