"""The address of a source's pools, the key for them, and whether they are reached over a network.

The host is that of the source's entry in the directory, which the puller dialled for the control
stream; port and key came over that stream, which authenticated both ends. Opens no connection.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from ...core.channels.addresses import HOST_ID_BYTES
from ...core.channels.handshake import Opening

KEY_BYTES = 32


def pair_key(engine_key: bytes, puller: str) -> bytes:
    """The key of one puller for the pools of the source that drew `engine_key`.

    All ranks of the source can check it, and no puller can derive another puller's key.
    """
    return hmac.digest(engine_key, b"puller" + bytes.fromhex(puller), "sha256")


def keys_of(pool: str, engine_key: bytes) -> Callable[[Opening], bytes | None]:
    """For handshakes: the key of each puller that wants this pool."""
    return lambda theirs: pair_key(engine_key, theirs.dialer) if theirs.listener == pool else None


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """What a source sends in its Hello to one puller: the address of its pools, and the key.

    `port` is 0 if they are not reached over a network.
    """

    host_id: Annotated[bytes, Meta(min_length=HOST_ID_BYTES, max_length=HOST_ID_BYTES)]
    port: Annotated[int, Meta(ge=0, lt=1 << 16)]
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)] = field(repr=False)

    def at(self, name: str, host: str, here: bytes, puller: str) -> RemotePool:
        """Rank 0's pool at `host`, for `puller` on the host with id `here`."""
        return RemotePool(name, host, self.port, self.key, self.host_id != here, puller)

    def of_puller(self, puller: str) -> PoolAccess:
        """For this puller, derived from the source's own, whose key never leaves it."""
        return replace(self, key=pair_key(self.key, puller))


@dataclass(frozen=True, slots=True)
class RemotePool:
    """One rank's pool as `puller` reaches it, with the puller's key. `name`: of rank 0 it is the
    engine's incarnation.

    `port` is 0 if it is not reached over a network; `is_elsewhere`: its memory cannot be shared
    with this process.
    """

    name: str
    host: str
    port: int
    key: bytes
    is_elsewhere: bool
    puller: str

    @property
    def address(self) -> str:
        """Its network address."""
        return f"{self.host}:{self.port}"

    def of_rank(self, name: str, host: str, port: int, *, is_apart: bool) -> RemotePool:
        """Another rank's pool of the same engine. `host`: empty if it is rank 0's. `is_apart`: the
        rank that reads it is not on the host of its own engine's rank 0."""
        is_elsewhere = self.is_elsewhere or bool(host) or is_apart
        host = host or self.host
        return replace(self, name=name, host=host, port=port, is_elsewhere=is_elsewhere)
