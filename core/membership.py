"""What one engine announces to the cluster, and the directory of all. Hints for discovery, checked
again on connecting.

The types of its fields have what an entry of the directory (cluster/entries.py) may hold.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias

from msgspec import Meta

HEX_ID = r"\A[0-9a-f]{32}\Z"
_ADDRESS = r"\A(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}\Z"

_Text: TypeAlias = Annotated[str, Meta(max_length=1024)]
_Name: TypeAlias = Annotated[_Text, Meta(min_length=1)]
HexId: TypeAlias = Annotated[str, Meta(pattern=HEX_ID)]
_Address: TypeAlias = Annotated[_Text, Meta(pattern=_ADDRESS)]
Count: TypeAlias = Annotated[int, Meta(gt=0, le=2**40)]


class Role(enum.Enum):
    """What a node's engines are for. The engine itself can do both."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Member:
    """One engine of one node.

    `incarnation` (32 hex digits) is drawn anew at every start of the engine process and names it
    everywhere; `address` is the host:port of its node's gRPC server, `engine_address` where it
    listens itself; processes with the same `host_id` (32 hex digits) reach it by a unix socket.
    `name` and `device` ("cpu", "cuda:0,1", empty where nobody chose) are for people.
    `can_constrain`: takes requests with a constraint.
    """

    incarnation: HexId
    role: Role
    name: _Name
    address: _Address
    model: _Name
    fingerprint: _Name
    max_model_len: Count
    block_size: Count
    num_blocks: Count
    engine_address: _Address = ""
    host_id: HexId = ""
    device: _Text = ""
    can_constrain: bool = False


class Directory(Protocol):
    """Who is in the cluster. Entries are hints for discovery, never proof of life.

    `is_away`: it cannot be asked now.
    """

    @property
    def is_away(self) -> bool: ...

    async def announce(self, member: Member, ttl_s: float) -> None: ...

    async def withdraw(self, incarnation: str) -> None: ...

    def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the whole membership at once and again after every change."""
        ...

    async def close(self) -> None: ...
