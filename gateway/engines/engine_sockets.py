"""Sockets to an engine: a unix socket on its host, else TCP; and whether its process has ended."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from ...core.channels.addresses import (
    host_and_port,
    host_id,
    require_same_user,
    socket_address,
)
from ...core.channels.admission import GATEWAY, SOCKET, tune
from ...core.errors import BatonError
from ...core.membership import Member

_PROBE_S = 0.5
_PROBE_PAUSES_S = (0.0, 0.005, 0.02, 0.08)  # a process that ends closes its sockets one by one
_LIVES_S = 0.1  # a node whose port is open for so long does not end just now


def is_local(member: Member) -> bool:
    """Whether it is on this host."""
    return member.host_id == host_id().hex()


async def open_socket(member: Member) -> socket.socket:
    """Raises OSError, HandoffFailed."""
    if not is_local(member):
        return await _open_tcp(member.engine_address)
    sock = await _open(socket.AF_UNIX, socket_address(member.incarnation, SOCKET))
    try:
        require_same_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock


async def has_ended(member: Member) -> bool:
    """Whether nobody listens for this engine any more, while its node does."""
    try:
        async with asyncio.timeout(_PROBE_S):
            for pause_s in _PROBE_PAUSES_S:
                await asyncio.sleep(pause_s)
                try:
                    (await open_socket(member)).close()
                except ConnectionResetError:
                    continue  # it stopped to listen while we connected
                except ConnectionRefusedError:
                    with await _open_tcp(member.address) as sock:
                        return await _stays_open(sock)
    except (OSError, BatonError):  # TimeoutError too
        pass
    return False


async def _stays_open(sock: socket.socket) -> bool:
    """Whether the other end lives: of a process that was killed the port takes connections until
    its last thread has ended, behind its engine, and resets them then. Raises OSError."""
    try:
        async with asyncio.timeout(_LIVES_S):
            return bool(await asyncio.get_running_loop().sock_recv(sock, 1))
    except TimeoutError:  # it waits for us to speak, as over TLS
        return True


async def _open_tcp(address: str) -> socket.socket:
    """At the first that answers of the addresses that its name stands for. Raises OSError."""
    host, port = host_and_port(address)
    failure = OSError(f"{address} is no address")
    resolve = asyncio.get_running_loop().getaddrinfo
    try:
        found = await resolve(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, there in found:
            try:
                sock = await _open(family, there)
            except OSError as error:
                failure = error
            else:
                tune(sock, GATEWAY)
                return sock
    except ValueError as error:  # no name of a host
        raise failure from error
    raise failure


async def _open(family: int, there: Any) -> socket.socket:
    """Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(sock, there)
    except BaseException:
        sock.close()
        raise
    return sock
