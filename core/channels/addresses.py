"""The addresses at which a node and its engines are dialled, over a network and on one host.

Handshakes contain the dialled address, so both ends must write it alike. On one host, sockets are
in the kernel's abstract namespace: no path, nothing left behind by kill -9. Resolves no names.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
from pathlib import Path

from ..config import NodeConfig
from ..errors import HandoffFailed

HOST_ID_BYTES = 16
_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_UCRED = struct.Struct("=3i")  # struct ucred: pid, uid, gid


def addresses_of(node: NodeConfig) -> tuple[str, ...]:
    """host:port as others dial the node; the first one is announced in the directory."""
    host = socket.gethostname() if node.host in ("0.0.0.0", "::") else node.host
    listening = f"[{host}]:{node.port}" if ":" in host else f"{host}:{node.port}"
    return (*(node.advertise or listening).split(","), listening)


def engine_addresses_of(node: NodeConfig, port: int) -> tuple[str, ...]:
    """The same for the engine that listens at `port`."""
    listening = [f"{address.rpartition(':')[0]}:{port}" for address in addresses_of(node)]
    advertised = node.advertise_engine.split(",") if node.advertise_engine else []
    return (*advertised, *listening)


def host_of(address: str) -> str:
    """The host of host:port, where it may be an IPv6 address in brackets."""
    return address.rpartition(":")[0].strip("[]")


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of host:port, for dialling. Raises OSError if it has no valid port: the resolver
    would take a port beyond 65535 modulo 65536."""
    port = address.rpartition(":")[2]
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not is_number or int(port) >= 1 << 16:
        raise OSError(f"{address} is no address: it has no valid port")
    return host_of(address), int(port)


def host_id() -> bytes:
    """A digest of what processes that can share memory have in common: kernel, network namespace,
    user.

    The namespace counts because memory is passed over its abstract sockets. A host name would not
    do: hosts share names, and one host has several.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    text = f"{boot} {namespace} {os.geteuid()}"
    return hashlib.blake2b(text.encode(), digest_size=HOST_ID_BYTES).digest()


def socket_address(incarnation: str, purpose: str = "kv") -> bytes:
    """The abstract address at which an engine of this user listens; `purpose` is `kv` for its pool.

    Raises HandoffFailed unless `incarnation` is 32 hex digits: a peer must not choose the address.
    """
    if not _INCARNATION.fullmatch(incarnation):
        raise HandoffFailed("an incarnation has 32 hex digits")
    return f"\0baton-{purpose}-{os.geteuid()}-{incarnation}".encode()


def require_same_user(connection: socket.socket) -> None:
    """Raises HandoffFailed if the other end belongs to another user, according to the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    if uid != os.geteuid():
        raise HandoffFailed(f"the other end belongs to user {uid}")
