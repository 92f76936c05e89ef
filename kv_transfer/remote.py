"""Where a source's pools are reached over a network, and whether that is needed at all.

The host is that of the source's entry in the directory, which the puller dialled for the control
stream; port and key came over that stream, which has proven both ends. Opens no connection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KEY_BYTES = 32


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
