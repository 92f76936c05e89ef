"""How processes of one user on one host tell that they are, and find and trust each other.

Sockets lie in the kernel's abstract namespace: no path, nothing left behind by kill -9.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
from pathlib import Path

from ..errors import HandoffFailed

HOST_ID_BYTES = 16
_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_UCRED = struct.Struct("=3i")  # struct ucred: pid, uid, gid


def host_id() -> bytes:
    """What processes have in common that can share memory: kernel, network namespace, user.

    The namespace counts because memory is passed over its abstract sockets. A name would not do:
    hosts share names, and one host has several.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    text = f"{boot} {namespace} {os.geteuid()}"
    return hashlib.blake2b(text.encode(), digest_size=HOST_ID_BYTES).digest()


def socket_address(incarnation: str, purpose: str = "kv") -> bytes:
    """The abstract address at which an incarnation of this user listens; for its pool, `kv`.

    Raises HandoffFailed unless it is 32 hex digits: a peer must not choose what is connected to.
    """
    if not _INCARNATION.fullmatch(incarnation):
        raise HandoffFailed("an incarnation has 32 hex digits")
    return f"\0baton-{purpose}-{os.geteuid()}-{incarnation}".encode()


def require_same_user(connection: socket.socket) -> None:
    """Raises HandoffFailed if another user sits at the other end; the kernel vouches for it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    if uid != os.geteuid():
        raise HandoffFailed(f"the other end belongs to user {uid}")
