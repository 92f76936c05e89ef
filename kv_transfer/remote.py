"""Where a source's pools are reached over a network, and whether that is needed at all.

The host is that of the source's entry in the directory, which the puller dialled for the control
stream; port and key came over that stream, which has proven both ends. Opens no connection.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

KEY_BYTES = 32
HOST_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class DataPort:
    """What a source says in its Hello: who may connect where. `key` is for linked peers alone."""

    host_id: bytes
    port: int
    key: bytes


@dataclass(frozen=True, slots=True)
class RemotePool:
    """One rank's pool from afar. `is_elsewhere`: its memory cannot be shared with this process."""

    host: str
    port: int
    key: bytes
    is_elsewhere: bool

    def at_port(self, port: int) -> RemotePool:
        """Another rank's pool of the same engine."""
        return replace(self, port=port)


def host_id() -> bytes:
    """What processes have in common that can share memory: kernel, network namespace, user.

    The namespace counts because memory is passed over its abstract sockets. A name would not do:
    hosts share names, and one host has several.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    text = f"{boot} {namespace} {os.geteuid()}"
    return hashlib.blake2b(text.encode(), digest_size=HOST_ID_BYTES).digest()


class Routes:
    """How each source is reached over a network, from what its link and its Hello say.

    The engine's thread tells it; those that open windows ask.
    """

    def __init__(self, here: bytes) -> None:
        """`here`: this process's `host_id`."""
        self._here = here
        self._hosts: dict[str, str] = {}
        self._remotes: dict[str, RemotePool] = {}

    def linked(self, incarnation: str, host: str) -> None:
        """A control stream to the source stands; it was dialled at `host`."""
        self._hosts[incarnation] = host

    def greeted(self, incarnation: str, data: DataPort | None) -> None:
        """The source has said what it is."""
        host = self._hosts.get(incarnation, "")
        if data is not None and host:
            is_elsewhere = data.host_id != self._here
            self._remotes[incarnation] = RemotePool(host, data.port, data.key, is_elsewhere)

    def lost(self, incarnation: str) -> None:
        """The control stream ended: its port and key are void."""
        self._hosts.pop(incarnation, None)
        self._remotes.pop(incarnation, None)

    def get(self, incarnation: str) -> RemotePool | None:
        return self._remotes.get(incarnation)
